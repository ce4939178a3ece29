"""The Triton executions of :mod:`thinwire.kernels.floats`, by the names that the reference gives them."""

from thinwire.kernels.gpu_floats import natural_decode, natural_encode, rangefloat_decode, rangefloat_encode
from thinwire.kernels.gpu_integers import int_decode, int_round
from thinwire.kernels.gpu_levels import levels_decode, levels_encode

__all__ = [
    "int_decode",
    "int_round",
    "levels_decode",
    "levels_encode",
    "natural_decode",
    "natural_encode",
    "rangefloat_decode",
    "rangefloat_encode",
]
