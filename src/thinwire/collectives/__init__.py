"""Collectives: their algorithms, the layout of their messages, and the transports that carry them."""

from thinwire.collectives.algorithms import (
    Algorithm as Algorithm,
    Hierarchical as Hierarchical,
    ScatterReduceAllGather as ScatterReduceAllGather,
    World as World,
    parse_algorithm as parse_algorithm,
)
from thinwire.collectives.allgather import gather_buffers as gather_buffers, gather_mean as gather_mean
from thinwire.collectives.device import (
    DeviceBuffers as DeviceBuffers,
    device_all_gather as device_all_gather,
    device_all_reduce as device_all_reduce,
    device_reduce_scatter as device_reduce_scatter,
)
from thinwire.collectives.device_transport import (
    DeviceGroupTransport as DeviceGroupTransport,
    DeviceTransport as DeviceTransport,
)
from thinwire.collectives.errors import (
    CommunicationError as CommunicationError,
    PeerFailedError as PeerFailedError,
    TransportError as TransportError,
)
from thinwire.collectives.failures import FailureDetector as FailureDetector, announce_error as announce_error
from thinwire.collectives.layout import (
    Chunk as Chunk,
    Layer as Layer,
    Layout as Layout,
    Shard as Shard,
    owned_parts as owned_parts,
    part_layout as part_layout,
    sharded_layout as sharded_layout,
)
from thinwire.collectives.loopback import (
    DeviceLoopbackTransport as DeviceLoopbackTransport,
    LoopbackTransport as LoopbackTransport,
)
from thinwire.collectives.message import (
    Clock as Clock,
    CollectiveCall as CollectiveCall,
    MessageError as MessageError,
    complete as complete,
)
from thinwire.collectives.reduction import (
    all_gather as all_gather,
    all_reduce as all_reduce,
    encoded as encoded,
    reduce_scatter as reduce_scatter,
)
from thinwire.collectives.shared_memory import (
    SharedMemoryError as SharedMemoryError,
    node_identity as node_identity,
    number_nodes as number_nodes,
)
from thinwire.collectives.shared_transport import (
    SharedMemoryTransport as SharedMemoryTransport,
    TransportChoice as TransportChoice,
    with_shared_memory as with_shared_memory,
)
from thinwire.collectives.summed import (
    SumRounds as SumRounds,
    packed_sums as packed_sums,
    sum_buffers as sum_buffers,
    summed_all_reduce as summed_all_reduce,
)
from thinwire.collectives.transport import (
    Arena as Arena,
    Buffers as Buffers,
    OutgoingMessage as OutgoingMessage,
    Pending as Pending,
    PendingWork as PendingWork,
    ProcessGroupTransport as ProcessGroupTransport,
    Transport as Transport,
    contiguous_values as contiguous_values,
    overwrite as overwrite,
    returned_zeros as returned_zeros,
    ring_bytes as ring_bytes,
    sent_bytes as sent_bytes,
)
