"""Error against bytes per element, as a picture."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any

from experiments.bench.claims import Point
from experiments.bench.families import FAMILIES, family
from thinwire.compressors import Chain, Compressor, Wrapper

# Okabe and Ito's colors, told apart by color-blind readers too, and two of Tol's; markers differ as well.
_LOOKS = {
    "min-max": ("#0072B2", "o"),
    "max-abs": ("#56B4E9", "s"),
    "QSGD": ("#E69F00", "^"),
    "floats": ("#CC79A7", "D"),
    "integers": ("#332288", "d"),
    "one bit": ("#000000", "P"),
    "top-k": ("#D55E00", "v"),
    "random": ("#777777", "X"),
    "FFT": ("#009E73", "*"),
    "low rank": ("#882255", "h"),
    "other": ("#999933", "p"),
}
_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?")
_LEADING = ("bits", "density", "theta", "rank", "lam", "gamma", "to")
_UNSAID = ("scaled",)
_FONT_POINTS = 7.0
_REACH = (0, 7, -7, 14, -14, 21, -21, 28, -28, 36, -36, 44, -44, 54, -54)
_NEAR = 14
_SHADE = 0.72
_ROUNDING = 2.0**-23


def draw(points: Sequence[Point], path: Path, title: str) -> None:
    """Write the picture to ``path``: SVG, or what its ending says. Points with no error beyond rounding are left out.

    Raises ``ImportError`` that says how to install matplotlib, ``ValueError`` where there is nothing to draw.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.patheffects import withStroke
    except ImportError as error:
        raise ImportError("--plot takes matplotlib: pip install '.[plot]'") from error
    shown = [point for point in points if point.error > _ROUNDING and point.bytes_per_element > 0]
    if not shown:
        raise ValueError("no compressor has an error to draw")
    figure = Figure(figsize=(12, 8), layout="constrained")
    axes: Any = figure.add_subplot()
    for name in [*FAMILIES, "other"]:
        mine = [point for point in shown if family(point.compressor) == name]
        color, marker = _LOOKS[name]
        for line in _lines(mine):
            axes.plot(*_places(line), color=color, linewidth=1, alpha=0.55, zorder=1)
        if mine:
            look = {
                "color": color,
                "marker": marker,
                "linestyle": "",
                "markersize": 11 if name == "FFT" else 7,
                "markeredgecolor": "white",
            }
            axes.plot(*_places(mine), label=name, markeredgewidth=0.5, zorder=2, **look)
    axes.set(xscale="log", yscale="log", title=title)
    axes.set(xlabel="bytes per element, indices and bitmaps counted", ylabel="relative L2 error of one message")
    axes.margins(0.08)
    axes.grid(alpha=0.25, which="both", linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left")
    for text in _label(figure, axes, shown):
        text.set_path_effects([withStroke(linewidth=2, foreground="white")])
    with matplotlib.rc_context({"svg.hashsalt": "thinwire"}):
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, format=path.suffix.removeprefix(".") or "svg", metadata=metadata, dpi=130)


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
        if leading or (value != field.default and field.name not in _UNSAID):
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


def _places(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [point.bytes_per_element for point in points], [point.error for point in points]


def _names(points: Sequence[Point]) -> list[tuple[Point, str]]:
    """What stands beside each point: a spec at the end of a line, along it only the number that changes."""
    named = []
    for line in _lines(points):
        for point in line[:-1]:
            number = _NUMBER.search(str(point.compressor))
            named.append((point, number[0] if number else short(point.compressor)))
        named.append((line[-1], short(line[-1].compressor)))
    return named


def _label(figure: Any, axes: Any, points: Sequence[Point]) -> Iterator[Any]:
    """Name every point where the least of other names and points is covered; yields the texts."""
    figure.draw_without_rendering()
    scale = figure.dpi / 72
    edge, legend = axes.get_window_extent(), axes.get_legend().get_window_extent()
    taken = [(legend.x0, legend.y0, legend.x1, legend.y1)]
    named = _names(points)
    marks = [tuple(axes.transData.transform((p.bytes_per_element, p.error))) for p, _ in named]
    taken += [(x - 4 * scale, y - 4 * scale, x + 4 * scale, y + 4 * scale) for x, y in marks]
    for (point, name), (x, y) in zip(named, marks, strict=True):
        color = _darker(_LOOKS[family(point.compressor)][0])
        trial = axes.text(0, 0, name, fontsize=_FONT_POINTS)
        size = trial.get_window_extent()
        trial.remove()
        places = []
        for up, side in product(_REACH, (1, 0, -1)):
            if side or up:
                left = x + side * 6 * scale - (1 - side) / 2 * size.width
                low = y + up * scale - size.height / 2
                box = (left, low, left + size.width, low + size.height)
                outside = left < edge.x0 or box[2] > figure.bbox.width or low < edge.y0 or box[3] > edge.y1
                cost = sum(_shared(box, other) for other in taken) + abs(up) * scale + (1e9 if outside else 0)
                places.append((cost, up, box))
        _, up, box = min(places)
        taken.append(box)
        leader = {"arrowstyle": "-", "color": color, "linewidth": 0.4, "shrinkA": 0, "shrinkB": 3}
        yield axes.annotate(
            name,
            (point.bytes_per_element, point.error),
            xytext=((box[0] - x) / scale, (box[1] - y) / scale),
            textcoords="offset points",
            fontsize=_FONT_POINTS,
            color=color,
            arrowprops=leader if abs(up) > _NEAR else None,
        )


def _darker(color: str) -> str:
    """Small letters take more contrast than markers."""
    return "#" + "".join(f"{int(int(color[at : at + 2], 16) * _SHADE):02x}" for at in (1, 3, 5))


def _shared(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """Area that two rectangles (left, bottom, right, top) share."""
    wide = min(one[2], other[2]) - max(one[0], other[0])
    high = min(one[3], other[3]) - max(one[1], other[1])
    return wide * high if wide > 0 and high > 0 else 0.0
