"""Collectives: how messages meet."""

from thinwire.collectives.allgather import allgather
from thinwire.collectives.device import DeviceBuffers, device_all_reduce
from thinwire.collectives.device_transport import DeviceGroupTransport, DeviceLoopbackTransport, DeviceTransport
from thinwire.collectives.exchange import Buffers, Exchange
from thinwire.collectives.layout import Chunk, Layer, Layout, owned_parts
from thinwire.collectives.message import MessageError, PeerFailedError
from thinwire.collectives.scatter_reduce_allgather import scatter_reduce_allgather
from thinwire.collectives.stages import complete
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
    "Chunk",
    "DeviceBuffers",
    "DeviceGroupTransport",
    "DeviceLoopbackTransport",
    "DeviceTransport",
    "Exchange",
    "Layer",
    "Layout",
    "LoopbackTransport",
    "MessageError",
    "PeerFailedError",
    "ProcessGroupTransport",
    "Transport",
    "TransportError",
    "allgather",
    "complete",
    "device_all_reduce",
    "owned_parts",
    "ring_bytes",
    "scatter_reduce_allgather",
    "sum_buffers",
    "summed_all_reduce",
]
