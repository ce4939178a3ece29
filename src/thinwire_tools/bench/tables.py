"""The table that benchmarks print."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table


def figures_table(label: str, figures: Sequence[str]) -> Table:
    """Return an empty table: a column of labels, which wrap on a narrow terminal, and columns of figures, which do not.

    A line break in a heading makes its column narrower.
    """
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(label, overflow="fold", vertical="bottom")
    for heading in figures:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
