"""Train over thin wires: compressed gradients for distributed PyTorch.

Compressors lie under `thinwire.compressors`, policies under `thinwire.policies`, optimizers under `thinwire.optim`,
local updates under `thinwire.local`, and where pipelines keep messages under `thinwire.store`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from thinwire import compressors
from thinwire.aggregator import AggregatorAddress
from thinwire.api import compress, compress_ddp, compress_fsdp
from thinwire.collectives import CommunicationError, MessageError, PeerFailedError, SharedMemoryError, TransportError
from thinwire.compressors import parse, register
from thinwire.integrations.options import Checks, Network
from thinwire.plan import Plan
from thinwire.runtime import Decision, DisagreementError, ParityError, Stats, Wire
from thinwire.runtime.consistency import library_version

if TYPE_CHECKING:
    from thinwire import data, local, optim, policies, store
    from thinwire.integrations.fsdp import prefetch
    from thinwire.integrations.group_options import ProcessGroupOptions
    from thinwire.integrations.process_group import ProcessGroup, register_model
    from thinwire.pipeline.stage import CompressedStage, compress_stage
    from thinwire.pipeline.tensor_parallel import CompressedRowwiseParallel
    from thinwire.trainers import lightning_callback, trainer_callback

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
    "SharedMemoryError",
    "Stats",
    "TransportError",
    "Wire",
    "compress",
    "compress_ddp",
    "compress_fsdp",
    "compress_stage",
    "compressors",
    "data",
    "lightning_callback",
    "local",
    "optim",
    "parse",
    "policies",
    "prefetch",
    "register",
    "register_model",
    "store",
    "trainer_callback",
]

_MODULES = ("data", "local", "optim", "policies", "store", "trainers")
_LATE = {
    "CompressedRowwiseParallel": "thinwire.pipeline.tensor_parallel",
    "CompressedStage": "thinwire.pipeline.stage",
    "ProcessGroup": "thinwire.integrations.process_group",
    "ProcessGroupOptions": "thinwire.integrations.group_options",
    "compress_stage": "thinwire.pipeline.stage",
    "lightning_callback": "thinwire.trainers",
    "prefetch": "thinwire.integrations.fsdp",
    "register_model": "thinwire.integrations.process_group",
    "trainer_callback": "thinwire.trainers",
}


def __getattr__(name: str) -> Any:
    # What a training with DDP does not need, PyTorch's pipelining above all, is imported where it is used.
    if name in _MODULES:
        return import_module(f"thinwire.{name}")
    if name in _LATE:
        return getattr(import_module(_LATE[name]), name)
    if name == "__version__":
        return library_version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _make_process_group(creation: Any, options: Any) -> dist.ProcessGroup:
    from thinwire.integrations.process_group import ProcessGroup

    return ProcessGroup(creation, options)


dist.Backend.register_backend("thinwire", _make_process_group, extended_api=True, devices=["cpu", "cuda"])
