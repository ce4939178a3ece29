"""Pictures of several papers, in addition to `thinwire_tools.plots`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def bars(axes: Any, shown: Sequence[tuple[str, str, float]]) -> None:
    """Draw horizontal bars, ``(label, color, value)`` each, the first on top."""
    labels, colors, values = zip(*shown, strict=True)
    axes.barh(range(len(shown)), values, color=colors)
    axes.set_yticks(range(len(shown)), labels)
    axes.invert_yaxis()
    axes.set_axisbelow(True)
    axes.set(xlabel=axes.get_ylabel(), ylabel="")
    axes.grid(visible=False, axis="y")


def plain_log(axis: Any) -> None:
    """Give a log ``axis`` (``axes.xaxis`` or ``axes.yaxis``) ticks at 1, 2 and 5 of each decade, as plain numbers."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")
