"""Compressors turn tensors into fewer bytes, and back."""

from thinwire.compressors._core.bucketed import Bucketed
from thinwire.compressors._core.calls import CodecCall, SumCall
from thinwire.compressors._core.checks import GRADIENT_DTYPES, not_finite
from thinwire.compressors._core.coded import Coded, OnePass, used_bytes
from thinwire.compressors._core.compressor import Compressor, Count, Traits, Unsuited, Wrapper, needs_state, unwrap
from thinwire.compressors._core.integers import integer_square_sum
from thinwire.compressors._core.matrices import SummedMatrices
from thinwire.compressors._core.mixins import (
    Bounded,
    Clipping,
    ColdStart,
    FollowsOptimizer,
    Indexed,
    Learned,
    Saturating,
    Scheduled,
    StepEnd,
    WorldSized,
    at_step,
    cold_start,
    find_mixin,
    first_state,
    for_world,
    learns_at,
    teaches,
)
from thinwire.compressors._core.packed import Packed
from thinwire.compressors._core.rounding import rounded_for
from thinwire.compressors._core.segments import Key, Part, Parts, Piece, Segments
from thinwire.compressors._core.slots import LayerState, Slot, State
from thinwire.compressors._core.sparsifier import Chain, Sparsifier
from thinwire.compressors._core.spec import PRESETS, parse, register, registered
from thinwire.compressors._core.summed import Reduction, Subtract, Summed, SumShape, sum_alone
from thinwire.compressors.atomo import Atomo
from thinwire.compressors.cast import Cast
from thinwire.compressors.chunktopk import ChunkTopK
from thinwire.compressors.delta import Delta, check_stateless, coder_of, direct
from thinwire.compressors.dgc import DGC
from thinwire.compressors.ef import RESIDUAL, Feedback, ef
from thinwire.compressors.fft import FFT
from thinwire.compressors.gaussian import Gaussian
from thinwire.compressors.globaltopk import GlobalTopK
from thinwire.compressors.heuristic_intsgd import HeuristicIntSGD
from thinwire.compressors.int_diana import IntDIANA
from thinwire.compressors.intsgd import IntSGD
from thinwire.compressors.lattice import Lattice
from thinwire.compressors.levels import Levels
from thinwire.compressors.maxabs import MaxAbs
from thinwire.compressors.minmax import MinMax
from thinwire.compressors.natural import Natural
from thinwire.compressors.onebit import OneBit
from thinwire.compressors.powersgd import PowerSGD
from thinwire.compressors.qsgd import QSGD
from thinwire.compressors.randk import RandK
from thinwire.compressors.rangefloat import RangeFloat
from thinwire.compressors.raw import Raw, RawSum
from thinwire.compressors.shared_terngrad import SharedTernGrad
from thinwire.compressors.sign import Sign
from thinwire.compressors.terngrad import TernGrad
from thinwire.compressors.threshold import Threshold
from thinwire.compressors.topk import TopK
from thinwire.compressors.truncate import Truncate

for _compressor in (
    *(Atomo, Cast, ChunkTopK, Delta, DGC, FFT, Gaussian, GlobalTopK, HeuristicIntSGD),
    *(IntDIANA, IntSGD, Lattice, Levels, MaxAbs, MinMax, Natural, OneBit, PowerSGD, QSGD, RandK),
    *(RangeFloat, Raw, SharedTernGrad, Sign, TernGrad, Threshold, TopK, Truncate, direct, ef),
):
    register(_compressor)

__all__ = [
    "DGC",
    "FFT",
    "GRADIENT_DTYPES",
    "PRESETS",
    "QSGD",
    "RESIDUAL",
    "Atomo",
    "Bounded",
    "Bucketed",
    "Cast",
    "Chain",
    "ChunkTopK",
    "Clipping",
    "CodecCall",
    "Coded",
    "ColdStart",
    "Compressor",
    "Count",
    "Delta",
    "Feedback",
    "FollowsOptimizer",
    "Gaussian",
    "GlobalTopK",
    "HeuristicIntSGD",
    "Indexed",
    "IntDIANA",
    "IntSGD",
    "Key",
    "Lattice",
    "LayerState",
    "Learned",
    "Levels",
    "MaxAbs",
    "MinMax",
    "Natural",
    "OneBit",
    "OnePass",
    "Packed",
    "Part",
    "Parts",
    "Piece",
    "PowerSGD",
    "RandK",
    "RangeFloat",
    "Raw",
    "RawSum",
    "Reduction",
    "Saturating",
    "Scheduled",
    "Segments",
    "SharedTernGrad",
    "Sign",
    "Slot",
    "Sparsifier",
    "State",
    "StepEnd",
    "Subtract",
    "SumCall",
    "SumShape",
    "Summed",
    "SummedMatrices",
    "TernGrad",
    "Threshold",
    "TopK",
    "Traits",
    "Truncate",
    "Unsuited",
    "WorldSized",
    "Wrapper",
    "at_step",
    "check_stateless",
    "coder_of",
    "cold_start",
    "direct",
    "ef",
    "find_mixin",
    "first_state",
    "for_world",
    "integer_square_sum",
    "learns_at",
    "needs_state",
    "not_finite",
    "parse",
    "register",
    "registered",
    "rounded_for",
    "sum_alone",
    "teaches",
    "unwrap",
    "used_bytes",
]
