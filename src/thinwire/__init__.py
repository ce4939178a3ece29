"""Train over thin wires: compressed gradients for distributed PyTorch.

Compressors lie under `thinwire.compressors`, policies under `thinwire.policies`, optimizers under `thinwire.optim`,
local updates under `thinwire.local`, and where pipelines keep messages under `thinwire.store`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from thinwire import compressors, data, local, optim, policies, store
from thinwire.api import compress, compress_ddp, compress_fsdp
from thinwire.collectives import (
    AggregatorAddress,
    CommunicationError,
    MessageError,
    PeerFailedError,
    SharedMemoryError,
    TransportError,
)
from thinwire.compressors import parse, register
from thinwire.integrations.fsdp import prefetch
from thinwire.integrations.group_options import ProcessGroupOptions
from thinwire.integrations.options import Checks, Network
from thinwire.integrations.process_group import ProcessGroup, register_backend, register_model
from thinwire.plan import Plan
from thinwire.runtime import (
    Decision,
    DisagreementError,
    ParityError,
    ShardedStats,
    ShardedWire,
    Stats,
    StatsLogger,
    Timeline,
    Wire,
    merge_timelines,
)
from thinwire.trainers import accelerate_handler, lightning_strategy, trainer_callback

if TYPE_CHECKING:
    from thinwire.pipeline.stage import CompressedStage, compress_stage
    from thinwire.pipeline.tensor_parallel import CompressedRowwiseParallel

__all__ = [
    "AggregatorAddress",
    "Checks",
    "CommunicationError",
    "CompressedRowwiseParallel",
    "CompressedStage",
    "Decision",
    "DisagreementError",
    "MessageError",
    "Network",
    "ParityError",
    "PeerFailedError",
    "Plan",
    "ProcessGroup",
    "ProcessGroupOptions",
    "ShardedStats",
    "ShardedWire",
    "SharedMemoryError",
    "Stats",
    "StatsLogger",
    "Timeline",
    "TransportError",
    "Wire",
    "accelerate_handler",
    "compress",
    "compress_ddp",
    "compress_fsdp",
    "compress_stage",
    "compressors",
    "data",
    "lightning_strategy",
    "local",
    "merge_timelines",
    "optim",
    "parse",
    "policies",
    "prefetch",
    "register",
    "register_model",
    "store",
    "trainer_callback",
]

register_backend()

_LATE = {
    "CompressedRowwiseParallel": "thinwire.pipeline.tensor_parallel",
    "CompressedStage": "thinwire.pipeline.stage",
    "compress_stage": "thinwire.pipeline.stage",
}


def __getattr__(name: str) -> Any:
    # PyTorch's pipelining and tensor parallelism take longer to import than all of thinwire: only who uses them pays.
    if name in _LATE:
        return getattr(import_module(_LATE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
