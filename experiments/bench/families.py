"""Which compressors are measured, their families and sources, and the picture of their error against bytes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from thinwire.compressors import Chain, Coded, Compressor, Summed, Wrapper
from thinwire_tools import plots

SERIES: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("minmax(bits={}, bucket=128)", (1, 2, 3, 4, 6, 8)),
    ("minmax(bits={}, bucket=128, rounding=nearest)", (2, 4, 8)),
    ("minmax(bits={}, bucket=1024)", (4, 8)),
    ("lattice(bits={}, bucket=1024)", (4, 8)),
    ("levels(bits={}, bucket=1024)", (2, 4)),
    ("gaussian(bits={})", (2, 4)),
    ("maxabs(bits={})", (2, 4, 8)),
    ("maxabs(bits={}, scale=row, rounding=nearest)", (4,)),
    ("terngrad({})", ("", "clip=2.5", "bucket=256")),
    ("shared_terngrad", ("",)),
    ("qsgd(bits={})", (2, 3, 4, 6, 8)),
    ("qsgd(bits={}, norm=linf)", (3, 4)),
    ("qsgd(levels={}, bucket=layer)", (64,)),
    ("natural", ("",)),
    ("rangefloat(bits={})", (6, 8, 10)),
    ("cast({})", ("bf16", "fp16")),
    ("intsgd(bits={})", (8,)),
    ("intsgd(bits={}, rounding=determ)", (8,)),
    ("heuristic_intsgd(bits={})", (8, 32)),
    ("onebit(bucket={})", (64, 512)),
    ("sign", ("",)),
    ("sign(bucket={})", (128,)),
    ("topk(density={})", (0.001, 0.01, 0.05, 0.15, 0.3)),
    ("topk(density={}, select=sampled)", (0.01,)),
    ("topk(density={}) | minmax(bits=8)", (0.01, 0.05, 0.15)),
    ("globaltopk(density={})", (0.01, 0.05)),
    ("chunktopk(k={})", (64,)),
    ("threshold(lam={})", (0.001, 0.003)),
    ("randk(density={})", (0.01, 0.1)),
    ("ef(randk(density={}))", (0.1,)),
    ("truncate(gamma={})", (10,)),
    ("fft(theta={})", (0.995, 0.98, 0.95, 0.9, 0.85, 0.7, 0.5, 0.2)),
    ("fft(theta={}, bits=6)", (0.85,)),
    ("fft(theta=0.85, block={})", (256, 4096, "whole")),
    ("powersgd(rank={})", (1, 2, 4, 8, 16)),
    ("atomo(rank={})", (4,)),
)
"""Templates of specs, and what is put into them. Thresholds fit the demo's gradients, whose deviation is 0.0007."""

SMOKE = (
    *("minmax(bits=2, bucket=128)", "minmax(bits=4, bucket=128)", "levels(bits=4, min_numel=0)", "terngrad()"),
    *("qsgd(bits=3)", "natural", "cast(bf16)", "onebit", "threshold(lam=0.01)", "globaltopk(density=0.05)"),
    *("topk(density=0.15)", "topk(density=0.05) | minmax(bits=8)", "randk(density=0.1)", "powersgd(rank=2)"),
    *("fft(theta=0.95)", "fft(theta=0.85)", "fft(theta=0.3)"),
)

# Okabe and Ito's colors, told apart by color-blind readers too, and two of Tol's; markers differ as well.
FAMILIES = {
    "min-max": ("#0072B2", "o", ("minmax", "lattice", "levels", "gaussian")),
    "max-abs": ("#56B4E9", "s", ("maxabs", "terngrad", "shared_terngrad")),
    "QSGD": ("#E69F00", "^", ("qsgd",)),
    "floats": ("#CC79A7", "D", ("natural", "rangefloat", "cast")),
    "integers": ("#332288", "d", ("intsgd", "heuristic_intsgd")),
    "one bit": ("#000000", "P", ("onebit", "sign")),
    "top-k": ("#D55E00", "v", ("topk", "threshold", "globaltopk", "chunktopk")),
    "random": ("#777777", "X", ("randk", "truncate")),
    "FFT": ("#009E73", "*", ("fft",)),
    "low rank": ("#882255", "h", ("powersgd", "atomo")),
    "other": ("#999933", "p", ()),
}
"""Color, marker and compressors of each."""
_CITATION = re.compile(r"\(([^()]*(?:\b(?:19|20)\d\d\b|\bthesis\b|\bsection\b|\bS\d\b)[^()]*)\)")
_SENTENCE = re.compile(r"[.,:;](?:\s|$)")
_NAME = re.compile(r"\w+")


def default_specs() -> list[str]:
    return [template.format(value) for template, values in SERIES for value in values]


def family(compressor: Compressor) -> str:
    """Its family; "other" for one from another package."""
    names = [name for name in _NAME.findall(str(compressor)) if name not in ("ef", "dgc")]
    return next((title for title, (*_, members) in FAMILIES.items() if names and names[0] in members), "other")


def source(compressor: Compressor) -> str:
    """Where its formula comes from: the first work that its documentation, or that of its module, cites; or else what
    the former says first."""
    if isinstance(compressor, Wrapper):
        return source(compressor.inner)
    if isinstance(compressor, Chain):
        return f"{source(compressor.first)} | {source(compressor.values)}"
    kind = type(compressor)
    doc = inspect.getdoc(kind) or str(compressor)
    for text in (doc, inspect.getdoc(inspect.getmodule(kind)) or ""):
        cited = _CITATION.search(" ".join(text.split("\n\n")[0].split()))
        if cited:
            return cited[1]
    return _SENTENCE.split(" ".join(doc.split()))[0].replace("``", "")


def meets(compressor: Compressor) -> str:
    """How its messages meet others': "summed" by a native all-reduce, "coded" (owners add and encode again) or
    "gathered" (everybody decodes everybody's)."""
    if isinstance(compressor, Summed):
        return "summed"
    return "gathered" if isinstance(compressor, Coded) and compressor.gathered else "coded"


_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?")
_LEADING = ("bits", "density", "theta", "rank", "lam", "gamma", "to")
_ROUNDING = 2.0**-23


@dataclass(frozen=True)
class Point:
    """A compressor's relative error, and its bytes an element, with those of indices and bitmaps."""

    compressor: Compressor
    error: float
    bytes_per_element: float


def draw(points: Sequence[Point], path: Path, title: str) -> None:
    """Write the picture to ``path``, as SVG. Points with no error beyond rounding are left out.

    Raises ``ImportError`` that says how to install matplotlib, ``ValueError`` where there is nothing to draw.
    """
    shown = [point for point in points if point.error > _ROUNDING and point.bytes_per_element > 0]
    if not shown:
        raise ValueError("no compressor has an error to draw")
    x = "bytes per element, indices and bitmaps counted"
    figure, (axes,) = plots.canvas(1, titles=[title], x=x, y="relative L2 error of one message")
    figure.set_size_inches(12, 8)
    ends: list[tuple[Point, str]] = []
    for name, (color, marker, _) in FAMILIES.items():
        lines = list(_lines([point for point in shown if family(point.compressor) == name]))
        for line in lines:
            places = [point.bytes_per_element for point in line], [point.error for point in line]
            label = name if line is lines[0] else None
            axes.plot(*places, color=color, marker=marker, linewidth=1, markeredgecolor="white", label=label)
            ends.append((line[-1], color))
    axes.set(xscale="log", yscale="log")
    axes.margins(0.08)
    figure.draw_without_rendering()
    taken: list[Any] = []
    for point, color in ends:
        at, style = (point.bytes_per_element, point.error), {"fontsize": 7, "color": color}
        text = axes.annotate(short(point.compressor), at, xytext=(5, 3), textcoords="offset points", **style)
        box = text.get_window_extent()
        # Those for which there is no room are in the table.
        text.set_visible(not any(box.overlaps(other) for other in taken))
        taken += [box] if text.get_visible() else []
    plots.save(figure, path)


def short(compressor: Compressor) -> str:
    """A spec without what goes without saying: ``fft(0.85)``, ``minmax(4, bucket=1024)``."""
    if isinstance(compressor, Chain):
        return f"{short(compressor.first)} | {short(compressor.values)}"
    if isinstance(compressor, Wrapper):
        return f"ef({short(compressor.inner)})"
    shown = []
    for field in fields(compressor):
        value = getattr(compressor, field.name)
        leading = not shown and field.name in _LEADING
        if leading or (value != field.default and field.name != "scaled"):
            shown.append(str(value) if leading or isinstance(value, str) else f"{field.name}={value}")
    return compressor.spec_name + (f"({', '.join(shown)})" if shown else "")


def _lines(points: Sequence[Point]) -> Iterator[list[Point]]:
    """Points whose specs differ in numbers alone, from few bytes to many."""
    alike: dict[str, list[Point]] = {}
    for point in points:
        first = _NUMBER.search(str(point.compressor))
        spec = str(point.compressor)
        key = spec[: first.start()] + spec[first.end() :] if first else spec
        alike.setdefault(key, []).append(point)
    for line in alike.values():
        yield sorted(line, key=lambda point: point.bytes_per_element)
