"""Compressors turn tensors into fewer bytes, and back."""

from thinwire.compressors._core.bucketed import Bucketed as Bucketed, Packed as Packed
from thinwire.compressors._core.coded import Coded as Coded, OnePass as OnePass, used_bytes as used_bytes
from thinwire.compressors._core.compressor import (
    GRADIENT_DTYPES as GRADIENT_DTYPES,
    Compressor as Compressor,
    Count as Count,
    Traits as Traits,
    UnsuitedError as UnsuitedError,
    Wrapper as Wrapper,
    needs_state as needs_state,
    not_finite as not_finite,
    unwrap as unwrap,
)
from thinwire.compressors._core.integers import integer_square_sum as integer_square_sum
from thinwire.compressors._core.matrices import SummedMatrices as SummedMatrices
from thinwire.compressors._core.mixins import (
    Bounded as Bounded,
    Clipping as Clipping,
    ColdStart as ColdStart,
    FollowsOptimizer as FollowsOptimizer,
    Indexed as Indexed,
    Learned as Learned,
    Saturating as Saturating,
    Scheduled as Scheduled,
    StepEnd as StepEnd,
    WorldSized as WorldSized,
    at_step as at_step,
    cold_start as cold_start,
    find_mixin as find_mixin,
    first_state as first_state,
    for_world as for_world,
    is_informative as is_informative,
    learns_at as learns_at,
)
from thinwire.compressors._core.rounding import rounded_for as rounded_for
from thinwire.compressors._core.segments import (
    CodecCall as CodecCall,
    Key as Key,
    Part as Part,
    Parts as Parts,
    Piece as Piece,
    Segments as Segments,
    SumCall as SumCall,
)
from thinwire.compressors._core.slots import LayerState as LayerState, Slot as Slot, State as State
from thinwire.compressors._core.sparsifier import Chain as Chain, Sparsifier as Sparsifier
from thinwire.compressors._core.spec import (
    PRESETS as PRESETS,
    parse as parse,
    register as register,
    registered as registered,
)
from thinwire.compressors._core.summed import (
    Reduction as Reduction,
    Subtract as Subtract,
    Summed as Summed,
    SumShape as SumShape,
    sum_alone as sum_alone,
)
from thinwire.compressors.atomo import Atomo as Atomo
from thinwire.compressors.chunktopk import ChunkTopK as ChunkTopK
from thinwire.compressors.delta import (
    Delta as Delta,
    check_stateless as check_stateless,
    direct as direct,
    message_coder as message_coder,
)
from thinwire.compressors.dgc import DGC as DGC
from thinwire.compressors.ef import RESIDUAL as RESIDUAL, Feedback as Feedback, ef as ef
from thinwire.compressors.fft import FFT as FFT
from thinwire.compressors.floats import Natural as Natural, RangeFloat as RangeFloat
from thinwire.compressors.intsgd import IntDIANA as IntDIANA, IntSGD as IntSGD
from thinwire.compressors.levels import Gaussian as Gaussian, Levels as Levels
from thinwire.compressors.maxima import HeuristicIntSGD as HeuristicIntSGD, SharedTernGrad as SharedTernGrad
from thinwire.compressors.powersgd import PowerSGD as PowerSGD
from thinwire.compressors.randk import RandK as RandK
from thinwire.compressors.raw import Cast as Cast, Raw as Raw, RawSum as RawSum
from thinwire.compressors.sign import OneBit as OneBit, Sign as Sign
from thinwire.compressors.topk import GlobalTopK as GlobalTopK, Threshold as Threshold, TopK as TopK
from thinwire.compressors.truncate import Truncate as Truncate
from thinwire.compressors.uniform import (
    QSGD as QSGD,
    Lattice as Lattice,
    MaxAbs as MaxAbs,
    MinMax as MinMax,
    TernGrad as TernGrad,
)

for _compressor in (
    *(Atomo, Cast, ChunkTopK, Delta, DGC, FFT, Gaussian, GlobalTopK, HeuristicIntSGD),
    *(IntDIANA, IntSGD, Lattice, Levels, MaxAbs, MinMax, Natural, OneBit, PowerSGD, QSGD, RandK),
    *(RangeFloat, Raw, SharedTernGrad, Sign, TernGrad, Threshold, TopK, Truncate, direct, ef),
):
    register(_compressor)
