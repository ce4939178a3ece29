"""In-network aggregation: a process that adds up integers for workers, as a programmable switch would (SwitchML)."""

from thinwire.aggregator.client import AggregatorAddress, AggregatorClient, parse_address, session_number
from thinwire.aggregator.server import Aggregator, Counters, Limits

__all__ = [
    "Aggregator",
    "AggregatorAddress",
    "AggregatorClient",
    "Counters",
    "Limits",
    "parse_address",
    "session_number",
]
