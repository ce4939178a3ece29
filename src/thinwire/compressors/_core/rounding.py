"""The rounding of quantizers whose spec has no ``rounding=``: it depends on what is compressed."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Literal

from thinwire.compressors._core.coded import Coded
from thinwire.compressors._core.sparsifier import Chain
from thinwire.compressors.uniform import MaxAbs, MinMax

_NEAREST_BITS = {"weights": 6, "deltas": 4, "feedback": 8}
_MIDRISE_DELTA_BITS = 2


@lru_cache
def rounded_for(what: Literal["weights", "deltas", "feedback"], compressor: Coded) -> Coded:
    """Return ``compressor`` with its rounding set for weights, changes of activations (``delta(...)``) or gradients
    with error feedback.

    A spec with ``rounding=`` keeps it. Otherwise, gradients are rounded stochastically, which is unbiased, so that
    errors average out over ranks and steps. In three cases they do not. Weights are quantized from full precision in
    every step, so rounding to nearest builds up no bias; up to 6 bits it ends at a lower loss than stochastic rounding
    (thesis, Table 5.2; ``python -m experiments qsdp --parts rounding``). The error of a delta is part of the next
    delta, so only its size counts (AQ-SGD, Theorem 3.1): up to 4 bits are rounded to nearest. `MaxAbs` of 2 bits uses
    all four codes (``midrise``): with a level at zero there are three, which lose 0.77 of Gaussian deltas, more than
    the theorem's 0.71, and the four lose 0.42. At 3 bits a level at zero costs less (0.28 against 0.21) than it saves
    where half of the deltas are zero, as behind a ReLU (0.25 against 0.38), and with it no delta can lose more than
    there is to it (``benchmarks/pipelines/changes.json``). With error feedback, a step's error is sent later, so
    again only its size counts: that of rounding to nearest is 0.53 to 0.70 of stochastic rounding's.
    """
    if isinstance(compressor, Chain):
        values = rounded_for(what, compressor.values)
        return compressor if values is compressor.values else replace(compressor, values=values)
    if not isinstance(compressor, MinMax | MaxAbs) or compressor.rounding != "auto":
        return compressor
    if compressor.bits > _NEAREST_BITS[what]:
        return compressor
    if isinstance(compressor, MaxAbs) and what == "deltas" and compressor.bits == _MIDRISE_DELTA_BITS:
        return replace(compressor, rounding="nearest", midrise=True)
    return replace(compressor, rounding="nearest")
