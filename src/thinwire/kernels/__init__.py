"""Floor 0: arrays in, bytes out. Torch reference, native CPU core and Triton give the same bytes for the same key."""

from thinwire.kernels.layout import align, minmax_bytes, minmax_grain
from thinwire.kernels.native import CORE, cpu_level
from thinwire.kernels.ops import checksum, minmax_decode, minmax_encode, minmax_reduce, minmax_sum
from thinwire.kernels.rng import derive_key, site_id
from thinwire.kernels.sample import sample_indices
from thinwire.kernels.table import Table

FORMAT_VERSION: int = 1
"""Raised whenever the same call gives other bytes than before."""

HAVE_NATIVE: bool = CORE is not None
"""Whether CPU tensors go through the native core rather than torch operations."""

__all__ = [
    "FORMAT_VERSION",
    "HAVE_NATIVE",
    "Table",
    "align",
    "checksum",
    "cpu_level",
    "derive_key",
    "minmax_bytes",
    "minmax_decode",
    "minmax_encode",
    "minmax_grain",
    "minmax_reduce",
    "minmax_sum",
    "sample_indices",
    "site_id",
]
