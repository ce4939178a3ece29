"""Collectives: how messages meet."""

from thinwire.collectives.exchange import Buffers, Exchange
from thinwire.collectives.layout import Layer, Layout, owned_parts
from thinwire.collectives.message import MessageError, PeerFailedError
from thinwire.collectives.scatter_reduce_allgather import complete, scatter_reduce_allgather
from thinwire.collectives.summed import sum_buffers, summed_all_reduce
from thinwire.collectives.transport import (
    LoopbackTransport,
    ProcessGroupTransport,
    Transport,
    TransportError,
    ring_bytes,
)

__all__ = [
    "Buffers",
    "Exchange",
    "Layer",
    "Layout",
    "LoopbackTransport",
    "MessageError",
    "PeerFailedError",
    "ProcessGroupTransport",
    "Transport",
    "TransportError",
    "complete",
    "owned_parts",
    "ring_bytes",
    "scatter_reduce_allgather",
    "sum_buffers",
    "summed_all_reduce",
]
