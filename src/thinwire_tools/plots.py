"""Pictures: SVG by matplotlib, the same bytes for the same figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def need_matplotlib() -> Any:
    """Return ``matplotlib.figure.Figure``. Raises ``ImportError`` that says how to install it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures require matplotlib: pip install matplotlib") from error
    return Figure


def canvas(panels: int, *, titles: Sequence[str], x: str, y: str | Sequence[str]) -> tuple[Any, list[Any]]:
    """Return a figure with ``panels`` axes side by side, in rows of three."""
    figure = need_matplotlib()(figsize=(1.5 + 4.5 * min(panels, 3), 4.2 * ((panels + 2) // 3)), layout="constrained")
    grid = figure.subplots((panels + 2) // 3, min(panels, 3), squeeze=False).flatten().tolist()
    for axes in grid[panels:]:
        axes.set_visible(False)
    labels = [y] * panels if isinstance(y, str) else list(y)
    for axes, title, label in zip(grid, titles, labels, strict=False):
        axes.set(title=title, xlabel=x, ylabel=label)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, grid[:panels]


def save(figure: Any, path: Path, *, legends: bool = True) -> None:
    """Write ``figure`` as SVG, with a legend on every panel that has labeled lines unless it has its own."""
    import matplotlib

    for axes in figure.axes if legends else ():
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize="small")
    with matplotlib.rc_context({"svg.hashsalt": "thinwire"}):
        figure.savefig(path, format="svg", metadata={"Date": None})
