"""Error against bytes per element, as a picture."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from thinwire.bench.claims import Point
from thinwire.bench.families import FAMILIES, family

# Okabe and Ito's colours, told apart by colour-blind readers too, and two of Tol's; markers differ as well.
_LOOKS = {
    "min-max": ("#0072B2", "o"),
    "max-abs": ("#56B4E9", "s"),
    "QSGD": ("#E69F00", "^"),
    "floats": ("#CC79A7", "D"),
    "one bit": ("#000000", "P"),
    "top-k": ("#D55E00", "v"),
    "random": ("#777777", "X"),
    "FFT": ("#009E73", "*"),
    "PowerSGD": ("#882255", "h"),
    "other": ("#999933", "p"),
}
_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?")
_NOISE = re.compile(r"\(\)|\(?majority=False(?:, )?|, mantissa=auto|, bucket=128(?=[,)])|, scaled=False")
_FONT_POINTS = 6.5
_REACH = (0, 7, -7, 14, -14, 21, -21)


def draw(points: Sequence[Point], path: Path, title: str) -> None:
    """Write the picture to ``path``: SVG, or what its ending says. Points without error are left out.

    Raises ``ImportError`` that says how to install matplotlib, ``ValueError`` where there is nothing to draw.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.patheffects import withStroke
    except ImportError as error:
        raise ImportError("--plot takes matplotlib: pip install 'thinwire[plot]'") from error
    shown = [point for point in points if point.error > 0 and point.bytes_per_element > 0]
    if not shown:
        raise ValueError("no compressor has an error to draw")
    figure = Figure(figsize=(12, 8), layout="constrained")
    axes: Any = figure.add_subplot()
    for name in [*FAMILIES, "other"]:
        mine = [point for point in shown if family(point.compressor) == name]
        colour, marker = _LOOKS[name]
        for line in _lines(mine):
            axes.plot(*_places(line), color=colour, linewidth=1, alpha=0.55, zorder=1)
        if mine:
            look = {
                "color": colour,
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


def short(point: Point) -> str:
    """A spec without what goes without saying."""
    return _NOISE.sub("", str(point.compressor)).replace(" | minmax(bits=8)", " | 8 bits").replace("()", "")


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


def _label(figure: Any, axes: Any, points: Sequence[Point]) -> list[Any]:
    """Name every point where the least of other names and points is covered."""
    figure.draw_without_rendering()
    scale = figure.dpi / 72
    marks = [tuple(axes.transData.transform((p.bytes_per_element, p.error))) for p in points]
    taken = [(x - 4 * scale, y - 4 * scale, x + 4 * scale, y + 4 * scale) for x, y in marks]
    edge = axes.get_window_extent()
    legend = axes.get_legend().get_window_extent()
    taken.append((legend.x0, legend.y0, legend.x1, legend.y1))
    found = []
    for point, (x, y) in zip(points, marks, strict=True):
        text = axes.annotate(
            short(point),
            (point.bytes_per_element, point.error),
            xytext=(0, 0),
            textcoords="offset points",
            fontsize=_FONT_POINTS,
            color=_LOOKS[family(point.compressor)][0],
            annotation_clip=False,
        )
        box = text.get_window_extent()
        width, height = box.width, box.height
        best, least = (6.0, 0.0, 0.0), float("inf")
        for up, side in product(_REACH, (1, -1)):
            left = x + 6 * scale if side > 0 else x - 6 * scale - width
            if up not in (0, 7, -7):
                left = x - width / 2
            low = y + up * scale - height / 2
            place = (left, low, left + width, low + height)
            outside = place[0] < edge.x0 or place[2] > figure.bbox.width or place[1] < edge.y0
            cost = sum(_shared(place, other) for other in taken) + abs(up) * 0.2 + (1e9 if outside else 0)
            if cost < least:
                best, least = (left, low, 0.0), cost
        taken.append((best[0], best[1], best[0] + width, best[1] + height))
        text.set_position(((best[0] - x) / scale, (best[1] - y) / scale))
        text.set_verticalalignment("bottom")
        found.append(text)
    return found


def _shared(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """Area that two rectangles (left, bottom, right, top) share."""
    wide = min(one[2], other[2]) - max(one[0], other[0])
    high = min(one[3], other[3]) - max(one[1], other[1])
    return wide * high if wide > 0 and high > 0 else 0.0
