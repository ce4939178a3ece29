"""Families: what a compressor may become when its strength is chosen layer by layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from thinwire.compressors import FFT, Chain, Compressor, Wrapper, bare

_GEOMETRIC = 12
"""Members of a family whose errors take a pass each and whose parameter is a share."""


def family(
    compressor: Compressor, bounds: tuple[float, float] | None = None, step: float | None = None
) -> tuple[Compressor, ...]:
    """Compressors like this one, weaker and stronger, itself among them; the weakest last.

    With a default D the thesis (section 4.6.1) searches ``[D/2, 2D]`` in steps of 1 for bits and ranks, and
    ``[D/10, 10D]`` in steps of D/10 for a density. For the share of an FFT's spectrum that is kept, and for densities
    whose values are coded, there are 12 shares in ``[D/5, 5D]``. ``bounds`` and ``step`` are in the units of the
    parameter (bits, rank, density, share kept).

    Raises:
        ValueError: it has no such parameter, or nothing lies within ``bounds``.
    """
    if isinstance(compressor, Wrapper):
        return tuple(compressor.around(member) for member in family(compressor.inner, bounds, step))
    name, default = _strength(compressor)
    found: list[Compressor] = []
    for value in _values(compressor, name, default, bounds, step):
        try:
            found.append(_with(compressor, name, value))
        except ValueError:
            # Out of what such a compressor can be: 9 bits, say.
            continue
    if not found:
        raise ValueError(f"no {name} between {bounds} that {compressor} could have")
    if compressor not in found:
        found.append(compressor)
    return tuple(sorted(dict.fromkeys(found), key=lambda member: _strength(member)[1]))


def strength(compressor: Compressor) -> float:
    """How much of a gradient it keeps, in the units of its own kind: bits, rank, density, or share of a spectrum."""
    return _strength(bare(compressor))[1]


def parameter(compressor: Compressor) -> str:
    """What `strength` is a number of: ``bits``, ``rank``, ``density`` or ``kept``, the share of a spectrum."""
    return _strength(bare(compressor))[0]


def weaker(compressor: Compressor, factor: float) -> Compressor:
    """The same kind with about ``factor`` times its bits, rank, density or share: at least the least that there is."""
    if isinstance(compressor, Wrapper):
        return compressor.around(weaker(compressor.inner, factor))
    name, default = _strength(compressor)
    value = default * factor
    if name not in ("bits", "rank"):
        return _with(compressor, name, value)
    for whole in range(max(1, round(value)), round(default)):
        try:
            return _with(compressor, name, whole)
        except ValueError:
            # Fewer bits than such a compressor can have.
            continue
    return compressor


def _strength(compressor: Compressor) -> tuple[str, float]:
    if isinstance(compressor, Chain):
        return _strength(compressor.first)
    if isinstance(compressor, FFT):
        if not isinstance(compressor.theta, float):
            raise ValueError(f"{compressor} has a schedule of its own: give theta a number to have it chosen by layer")
        return "kept", 1.0 - compressor.theta
    names = {f.name for f in fields(compressor)}
    for name in ("rank", "density", "bits"):
        if name in names:
            return name, float(getattr(compressor, name))
    raise ValueError(
        f"{compressor} has no bits, rank, density or theta that could be chosen by layer: "
        "minmax, topk, powersgd, rangefloat and fft have"
    )


def _with(compressor: Compressor, name: str, value: float) -> Compressor:
    if isinstance(compressor, Chain):
        return replace(compressor, first=_with(compressor.first, name, value))
    changes: dict[str, Any] = {name: round(value) if name in ("bits", "rank") else float(f"{value:.6g}")}
    if name == "kept":
        changes = {"theta": float(f"{1 - value:.6g}")}
    return replace(compressor, **changes)


def _values(
    compressor: Compressor, name: str, default: float, bounds: tuple[float, float] | None, step: float | None
) -> Sequence[float]:
    whole = name in ("bits", "rank")
    shares = name == "kept" or isinstance(compressor, Chain)
    around = 2.0 if whole else 5.0 if shares else 10.0
    low, high = bounds or (default / around, default * around)
    if step is not None and not step > 0:
        raise ValueError(f"step must be above 0, not {step}: it lies between two candidates")
    if not 0 < low <= high:
        raise ValueError(f"bounds {bounds}: two numbers above 0, the lower one first")
    if whole:
        return range(max(1, math.ceil(low)), math.floor(high) + 1, max(1, round(step or 1)))
    high = min(high, 0.999 if name == "kept" else 1.0)
    if step is None and shares:
        return [low * (high / low) ** (i / (_GEOMETRIC - 1)) for i in range(_GEOMETRIC)]
    step = step or default / 10
    return [low + i * step for i in range(math.floor((high - low) / step * (1 + 1e-9)) + 1)]
