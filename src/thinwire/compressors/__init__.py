"""Compressors: what a tensor may become on the wire."""

from thinwire.compressors.base import Coded, Compressor, Count, Reduction, Summed, Unsuited, first_state, sum_alone
from thinwire.compressors.cast import Cast, RawSum
from thinwire.compressors.chain import Chain
from thinwire.compressors.checks import GRADIENT_DTYPES, check_choice, check_int, not_finite
from thinwire.compressors.delta import Delta, check_stateless, direct
from thinwire.compressors.dgc import DGC
from thinwire.compressors.ef import RESIDUAL, Wrapper, bare, ef
from thinwire.compressors.fft import FFT
from thinwire.compressors.heuristic_intsgd import HeuristicIntSGD
from thinwire.compressors.intsgd import IntSGD
from thinwire.compressors.lattice import Lattice
from thinwire.compressors.levels import Levels
from thinwire.compressors.maxabs import MaxAbs
from thinwire.compressors.minmax import MinMax
from thinwire.compressors.natural import Natural
from thinwire.compressors.norms import square_sum
from thinwire.compressors.onebit import OneBit, Sign
from thinwire.compressors.pieces import Key, LayerState, Part, Piece, Segments, Slot, State
from thinwire.compressors.powersgd import PowerSGD
from thinwire.compressors.qsgd import QSGD
from thinwire.compressors.randk import RandK
from thinwire.compressors.rangefloat import RangeFloat
from thinwire.compressors.raw import Raw
from thinwire.compressors.sparse import Sparsifier
from thinwire.compressors.spec import expression, parse, register, registered
from thinwire.compressors.terngrad import TernGrad
from thinwire.compressors.topk import GlobalTopK, Threshold, TopK
from thinwire.compressors.truncate import Truncate

for _make in (
    *(Cast, Delta, DGC, FFT, GlobalTopK, HeuristicIntSGD, IntSGD, Lattice, Levels, MaxAbs, MinMax, Natural, OneBit),
    *(PowerSGD, QSGD, RandK, RangeFloat, Raw, Sign, TernGrad, Threshold, TopK, Truncate, direct, ef),
):
    register(_make)

__all__ = [
    "DGC",
    "FFT",
    "GRADIENT_DTYPES",
    "QSGD",
    "RESIDUAL",
    "Cast",
    "Chain",
    "Coded",
    "Compressor",
    "Count",
    "Delta",
    "GlobalTopK",
    "HeuristicIntSGD",
    "IntSGD",
    "Key",
    "Lattice",
    "LayerState",
    "Levels",
    "MaxAbs",
    "MinMax",
    "Natural",
    "OneBit",
    "Part",
    "Piece",
    "PowerSGD",
    "RandK",
    "RangeFloat",
    "Raw",
    "RawSum",
    "Reduction",
    "Segments",
    "Sign",
    "Slot",
    "Sparsifier",
    "State",
    "Summed",
    "TernGrad",
    "Threshold",
    "TopK",
    "Truncate",
    "Unsuited",
    "Wrapper",
    "bare",
    "check_choice",
    "check_int",
    "check_stateless",
    "direct",
    "ef",
    "expression",
    "first_state",
    "not_finite",
    "parse",
    "register",
    "registered",
    "square_sum",
    "sum_alone",
]
