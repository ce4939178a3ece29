"""In-network aggregation: a process that adds up integers for workers, as a programmable switch would (SwitchML)."""

from thinwire.aggregator.client import (
    AggregatorAddress as AggregatorAddress,
    AggregatorClient as AggregatorClient,
    parse_address as parse_address,
    session_number as session_number,
)
from thinwire.aggregator.server import Aggregator as Aggregator, Counters as Counters, Limits as Limits
