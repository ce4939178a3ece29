"""The FFT paper's claim, at equal bytes: less error than top-k, QSGD and TernGrad (sections 4.2.1 and 6)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from thinwire.compressors import FFT, QSGD, Chain, Compressor, TernGrad, TopK, parse

AGAINST = ("top-k", "top-k, values coded", "QSGD", "QSGD, max norm", "TernGrad")
"""The paper's three; top-k with its values in fewer bits, as FFT's are; and QSGD scaled by the largest magnitude."""

SETTINGS = {"top-k": "topk(density=0.15)", "QSGD": "qsgd(bits=3)", "TernGrad": "terngrad()"}
"""What the paper sets its FFT against (section 4.2, algorithm setup)."""

FFT_SETTINGS = ("fft(theta=0.85, bits=10, block=whole)", "fft(theta=0.85, bits=10)")
"""The paper's, which transforms each layer whole, and that in blocks."""


@dataclass(frozen=True)
class Point:
    """A compressor's relative error, and its bytes an element, with those of indices and bitmaps and without."""

    compressor: Compressor
    error: float
    bytes_per_element: float
    values_per_element: float

    def size(self, *, counted: bool) -> float:
        return self.bytes_per_element if counted else self.values_per_element


@dataclass(frozen=True)
class Finding:
    """FFT beside one other compressor. ``fft_error`` is None where no FFT of that many bytes was measured."""

    against: str
    point: Point
    counted: bool
    fft_error: float | None
    fft: str = ""
    """Spec of the FFT, where it is one that was measured, not interpolated."""

    @property
    def ratio(self) -> float | None:
        """FFT's error over the other's: below 1 the claim holds."""
        return None if self.fft_error is None else self.fft_error / self.point.error

    @property
    def holds(self) -> bool | None:
        return None if self.ratio is None else self.ratio < 1


def kind(compressor: Compressor) -> str | None:
    """Which of `AGAINST` it is; None for none."""
    if isinstance(compressor, Chain):
        return AGAINST[1] if _is_topk(compressor.first) else None
    if _is_topk(compressor):
        return AGAINST[0]
    if isinstance(compressor, QSGD):
        return AGAINST[2] if compressor.norm == "l2" else AGAINST[3]
    return AGAINST[4] if isinstance(compressor, TernGrad) else None


def _is_topk(compressor: Compressor) -> bool:
    return isinstance(compressor, TopK) and compressor.select == "exact"


def interpolated(curve: Sequence[tuple[float, float]], size: float) -> float | None:
    """Error at ``size`` bytes on a curve of (bytes, error), straight between its points where both are logarithms.

    None outside the curve: nothing is extrapolated.
    """
    points = sorted(curve)
    for at, error in points:
        if math.isclose(at, size, rel_tol=1e-9):
            return error
    for (low, before), (high, after) in pairwise(points):
        if low < size < high:
            share = math.log(size / low) / math.log(high / low)
            return math.exp((1 - share) * math.log(before) + share * math.log(after))
    return None


def fft_points(points: Sequence[Point]) -> list[Point]:
    """Those of one kind of FFT that differ in theta alone: of the kinds, the one with most points."""
    kinds: dict[tuple[object, ...], list[Point]] = {}
    for point in points:
        c = point.compressor
        if isinstance(c, FFT):
            kinds.setdefault((c.bits, c.block, c.mantissa, c.cast), []).append(point)
    return max(kinds.values(), key=len, default=[])


def at_equal_bytes(points: Sequence[Point]) -> list[Finding]:
    """Every point of each of `AGAINST` beside FFT at its bytes, indices and bitmaps counted and not."""
    ffts, findings = fft_points(points), []
    for counted in (True, False):
        curve = [(p.size(counted=counted), p.error) for p in ffts]
        for point in points:
            against = kind(point.compressor)
            if against and point.error > 0:
                size = point.size(counted=counted)
                findings.append(Finding(against, point, counted, interpolated(curve, size)))
    return sorted(findings, key=lambda f: (not f.counted, AGAINST.index(f.against), f.point.bytes_per_element))


def at_the_settings(points: Sequence[Point]) -> list[Finding]:
    """The paper's FFT beside its other settings, each at bytes of its own."""
    by_spec = {str(point.compressor): point for point in points}
    findings = []
    for spec in FFT_SETTINGS:
        fft = by_spec.get(str(parse(spec)))
        for against, other_spec in SETTINGS.items():
            other = by_spec.get(str(parse(other_spec)))
            if fft and other:
                findings.append(Finding(against, other, False, fft.error, str(fft.compressor)))
    return findings


def verdicts(findings: Sequence[Finding]) -> Iterator[tuple[str, bool, str]]:
    """(against, counted, what is found), in a few words, for all sizes of one kind together."""
    for counted in (True, False):
        for against in AGAINST:
            mine = [f for f in findings if (f.against, f.counted) == (against, counted)]
            if mine:
                yield against, counted, _verdict(mine)


def _verdict(findings: Sequence[Finding]) -> str:
    known = [f.ratio for f in findings if f.ratio is not None]
    outside = len(findings) - len(known)
    note = f"; {outside} of {len(findings)} lie outside the bytes that FFT was measured at" if outside else ""
    if not known:
        return "not comparable" + note
    good = sum(ratio < 1 for ratio in known)
    bad = ", ".join(str(f.point.compressor) for f in findings if f.holds is False)
    low, high = min(known), max(known)
    by = f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"
    word = (
        "holds"
        if good == len(known)
        else "does not hold"
        if not good
        else f"holds at {good} of {len(known)} sizes, not beside {bad}"
    )
    return f"{word}: FFT has {by} times its error{note}"
