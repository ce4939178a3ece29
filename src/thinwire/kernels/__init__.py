"""Kernels: tensors in, bytes out. The PyTorch reference, the native CPU core and Triton produce the same bytes."""

from thinwire.kernels.adam import (
    AdamGradient as AdamGradient,
    AdamStep as AdamStep,
    MovingAverage as MovingAverage,
    adam_apply as adam_apply,
    adam_normalize as adam_normalize,
)
from thinwire.kernels.factors import (
    MOST_NARROW_COLUMNS as MOST_NARROW_COLUMNS,
    narrow_product as narrow_product,
    orthonormal_basis as orthonormal_basis,
    set_product as set_product,
    subtract_product as subtract_product,
)
from thinwire.kernels.floats import (
    header_words as header_words,
    int_decode as int_decode,
    int_round as int_round,
    levels_bytes as levels_bytes,
    levels_decode as levels_decode,
    levels_encode as levels_encode,
    magnitudes_bytes as magnitudes_bytes,
    magnitudes_decode as magnitudes_decode,
    magnitudes_encode as magnitudes_encode,
    natural_bytes as natural_bytes,
    natural_decode as natural_decode,
    natural_encode as natural_encode,
    rangefloat_bytes as rangefloat_bytes,
    rangefloat_decode as rangefloat_decode,
    rangefloat_encode as rangefloat_encode,
    rangefloat_eps as rangefloat_eps,
)
from thinwire.kernels.format import (
    Format as Format,
    Residual as Residual,
    align as align,
    before_sum as before_sum,
    bucketed_bytes as bucketed_bytes,
    bucketed_grain as bucketed_grain,
)
from thinwire.kernels.native import (
    CORE,
    LINE_BYTES as LINE_BYTES,
    SharedCounter as SharedCounter,
    asynchronous as asynchronous,
    cpu_level as cpu_level,
    is_dense as is_dense,
    to_device as to_device,
)
from thinwire.kernels.norms import (
    SignedSum as SignedSum,
    power_of_two as power_of_two,
    signed_sums as signed_sums,
    square_sums as square_sums,
)
from thinwire.kernels.ops import (
    bucketed_decode as bucketed_decode,
    bucketed_encode as bucketed_encode,
    bucketed_reduce as bucketed_reduce,
    bucketed_sum as bucketed_sum,
    checksum as checksum,
    raw_decode as raw_decode,
    raw_encode as raw_encode,
    raw_sum as raw_sum,
    rows_add as rows_add,
    rows_scale as rows_scale,
)
from thinwire.kernels.rng import derive_key as derive_key, sample_indices as sample_indices, site_id as site_id
from thinwire.kernels.sparse import (
    abs_histogram as abs_histogram,
    index_bytes as index_bytes,
    pack_indices as pack_indices,
    select_threshold as select_threshold,
    select_topk as select_topk,
    sparse_add as sparse_add,
    sparse_zero as sparse_zero,
    unpack_indices as unpack_indices,
)
from thinwire.kernels.spectrum import (
    Received as Received,
    block_size as block_size,
    num_components as num_components,
    spectrum as spectrum,
    spectrum_decode as spectrum_decode,
    spectrum_encode as spectrum_encode,
)
from thinwire.kernels.table import Table as Table

FORMAT_VERSION: int = 3
"""Version of the bytes that kernels produce, increased when a call produces other bytes than in an earlier version."""

HAVE_NATIVE: bool = CORE is not None
"""Whether CPU tensors are processed by the native core rather than by PyTorch operations."""
