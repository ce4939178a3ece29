"""In-network aggregation: a process that adds up integers for workers, as a programmable switch would (SwitchML)."""

from thinwire.aggregator.server import Aggregator, Counters, Limits

__all__ = ["Aggregator", "Counters", "Limits"]
