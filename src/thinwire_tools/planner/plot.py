"""Timelines of pipelines: what each stage computes, and what is on the links, as bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire_tools.plots import canvas, save

Row = tuple[str, Sequence[tuple[str, int, float, float]]]
"""A name, and bars: kind, micro-batch, begin and end in seconds."""
_COLOURS = {"forward": "#2f6fde", "backward": "#1b9e77", "weights": "#a6dcc8", "wire": "#d9822b"}
_LABELS = {"forward": "forward", "backward": "backward", "weights": "gradients of weights", "wire": "on the link"}
_NAMED_SHARE = 0.012
"""Of the axis: narrower bars have no room for a number."""


def draw_timelines(timelines: Mapping[str, Sequence[Row]], path: Path) -> None:
    """Write one panel below the other, over the same seconds, as SVG.

    Raises:
        ImportError: matplotlib is missing; says how to install it.
    """
    figure, _ = canvas(1, titles=[""], x="", y="")
    figure.clear()
    count = len(timelines)
    figure.set_size_inches(11, 0.9 + sum(0.62 + 0.3 * len(rows) for rows in timelines.values()))
    heights = [1.2 + len(rows) for rows in timelines.values()]
    panels = figure.subplots(count, 1, sharex=True, squeeze=False, height_ratios=heights).flatten().tolist()
    end = max(bar[3] for rows in timelines.values() for _, bars in rows for bar in bars)
    for axes, (title, rows) in zip(panels, timelines.items(), strict=True):
        draw_rows(axes, rows, end)
        axes.set_title(title, loc="left", fontsize="medium")
    panels[-1].set_xlabel("seconds since the step began")
    last = max(panels, key=lambda axes: len(axes.get_legend_handles_labels()[0]))
    panels[0].legend(
        *last.get_legend_handles_labels(),
        frameon=False,
        fontsize="small",
        ncols=4,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
    )
    save(figure, path, legends=False)


def draw_rows(axes: Any, rows: Sequence[Row], end: float) -> None:
    """Draw the bars of one step, over an axis that ends at ``end`` seconds."""
    shown = {bar[0] for _, bars in rows for bar in bars}
    for kind in (kind for kind in _COLOURS if kind in shown):
        axes.barh(0, 0, color=_COLOURS[kind], label=_LABELS[kind])
    for i, (_, bars) in enumerate(rows):
        height = 0.5 if all(kind == "wire" for kind, *_ in bars) else 0.8
        for kind, chunk, begin, until in bars:
            axes.barh(
                i, until - begin, left=begin, height=height, color=_COLOURS[kind], edgecolor="white", linewidth=0.4
            )
            if until - begin > _NAMED_SHARE * end:
                axes.text(
                    (begin + until) / 2, i, str(chunk), ha="center", va="center", fontsize="x-small", color="white"
                )
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.01 * end)
    axes.spines[["top", "right"]].set_visible(False)
    axes.axvline(max(bar[3] for _, bars in rows for bar in bars), color="#30343b", linestyle="--", linewidth=0.8)
