"""The page's pictures, as SVG that stands inside it."""

from __future__ import annotations

import io
import re
from typing import Any

from thinwire.plan.forecast import Curve, Transfer, finish
from thinwire_tools.doctor.record import minimal_ratio
from thinwire_tools.lab.units import format_rate
from thinwire_tools.plots import canvas

_NOW, _PREDICTED, _WAIT, _READY = "#30343b", "#2f6fde", "#d9822b", "#9aa3ad"
_STEADY = {"svg.fonttype": "none", "font.size": 11.0, "font.family": "sans-serif"}
_WIDTH = 5.6
_LEAST_RATIO, _MOST_RATIO = 1.0, 64.0


def steps(about: dict[str, Any]) -> str:
    """Draw a step by setting, with its range; the measured one and the ceiling as lines."""
    rows = about["predictions"]
    figure, (axes,) = _canvas(1.6 + 0.34 * len(rows), "seconds of a step")
    for i, row in enumerate(rows):
        axes.barh(i, row["step_s"], color=_PREDICTED, height=0.62)
        axes.plot([row["low_s"], row["high_s"]], [i, i], color=_NOW, linewidth=1.6)
    axes.set_yticks(range(len(rows)), [row["title"] for row in rows])
    axes.axvline(about["today_s"], color=_NOW, linestyle="--", label="now, measured")
    axes.axvline(about["compute_s"]["value"], color=_READY, linestyle=":", label="nothing sent")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.06 * max(about["today_s"], *(row["high_s"] for row in rows)))
    axes.grid(visible=False, axis="y")
    return _svg(figure, axes, "steps", "Predicted seconds of a step for each setting")


def timeline(about: dict[str, Any]) -> str:
    """Draw when each bucket of a step is ready, and until when its all-reduce takes."""
    if about["sharded"]:
        return _stops(about)
    buckets = about["buckets"]
    native = Curve(tuple((float(n), float(s)) for n, s in about["native"]["points"]))
    per_byte = about["crossings"] * native.per_byte
    transfers = [Transfer(b["took_s"], b["bytes"] * per_byte) for b in buckets]
    done = finish([b["ready_s"] for b in buckets], transfers, depth=2)
    figure, (axes,) = _canvas(1.6 + 0.26 * len(buckets), "seconds since the step began")
    for i, (bucket, end) in enumerate(zip(buckets, done, strict=True)):
        axes.barh(i, end - bucket["ready_s"], left=bucket["ready_s"], color=_WAIT, height=0.62)
        axes.plot(bucket["ready_s"], i, marker="|", markersize=12, color=_NOW)
    axes.axvspan(0, buckets[-1]["ready_s"], color=_READY, alpha=0.25, label="forward and backward")
    axes.barh(0, 0, color=_WAIT, label="a bucket on its way")
    axes.set_yticks(range(len(buckets)), [f"bucket {i}" for i in range(len(buckets))])
    axes.invert_yaxis()
    axes.set_xlim(0, None)
    axes.grid(visible=False, axis="y")
    return _svg(figure, axes, "timeline", "When buckets are ready and when they have arrived")


def _stops(about: dict[str, Any]) -> str:
    """Draw where gathers and reductions stop a step of a sharded model."""
    kinds = {"all_gather": "weights are gathered", "reduce_scatter": "gradients are reduced"}
    figure, (axes,) = _canvas(2.2, "seconds since the step began")
    stopped = computed = 0.0
    for bucket in about["buckets"]:
        row = list(kinds).index(bucket["kind"]) + 1
        axes.barh(0, bucket["ready_s"] - computed, left=computed + stopped, color=_READY, height=0.62)
        axes.barh(row, bucket["took_s"], left=bucket["ready_s"] + stopped, color=_WAIT, height=0.62)
        computed, stopped = bucket["ready_s"], stopped + bucket["took_s"]
    axes.barh(0, about["compute_s"]["value"] - computed, left=computed + stopped, color=_READY, height=0.62)
    axes.barh(0, 0, color=_READY, label="goes on")
    axes.barh(0, 0, color=_WAIT, label="stops the step")
    axes.set_yticks(range(3), ["computing", *kinds.values()])
    axes.invert_yaxis()
    axes.set_xlim(0, None)
    axes.grid(visible=False, axis="y")
    return _svg(figure, axes, "timeline", "When a step computes, and when it stands still for communication")


def break_even(about: dict[str, Any]) -> str:
    """Draw the ratio from which on compression at a speed pays, by the link (the FFT paper's Figure 10)."""
    import numpy as np

    figure, (axes,) = _canvas(4.4, "rate of the link", "least ratio that pays")
    crossings = about["crossings"]
    rates = np.geomspace(1e6, 4e11, 400)
    for row in about["codecs"]:
        ratios = [minimal_ratio(rate / 8 / crossings, row["seconds_per_byte"]) for rate in rates]
        shown = [ratio if ratio <= _MOST_RATIO else float("nan") for ratio in ratios]
        line = axes.plot(rates, shown, label=row["title"])[0]
        if row["minimal_ratio"] is not None:
            here = 8 * about["native"]["bandwidth"]
            axes.plot(here, min(row["minimal_ratio"], _MOST_RATIO), "o", color=line.get_color(), markersize=4)
    axes.axvline(8 * about["native"]["bandwidth"], color=_NOW, linestyle="--", label="this link")
    axes.set(xscale="log", yscale="log", ylim=(_LEAST_RATIO, _MOST_RATIO))
    ticks = [10.0**k for k in range(6, 12)]
    axes.set_xticks(ticks, [format_rate(tick) for tick in ticks], rotation=30, ha="right")
    axes.set_yticks([1, 2, 4, 8, 16, 32, 64], [f"{k}x" for k in (1, 2, 4, 8, 16, 32, 64)])
    axes.minorticks_off()
    return _svg(figure, axes, "break-even", "The least compression ratio that pays, by the rate of the link")


def _canvas(height: float, x: str, y: str = "") -> tuple[Any, list[Any]]:
    figure, axes = canvas(1, titles=[""], x=x, y=y)
    figure.set_size_inches(_WIDTH, height)
    return figure, axes


def _svg(figure: Any, axes: Any, salt: str, label: str) -> str:
    import matplotlib

    axes.legend(frameon=False, fontsize="small", loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=3)
    out = io.StringIO()
    settings: Any = {**_STEADY, "svg.hashsalt": salt}
    with matplotlib.rc_context(settings):
        figure.savefig(out, format="svg", metadata={"Date": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    # The page determines the width: a size in points says nothing on a phone.
    svg = re.sub(r' (?:width|height)="[\d.]+pt"', "", svg, count=2)
    # The page names nothing outside of it, not even where nothing would be fetched.
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
