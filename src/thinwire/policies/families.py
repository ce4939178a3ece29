"""Families: the compressors that differ from a given one in its bits, rank, density or share of a spectrum alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

from thinwire.arguments import check_number
from thinwire.compressors import FFT, Chain, Compressor, Raw, UnsuitedError, Wrapper, ef, unwrap

_GEOMETRIC = 12
"""Number of members of a family whose errors take an encoding each and whose parameter is a share."""
_WHOLE = ("bits", "rank")
_LEAST_BUCKET = 32
"""Number of elements of the smallest bucket: its two scales cost 2 bits an element."""


def family(
    compressor: Compressor, bounds: tuple[float, float] | None = None, step: float | None = None
) -> tuple[Compressor, ...]:
    """Return the compressors like this one, itself among them, in ascending order of their parameter.

    With a default D the thesis (section 4.6.1) searches ``[D/2, 2D]`` in steps of 1 for bits and ranks, and
    ``[D/10, 10D]`` in steps of D/10 for a density. For the share of an FFT's spectrum that is kept, and for densities
    whose values are coded, there are 12 shares in ``[D/5, 5D]``. ``bounds`` and ``step`` are in the units of the
    parameter (bits, rank, density, share kept).

    Beyond a quantizer of the most bits are those with smaller buckets, whose errors are smaller, and ``raw``.
    With error feedback, those whose error can exceed their input are left out.

    Raises:
        ValueError: the compressor has no such parameter, nothing lies within ``bounds``, or ``bounds`` contain a
            compressor that must not have error feedback.
    """
    if isinstance(compressor, Wrapper):
        members = [compressor.around(member) for member in family(compressor.inner, bounds, step)]
        if bounds is not None:
            check_contracting(f"bounds={bounds}", [member for member in members if member != compressor])
        return tuple(member for member in members if member == compressor or contracts(member))
    name, default = _parameter(compressor)
    members: list[Compressor] = []
    for value in _values(compressor, name, default, bounds, step):
        try:
            members.append(_with(compressor, name, value))
        except ValueError:
            # Such a compressor cannot have this value: 9 bits, for example.
            continue
    if not members:
        raise ValueError(f"no {name} between {bounds} that {compressor} could have")
    if compressor not in members:
        members.append(compressor)
    listed = sorted(dict.fromkeys(members), key=parameter_value)
    if name == "bits" and listed[-1] == compressor and (bounds is None or bounds[1] > default):
        listed += _finer(compressor)
    return tuple(listed)


def _finer(compressor: Compressor) -> list[Compressor]:
    """Return quantizers of the most bits in smaller buckets, and no compression: all have smaller errors."""
    bucket, finer = getattr(compressor, "bucket", None), []
    if not isinstance(bucket, int) or getattr(compressor, "scale", "bucket") == "layer":
        return [Raw()]
    while (bucket := bucket // 2) >= _LEAST_BUCKET:
        changes: dict[str, Any] = {"bucket": bucket}
        finer.append(replace(compressor, **changes))
    return [*finer, Raw()]


def contracts(compressor: Compressor) -> bool:
    """Whether residuals stay bounded: the error inside error feedback is smaller than its input."""
    return not isinstance(compressor, Wrapper) or compressor.coder.traits.contracts


def check_contracting(where: str, compressors: Iterable[Compressor]) -> None:
    """Raise ``ValueError`` if one of ``compressors``, which were asked for, makes residuals grow."""
    growing = [str(compressor) for compressor in compressors if not contracts(compressor)]
    if growing:
        raise ValueError(
            f"{where} would offer {', '.join(growing)}: it can err by more than its input, so that the residual of "
            "error feedback grows from step to step and training diverges. Leave it out, or give it more bits or "
            "smaller buckets"
        )


def members_that_fit(
    compressor: Compressor, shape: Sequence[int], bounds: tuple[float, float] | None = None
) -> tuple[Compressor, ...]:
    """Return the members of a family, with fewer bits or a lower rank, that suit a layer which ``compressor`` does not.

    A layer of shape (16, 16, 3, 3) saves nothing by PowerSGD of rank 16, but does by ranks 1 to 7. Error feedback is
    added where it is wanted. Empty where no member suits the layer, or the compressor has no such parameter.
    """
    try:
        name, default = _parameter(unwrap(compressor))
    except ValueError:
        return ()
    if name not in _WHOLE:
        return ()
    low, high = bounds or (1, default)
    members = []
    for value in range(max(1, math.ceil(low)), math.floor(min(high, default)) + 1):
        try:
            member = with_parameter(compressor, value).fit(shape)
        except (UnsuitedError, ValueError):
            continue
        members.append(ef(member) if member.traits.wants_feedback else member)
    return tuple(filter(contracts, members))


def parameter_value(compressor: Compressor) -> float:
    """Return the compressor's bits, rank, density, or share of a spectrum: how much of a gradient it keeps."""
    return _parameter(unwrap(compressor))[1]


def parameter_name(compressor: Compressor) -> str:
    """Return the name of the parameter of `parameter_value`: ``bits``, ``rank``, ``density`` or ``kept``, the share of
    a spectrum."""
    return _parameter(unwrap(compressor))[0]


def with_parameter(compressor: Compressor, value: float) -> Compressor:
    """Return the same compressor with other bits, rank, density or share.

    Raises:
        ValueError: it cannot have this value.
    """
    if isinstance(compressor, Wrapper):
        return compressor.around(with_parameter(compressor.inner, value))
    return _with(compressor, _parameter(compressor)[0], value)


def with_share(compressor: Compressor, share: float) -> Compressor:
    """Return the compressor with ``share`` times its bits, rank or density, or with the least that it can have."""
    name, default = parameter_name(compressor), parameter_value(compressor)
    if name not in _WHOLE:
        return with_parameter(compressor, share * default)
    for value in range(max(1, round(share * default)), round(default)):
        try:
            return with_parameter(compressor, value)
        except ValueError:
            continue
    return compressor


def _parameter(compressor: Compressor) -> tuple[str, float]:
    if isinstance(compressor, Chain):
        return _parameter(compressor.first)
    if isinstance(compressor, FFT):
        if not isinstance(compressor.theta, float):
            raise ValueError(f"{compressor} has a schedule of its own: give theta a number to have it chosen by layer")
        return "kept", 1.0 - compressor.theta
    names = {f.name for f in fields(compressor)}
    for name in ("rank", "density", "bits"):
        if name in names:
            value = getattr(compressor, name)
            if isinstance(value, tuple):
                raise ValueError(
                    f"{compressor} has a schedule of its own: give {name} a number to have it chosen by layer"
                )
            return name, float(value)
    raise ValueError(
        f"{compressor} has no bits, rank, density or theta that could be chosen by layer: "
        "minmax, topk, powersgd, rangefloat and fft have"
    )


def _with(compressor: Compressor, name: str, value: float) -> Compressor:
    if isinstance(compressor, Chain):
        return replace(compressor, first=_with(compressor.first, name, value))
    changes: dict[str, Any] = {name: round(value) if name in _WHOLE else float(f"{value:.6g}")}
    if name == "kept":
        changes = {"theta": float(f"{1 - value:.6g}")}
    return replace(compressor, **changes)


def _values(
    compressor: Compressor, name: str, default: float, bounds: tuple[float, float] | None, step: float | None
) -> Sequence[float]:
    whole = name in _WHOLE
    shares = name == "kept" or isinstance(compressor, Chain)
    around = 2.0 if whole else 5.0 if shares else 10.0
    low, high = bounds or (default / around, default * around)
    if step is not None:
        check_number("step", step, above=0)
    if not 0 < low <= high:
        raise ValueError(f"bounds {bounds}: two numbers above 0, the lower one first")
    if whole:
        return range(max(1, math.ceil(low)), math.floor(high) + 1, max(1, round(step or 1)))
    high = min(high, 0.999 if name == "kept" else 1.0)
    if step is None and shares:
        return [low * (high / low) ** (i / (_GEOMETRIC - 1)) for i in range(_GEOMETRIC)]
    step = step or default / 10
    return [low + i * step for i in range(math.floor((high - low) / step * (1 + 1e-9)) + 1)]
