"""Compressors: what a tensor may become on the wire."""

from thinwire.compressors.base import GRADIENT_DTYPES, Coded, Compressor, Piece, Segments, Slot
from thinwire.compressors.minmax import MinMax
from thinwire.compressors.raw import Raw
from thinwire.compressors.spec import parse, register

for _cls in (MinMax, Raw):
    register(_cls)

__all__ = ["GRADIENT_DTYPES", "Coded", "Compressor", "MinMax", "Piece", "Raw", "Segments", "Slot", "parse", "register"]
