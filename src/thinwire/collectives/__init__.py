"""Collectives: their algorithms, the layout of their messages, and the transports that carry them."""

from thinwire.collectives.algorithms import (
    Algorithm,
    AllGather,
    Binomial,
    Hierarchical,
    ParameterServer,
    Ring,
    ScatterReduceAllGather,
    World,
    parse_algorithm,
)
from thinwire.collectives.allgather import gather_buffers, gather_mean
from thinwire.collectives.contiguous import contiguous_values, overwrite
from thinwire.collectives.device import (
    DeviceBuffers,
    ShardBuffers,
    check_star,
    device_all_gather,
    device_all_reduce,
    device_reduce_scatter,
)
from thinwire.collectives.device_transport import DeviceGroupTransport, DeviceLoopbackTransport, DeviceTransport
from thinwire.collectives.errors import CommunicationError, PeerFailedError, TransportError
from thinwire.collectives.exchange import Exchange
from thinwire.collectives.failures import FailureDetector
from thinwire.collectives.layout import Chunk, Layer, Layout, Shard, owned_parts, part_layout, sharded_layout
from thinwire.collectives.meeting import announce_error
from thinwire.collectives.message import MessageError
from thinwire.collectives.nodes import node_identity, number_nodes
from thinwire.collectives.packed import PackedSum, packed_sums
from thinwire.collectives.reduction import all_gather, all_reduce, encoded, reduce_scatter
from thinwire.collectives.shared_memory import SharedMemoryError
from thinwire.collectives.shared_transport import SharedMemoryTransport, TransportChoice, with_shared_memory
from thinwire.collectives.stages import Clock, CollectiveCall, complete
from thinwire.collectives.summed import SumRounds, sum_buffers, summed_all_reduce
from thinwire.collectives.traffic import Outgoing, Traffic, sent_bytes
from thinwire.collectives.transport import (
    Buffers,
    ForeignGroupTransport,
    LoopbackTransport,
    Pending,
    PendingWork,
    ProcessGroupTransport,
    Transport,
    ring_bytes,
)

__all__ = [
    "Algorithm",
    "AllGather",
    "Binomial",
    "Buffers",
    "Chunk",
    "Clock",
    "CollectiveCall",
    "CommunicationError",
    "DeviceBuffers",
    "DeviceGroupTransport",
    "DeviceLoopbackTransport",
    "DeviceTransport",
    "Exchange",
    "FailureDetector",
    "ForeignGroupTransport",
    "Hierarchical",
    "Layer",
    "Layout",
    "LoopbackTransport",
    "MessageError",
    "Outgoing",
    "PackedSum",
    "ParameterServer",
    "PeerFailedError",
    "Pending",
    "PendingWork",
    "ProcessGroupTransport",
    "Ring",
    "ScatterReduceAllGather",
    "Shard",
    "ShardBuffers",
    "SharedMemoryError",
    "SharedMemoryTransport",
    "SumRounds",
    "Traffic",
    "Transport",
    "TransportChoice",
    "TransportError",
    "World",
    "all_gather",
    "all_reduce",
    "announce_error",
    "check_star",
    "complete",
    "contiguous_values",
    "device_all_gather",
    "device_all_reduce",
    "device_reduce_scatter",
    "encoded",
    "gather_buffers",
    "gather_mean",
    "node_identity",
    "number_nodes",
    "overwrite",
    "owned_parts",
    "packed_sums",
    "parse_algorithm",
    "part_layout",
    "reduce_scatter",
    "ring_bytes",
    "sent_bytes",
    "sharded_layout",
    "sum_buffers",
    "summed_all_reduce",
    "with_shared_memory",
]
