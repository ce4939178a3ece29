"""Compressors: what a tensor may become on the wire."""

from thinwire.compressors.base import (
    GRADIENT_DTYPES,
    Coded,
    Compressor,
    Piece,
    Segments,
    Slot,
    State,
    Summed,
    check_int,
)
from thinwire.compressors.cast import Cast
from thinwire.compressors.ef import ef
from thinwire.compressors.minmax import MinMax
from thinwire.compressors.randk import RandK
from thinwire.compressors.raw import Raw
from thinwire.compressors.spec import parse, register

for _make in (Cast, MinMax, RandK, Raw, ef):
    register(_make)

__all__ = [
    "GRADIENT_DTYPES",
    "Cast",
    "Coded",
    "Compressor",
    "MinMax",
    "Piece",
    "RandK",
    "Raw",
    "Segments",
    "Slot",
    "State",
    "Summed",
    "check_int",
    "ef",
    "parse",
    "register",
]
