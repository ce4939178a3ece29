"""Floor 0: arrays in, bytes out. Torch reference, native CPU core and Triton give the same bytes for the same key."""

from thinwire.kernels.layout import Format, Residual, align, bucketed_bytes, bucketed_grain
from thinwire.kernels.native import CORE, cpu_level
from thinwire.kernels.ops import bucketed_decode, bucketed_encode, bucketed_reduce, bucketed_sum, checksum
from thinwire.kernels.rng import derive_key, site_id
from thinwire.kernels.sample import sample_indices
from thinwire.kernels.table import Table

FORMAT_VERSION: int = 2
"""Raised whenever the same call gives other bytes than before."""

HAVE_NATIVE: bool = CORE is not None
"""Whether CPU tensors go through the native core rather than torch operations."""

__all__ = [
    "FORMAT_VERSION",
    "HAVE_NATIVE",
    "Format",
    "Residual",
    "Table",
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
    "sample_indices",
    "site_id",
]
