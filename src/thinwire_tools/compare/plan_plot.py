"""A plan as a picture: the thesis's Figure 4.1, for any compressor and for several at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thinwire.compressors import Chain, Compressor, Raw, parse, unwrap
from thinwire.plan import LayerRow, PlanRecord
from thinwire.policies.families import parameter_name, parameter_value
from thinwire_tools.plots import need_matplotlib, save

_CHOSEN, _REFERENCE, _SIZES = "#0072B2", "#D55E00", "#999999"
# Okabe and Ito's colours, and markers for those who see none.
_LOOKS = (("#0072B2", "o"), ("#009E73", "s"), ("#CC79A7", "^"), ("#E69F00", "D"), ("#000000", "v"), ("#56B4E9", "P"))
_LABELS = {
    "bits": "bits an element",
    "rank": "rank",
    "density": "density (share of elements sent)",
    "kept": "share of the spectrum kept",
}
_MOST_NAMES = 75
_SPREAD = 8
"""Largest value over smallest from which on an axis is logarithmic."""


def draw(record: PlanRecord, path: Path, title: str) -> None:
    """Write the picture to ``path`` as SVG. Layers that are raw, and stay raw, are left out.

    Raises:
        ValueError: no layer is compressed.
        ImportError: matplotlib is missing; it says how to install it.
    """
    figure_of = need_matplotlib()
    rows = [row for row in record.rows if not (_is_raw(row.compressor) and _is_raw(row.reference))]
    if not rows:
        raise ValueError("no layer is compressed: there is nothing to draw")
    figure = figure_of(figsize=(min(17.0, max(7.5, 3.5 + 0.2 * len(rows))), 5.2), layout="constrained")
    axes = figure.add_subplot()
    sizes = axes.twinx()
    # What is chosen stands before the bars.
    axes.set_zorder(sizes.get_zorder() + 1)
    axes.patch.set_visible(False)
    _bars(sizes, rows)
    parameters = {parameter_name(c) for c in _compressors(rows) if _has_parameter(c)}
    kinds = list(dict.fromkeys(_kind(c) for c in _compressors(rows)))
    if len(kinds) == 1 and len(parameters) == 1:
        _of_one_family(axes, rows, parameters.pop())
    else:
        _of_many(axes, rows, kinds)
    _buckets(axes, rows)
    _name_layers(axes, rows, len(record.rows) - len(rows))
    axes.set_title(_plain(title), fontsize="medium", loc="left", pad=16)
    axes.spines[["top", "right"]].set_visible(False)
    sizes.spines[["top", "left"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    bars = sizes.containers[0]
    figure.legend(
        [*handles, bars],
        [*labels, "size, fp32 (right axis)"],
        loc="outside lower center",
        ncols=min(6, len(handles) + 1),
        frameon=False,
        fontsize="small",
    )
    save(figure, path, legends=False)


def _bars(axes: Any, rows: Sequence[LayerRow]) -> None:
    megabytes = [max(4 * row.numel, 4) / 1e6 for row in rows]
    low = 10 ** math.floor(math.log10(min(megabytes)) - 0.3)
    axes.bar(range(len(rows)), megabytes, width=0.86, color=_SIZES, alpha=0.28, linewidth=0)
    _log(axes, subs=(1.0,))
    axes.set_ylim(low, max(megabytes) * 4)
    axes.set_ylabel("size, MB", color="#666666")
    axes.tick_params(axis="y", which="both", colors="#666666")


def _of_one_family(axes: Any, rows: Sequence[LayerRow], name: str) -> None:
    reference = [_value(row.reference) for row in rows]
    chosen = [_value(row.compressor) for row in rows]
    _line(axes, reference, _REFERENCE, f"reference: {_spoken(reference, name)}", linestyle="--", marker="")
    _line(axes, chosen, _CHOSEN, "chosen", linestyle="-", marker="o")
    axes.set_ylabel(_LABELS[name])
    _scale(axes, [*reference, *chosen], whole=name in ("bits", "rank"))


def _of_many(axes: Any, rows: Sequence[LayerRow], kinds: Sequence[str]) -> None:
    reference = [_bits_sent(row, row.reference_bytes) for row in rows]
    chosen = [_bits_sent(row, row.sent_bytes) for row in rows]
    _line(axes, reference, _REFERENCE, "reference", linestyle="--", marker="")
    axes.plot(range(len(rows)), chosen, color="#555555", linewidth=0.9, zorder=3)
    for at, kind in enumerate(kinds):
        places = [i for i, row in enumerate(rows) if _kind(parse(row.compressor)) == kind]
        if places:
            colour, marker = _LOOKS[at % len(_LOOKS)]
            values = [chosen[i] for i in places]
            look = {"markersize": 6.5, "markeredgecolor": "white", "markeredgewidth": 0.5, "zorder": 4}
            axes.plot(places, values, color=colour, marker=marker, linestyle="", label=_plain(kind), **look)
    axes.set_ylabel("bits sent an element")
    _scale(axes, [*reference, *chosen], whole=False)


def _line(axes: Any, values: Sequence[float | None], colour: str, label: str, **look: Any) -> None:
    """A level for each layer; nothing where there is none."""
    shown = [math.nan if value is None else value for value in values]
    look |= {"color": colour, "label": _plain(label), "zorder": 3, "markersize": 4.5, "linewidth": 1.4}
    if len(values) == 1:
        look["marker"] = look["marker"] or "_"
        look["markersize"] = 12
    axes.plot(range(len(shown)), shown, **look)


def _scale(axes: Any, values: Sequence[float | None], *, whole: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    known = [value for value in values if value]
    if not known:
        return
    low, high = min(known), max(known)
    if high / low >= _SPREAD:
        _log(axes, subs=(1.0, 2.0, 5.0))
        axes.set_ylim(low / 1.4, high * 1.4)
        return
    if whole:
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(0, high * 1.12)


def _log(axes: Any, subs: Sequence[float]) -> None:
    """A logarithmic axis with numbers that are read as they are."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _buckets(axes: Any, rows: Sequence[LayerRow]) -> None:
    """Where one DDP bucket ends and the next begins."""
    starts = [0, *(i for i in range(1, len(rows)) if rows[i].bucket != rows[i - 1].bucket)]
    axes.set_xlim(-0.7, len(rows) - 0.3)
    # Of many small buckets the numbers would run into each other.
    apart = max(1.0, len(rows) / 60)
    written = -apart
    for start, end in zip(starts, [*starts[1:], len(rows)], strict=True):
        if start:
            axes.axvline(start - 0.5, color="#bbbbbb", linewidth=0.7, linestyle=":", zorder=1)
        middle = (start + end - 1) / 2
        if middle - written >= apart:
            written = middle
            text = f"bucket {rows[start].bucket}" if end - start >= len(rows) / 10 else str(rows[start].bucket)
            axes.annotate(
                text, (middle, 1.005), xycoords=("data", "axes fraction"), ha="center", fontsize=7, color="#777777"
            )


def _name_layers(axes: Any, rows: Sequence[LayerRow], left_out: int) -> None:
    text = "layers in the order they are sent"
    if left_out:
        text += f" ({left_out} that stay raw are left out)"
    axes.set_xlabel(text)
    if len(rows) > _MOST_NAMES:
        return
    labels = axes.set_xticks(range(len(rows)), _shortened([row.name for row in rows]), rotation=90, fontsize=7)
    for label in labels:
        label.label1.set_parse_math(False)


def _shortened(names: Sequence[str]) -> list[str]:
    """Names without the parts that all have at their beginning or end."""
    parts = [name.split(".") for name in names]
    if len(parts) > 1:
        for at in (0, -1):
            while min(map(len, parts)) > 1 and len({part[at] for part in parts}) == 1:
                parts = [part[1:] if at == 0 else part[:-1] for part in parts]
    names = [".".join(part) for part in parts]
    return [name if len(name) <= 40 else f"{name[:18]}…{name[-18:]}" for name in names]


def _plain(text: str) -> str:
    # matplotlib would read formulas between dollar signs.
    return text.replace("$", r"\$")


def _compressors(rows: Sequence[LayerRow]) -> list[Compressor]:
    return [parse(spec) for row in rows for spec in (row.compressor, row.reference)]


def _kind(compressor: Compressor) -> str:
    inner = unwrap(compressor)
    if isinstance(inner, Chain):
        return f"{inner.first.spec_name} | {inner.values.spec_name}"
    return inner.spec_name


def _is_raw(spec: str) -> bool:
    return isinstance(unwrap(parse(spec)), Raw)


def _has_parameter(compressor: Compressor) -> bool:
    try:
        parameter_value(compressor)
    except ValueError:
        return False
    return True


def _value(spec: str) -> float | None:
    compressor = parse(spec)
    return parameter_value(compressor) if _has_parameter(compressor) else None


def _bits_sent(row: LayerRow, num_bytes: float) -> float | None:
    return 8 * num_bytes / row.numel if row.numel and num_bytes else None


def _spoken(values: Sequence[float | None], name: str) -> str:
    """What the reference has everywhere; its range where it differs."""
    known = sorted({value for value in values if value is not None})
    if not known:
        return "raw"
    unit = {"bits": " bits", "rank": "", "density": "", "kept": ""}[name]
    before = "rank " if name == "rank" else ""
    return f"{before}{known[0]:g}" + (f" to {known[-1]:g}" if len(known) > 1 else "") + unit
