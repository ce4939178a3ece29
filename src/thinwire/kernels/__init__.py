"""Floor 0: arrays in, bytes out. Torch reference, native CPU core and Triton give the same bytes for the same key."""

from thinwire.kernels.floats import (
    int_decode,
    int_round,
    levels_bytes,
    levels_decode,
    levels_encode,
    natural_bytes,
    natural_decode,
    natural_encode,
    rangefloat_bytes,
    rangefloat_decode,
    rangefloat_encode,
    rangefloat_eps,
)
from thinwire.kernels.layout import Format, Residual, align, bucketed_bytes, bucketed_grain
from thinwire.kernels.native import CORE, cpu_level
from thinwire.kernels.ops import bucketed_decode, bucketed_encode, bucketed_reduce, bucketed_sum, checksum
from thinwire.kernels.rng import derive_key, site_id
from thinwire.kernels.sample import sample_indices
from thinwire.kernels.shared import LINE_BYTES, Word
from thinwire.kernels.sparse import (
    abs_histogram,
    index_bytes,
    pack_indices,
    select_threshold,
    select_topk,
    sparse_add,
    sparse_zero,
    unpack_indices,
)
from thinwire.kernels.table import Table

FORMAT_VERSION: int = 3
"""Raised whenever the same call gives other bytes than before."""

HAVE_NATIVE: bool = CORE is not None
"""Whether CPU tensors go through the native core rather than torch operations."""

__all__ = [
    "FORMAT_VERSION",
    "HAVE_NATIVE",
    "LINE_BYTES",
    "Format",
    "Residual",
    "Table",
    "Word",
    "abs_histogram",
    "align",
    "bucketed_bytes",
    "bucketed_decode",
    "bucketed_encode",
    "bucketed_grain",
    "bucketed_reduce",
    "bucketed_sum",
    "checksum",
    "cpu_level",
    "derive_key",
    "index_bytes",
    "int_decode",
    "int_round",
    "levels_bytes",
    "levels_decode",
    "levels_encode",
    "natural_bytes",
    "natural_decode",
    "natural_encode",
    "pack_indices",
    "rangefloat_bytes",
    "rangefloat_decode",
    "rangefloat_encode",
    "rangefloat_eps",
    "sample_indices",
    "select_threshold",
    "select_topk",
    "site_id",
    "sparse_add",
    "sparse_zero",
    "unpack_indices",
]
