"""Train over thin wires: compressed gradients for distributed PyTorch."""

from typing import TYPE_CHECKING, Any

from thinwire import data, optim
from thinwire.attach import (
    PipelineStats,
    ProcessGroup,
    ProcessGroupOptions,
    compress,
    lightning_callback,
    prefetch,
    register_model,
    trainer_callback,
)
from thinwire.collectives import MessageError, PeerFailedError, SharedMemoryError, TransportError
from thinwire.compressors import (
    DGC,
    FFT,
    QSGD,
    Cast,
    Chain,
    Compressor,
    Delta,
    GlobalTopK,
    HeuristicIntSGD,
    IntSGD,
    Lattice,
    Levels,
    MaxAbs,
    MinMax,
    Natural,
    OneBit,
    PowerSGD,
    RandK,
    RangeFloat,
    Raw,
    Sign,
    TernGrad,
    Threshold,
    TopK,
    Truncate,
    direct,
    ef,
    parse,
    register,
)
from thinwire.plan import (
    Accordion,
    Auto,
    Bayes,
    ByLink,
    KMeans,
    LGreco,
    Linear,
    LinkChoice,
    Plan,
    Policy,
    family,
    parse_policy,
)
from thinwire.store import Disk, Memory, StoreError, store_bytes
from thinwire.wire import (
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

if TYPE_CHECKING:
    from thinwire.attach.pipeline.stage import PipelineStage, compress_stage

__all__ = [
    "DGC",
    "FFT",
    "QSGD",
    "Accordion",
    "Auto",
    "Bayes",
    "ByLink",
    "Cast",
    "Chain",
    "Compressor",
    "Decision",
    "Delta",
    "DisagreementError",
    "Disk",
    "GlobalTopK",
    "HeuristicIntSGD",
    "IntSGD",
    "KMeans",
    "LGreco",
    "Lattice",
    "Levels",
    "Linear",
    "LinkChoice",
    "MaxAbs",
    "Memory",
    "MessageError",
    "MinMax",
    "Natural",
    "OneBit",
    "ParityError",
    "PeerFailedError",
    "PipelineStage",
    "PipelineStats",
    "Plan",
    "Policy",
    "PowerSGD",
    "ProcessGroup",
    "ProcessGroupOptions",
    "RandK",
    "RangeFloat",
    "Raw",
    "ShardedStats",
    "ShardedWire",
    "SharedMemoryError",
    "Sign",
    "Stats",
    "StatsLogger",
    "StoreError",
    "TernGrad",
    "Threshold",
    "Timeline",
    "TopK",
    "TransportError",
    "Truncate",
    "Wire",
    "compress",
    "compress_stage",
    "data",
    "direct",
    "ef",
    "family",
    "lightning_callback",
    "merge_timelines",
    "optim",
    "parse",
    "parse_policy",
    "prefetch",
    "register",
    "register_model",
    "store_bytes",
    "trainer_callback",
]

_LATE = ("PipelineStage", "compress_stage")


def __getattr__(name: str) -> Any:
    # PyTorch's pipelining takes longer to import than all of thinwire: only who uses it pays.
    if name in _LATE:
        from thinwire.attach.pipeline import stage

        return getattr(stage, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
