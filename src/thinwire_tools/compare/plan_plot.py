"""A plan as a picture: the thesis's Figure 4.1, and below it what each decision sends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thinwire import Decision, Wire
from thinwire.compressors import Raw, unwrap
from thinwire.plan import sent_bytes
from thinwire.runtime.table import LayerRow
from thinwire_tools.plots import need_matplotlib, save

_CHOSEN, _REFERENCE, _SIZES = "#0072B2", "#D55E00", "#999999"
_MOST_NAMES = 75
_SPREAD = 8
"""Ratio of the largest value to the smallest from which on an axis is logarithmic."""


def draw(wire: Wire, path: Path | str) -> None:
    """Draw the present plan of ``wire``, and its decisions over time, to ``path`` as SVG.

    Bars are the sizes of layers, in the order in which they are sent. Lines are the bits that a rank sends for an
    element of each layer, with the compressor that the rules name and with the one chosen; dotted lines separate DDP
    buckets. Layers that are raw, and stay raw, are left out.

    Raises:
        ValueError: no layer is compressed.
        ImportError: matplotlib is missing; the message says how to install it.
    """
    all_rows = wire.engine.plan_rows()
    rows = [row for row in all_rows if not all(_is_raw(c) for c in (row.compressor, row.reference))]
    if not rows:
        raise ValueError("no layer is compressed: there is nothing to draw")
    decisions = wire.decisions
    size = min(17.0, max(7.5, 3.5 + 0.2 * len(rows))), 8.0 if decisions else 5.2
    figure = need_matplotlib()(figsize=size, layout="constrained")
    panels = figure.subplots(2, 1, height_ratios=(2, 1)) if decisions else [figure.add_subplot()]
    _draw_plan(panels[0], rows, len(all_rows) - len(rows))
    if decisions:
        _draw_decisions(panels[1], all_rows, decisions, max(2, wire.world_size), wire.step)
    save(figure, Path(path))


def _draw_plan(axes: Any, rows: Sequence[LayerRow], left_out: int) -> None:
    sizes = axes.twinx()
    # The lines are drawn in front of the bars.
    axes.set_zorder(sizes.get_zorder() + 1)
    axes.patch.set_visible(False)
    megabytes = [max(4 * row.numel, 4) / 1e6 for row in rows]
    sizes.bar(range(len(rows)), megabytes, width=0.86, color=_SIZES, alpha=0.28, linewidth=0)
    sizes.set(yscale="log", ylim=(min(megabytes) / 2, 4 * max(megabytes)), ylabel="size, MB of fp32 (bars)")
    reference = [_bits(row.reference_bytes, row) for row in rows]
    chosen = [_bits(row.sent_bytes, row) for row in rows]
    axes.plot(reference, color=_REFERENCE, linestyle="--", label="reference")
    axes.plot(chosen, color=_CHOSEN, marker="o", markersize=4.5, label="chosen")
    known = [bits for bits in (*reference, *chosen) if not math.isnan(bits)]
    if known and max(known) >= _SPREAD * min(known):
        axes.set(yscale="log")
    else:
        axes.set_ylim(0, 1.12 * max(known, default=1.0))
    for at in range(1, len(rows)):
        if rows[at].bucket != rows[at - 1].bucket:
            axes.axvline(at - 0.5, color="#bbbbbb", linewidth=0.7, linestyle=":")
    note = f" ({left_out} that stay raw are left out)" if left_out else ""
    axes.set(
        ylabel="bits sent an element", xlabel=f"layers in the order they are sent{note}", xlim=(-0.7, len(rows) - 0.3)
    )
    if len(rows) <= _MOST_NAMES:
        for tick in axes.set_xticks(range(len(rows)), [row.name for row in rows], rotation=90, fontsize=7):
            tick.label1.set_parse_math(False)


def _draw_decisions(
    axes: Any, rows: Sequence[LayerRow], decisions: Sequence[Decision], num_ranks: int, step: int
) -> None:
    """Draw the megabytes that a rank sends in a step, from the step on in which each decision takes effect."""
    reference = math.fsum(row.reference_bytes for row in rows) / 1e6
    sent = [
        math.fsum(sent_bytes(decision.plan[row.name], row.shape, num_ranks) for row in rows) / 1e6
        for decision in decisions
    ]
    # The last plan lasts until now.
    steps, sent = [*(decision.step for decision in decisions), max(step, decisions[-1].step)], [*sent, sent[-1]]
    axes.plot(steps, sent, color=_CHOSEN, marker="o", markersize=4.5, drawstyle="steps-post", label="chosen")
    axes.axhline(reference, color=_REFERENCE, linestyle="--", label="reference")
    axes.set(xlabel="step", ylabel="MB sent a step", ylim=(0, 1.12 * max(reference, *sent)))


def _bits(num_bytes: float, row: LayerRow) -> float:
    return 8 * num_bytes / row.numel if row.numel and num_bytes else math.nan


def _is_raw(compressor: Any) -> bool:
    return isinstance(unwrap(compressor), Raw)
