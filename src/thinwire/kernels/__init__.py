"""Kernels: tensors in, bytes out. The PyTorch reference, the native CPU core and Triton produce the same bytes."""

from thinwire.kernels.adam import AdamGradient, AdamStep, Moving, adam_apply, adam_normalise
from thinwire.kernels.factors import (
    MOST_NARROW_COLUMNS,
    narrow_product,
    orthonormal_basis,
    set_product,
    subtract_product,
)
from thinwire.kernels.floats import (
    header_words,
    int_decode,
    int_round,
    levels_bytes,
    levels_decode,
    levels_encode,
    magnitudes_bytes,
    magnitudes_decode,
    magnitudes_encode,
    natural_bytes,
    natural_decode,
    natural_encode,
    rangefloat_bytes,
    rangefloat_decode,
    rangefloat_encode,
    rangefloat_eps,
)
from thinwire.kernels.format import Format, Residual, align, before_sum, bucketed_bytes, bucketed_grain
from thinwire.kernels.native import CORE, asynchronous, cpu_level, is_dense, to_device
from thinwire.kernels.norms import SignedSum, power_of_two, signed_sums, square_sums
from thinwire.kernels.ops import bucketed_decode, bucketed_encode, bucketed_reduce, bucketed_sum, checksum
from thinwire.kernels.rng import derive_key, site_id
from thinwire.kernels.rows import raw_decode, raw_encode, raw_sum, rows_add, rows_scale
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
from thinwire.kernels.spectrum import Received, block_of, num_components, spectrum, spectrum_decode, spectrum_encode
from thinwire.kernels.table import Table

FORMAT_VERSION: int = 3
"""It is increased when a call produces different bytes than in an earlier version."""

HAVE_NATIVE: bool = CORE is not None
"""Whether CPU tensors are processed by the native core rather than by PyTorch operations."""

__all__ = [
    "FORMAT_VERSION",
    "HAVE_NATIVE",
    "LINE_BYTES",
    "MOST_NARROW_COLUMNS",
    "AdamGradient",
    "AdamStep",
    "Format",
    "Moving",
    "Received",
    "Residual",
    "SignedSum",
    "Table",
    "Word",
    "abs_histogram",
    "adam_apply",
    "adam_normalise",
    "align",
    "asynchronous",
    "before_sum",
    "block_of",
    "bucketed_bytes",
    "bucketed_decode",
    "bucketed_encode",
    "bucketed_grain",
    "bucketed_reduce",
    "bucketed_sum",
    "checksum",
    "cpu_level",
    "derive_key",
    "header_words",
    "index_bytes",
    "int_decode",
    "int_round",
    "is_dense",
    "levels_bytes",
    "levels_decode",
    "levels_encode",
    "magnitudes_bytes",
    "magnitudes_decode",
    "magnitudes_encode",
    "narrow_product",
    "natural_bytes",
    "natural_decode",
    "natural_encode",
    "num_components",
    "orthonormal_basis",
    "pack_indices",
    "power_of_two",
    "rangefloat_bytes",
    "rangefloat_decode",
    "rangefloat_encode",
    "rangefloat_eps",
    "raw_decode",
    "raw_encode",
    "raw_sum",
    "rows_add",
    "rows_scale",
    "sample_indices",
    "select_threshold",
    "select_topk",
    "set_product",
    "signed_sums",
    "site_id",
    "sparse_add",
    "sparse_zero",
    "spectrum",
    "spectrum_decode",
    "spectrum_encode",
    "square_sums",
    "subtract_product",
    "to_device",
    "unpack_indices",
]
