"""Part (a), figure 6: objective gap by bits and by gradients, and the largest integer that is sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from thinwire.repro import plots
from thinwire.repro.findings import Finding
from thinwire.repro.intsgd import convex
from thinwire.repro.intsgd.convex import METHODS, Minimised
from thinwire.repro.intsgd.study import Study
from thinwire.repro.intsgd.world import Array, Trace

_FIGURE = "6"
_FEW_BITS = 3.0
_BLOWN_UP = 10.0
_AS_FAST = 1.5
"""Theorem 4's rate is full precision's up to a constant."""
_LINEAR = 0.99
_FLOOR = 1e-13
"""A gap below this is rounding error of fp64."""
_REACHED = 1e-11
"""A gap that is small enough to tell how fast a method is."""

_COLOURS = {
    "gd": "#555555",
    "diana": "#999999",
    "lsvrg": "#3b6fb6",
    "intgd": "#c0392b",
    "intdiana": "#0a7d4f",
    "intdiana blocks": "#7fb800",
    "intdiana coordinates": "#d98a00",
    "vr-intdiana": "#8250c4",
}
_DASHED = ("diana", "lsvrg")


def part_a(study: Study) -> list[Finding]:
    """Logistic regression on every data set by every method: a picture of each, and the claims over all of them."""
    found = convex.minimise(study.sources, study.smoke, study.job_done)
    for minimised in found:
        study.datasets[minimised.source.name] = convex.describe(minimised)
        _draw(study, minimised)
    return [*claims(found), *_by_dataset(found)]


@dataclass(frozen=True)
class _Judged:
    """One data set's part of a claim: a value, and whether it holds there."""

    value: float
    holds: bool
    text: str


def claims(found: Sequence[Minimised]) -> list[Finding]:
    """Each of the paper's claims, which holds if it does on every data set, at every seed."""
    return [
        _over_all(
            found,
            "bits/intdiana",
            "bits",
            f"IntDIANA needs fewer than {_FEW_BITS:.0f} bits per coordinate (C.5)",
            _few_bits,
        ),
        _over_all(
            found,
            "largest/intgd",
            "",
            "IntGD's integers grow very large as it converges; IntDIANA's do not (C.5, A.2)",
            _blow_up,
        ),
        _over_all(
            found,
            "steps/intdiana",
            "x",
            "IntDIANA converges linearly, like GD in full precision (theorem 4)",
            _as_fast_as("intdiana", "gd"),
        ),
        _over_all(
            found,
            "steps/vr-intdiana",
            "x",
            "VR-IntDIANA converges linearly, like L-SVRG in full precision (theorem 4)",
            _as_fast_as("vr-intdiana", "lsvrg"),
        ),
        _over_all(
            found,
            "gradients/vr-intdiana",
            "x",
            "VR-IntDIANA takes fewer gradient evaluations than IntDIANA (C.5)",
            _fewer_gradients,
        ),
        _over_all(
            found,
            "bound/intdiana",
            "bits",
            "1 + log2 √(d/2n) bits per coordinate are enough for IntDIANA, on average over its steps (4.2)",
            _within_bound,
        ),
    ]


def _over_all(
    found: Sequence[Minimised], name: str, unit: str, claim: str, judge: Callable[[Minimised], _Judged]
) -> Finding:
    judged = {minimised.source.name: judge(minimised) for minimised in found}
    texts = "; ".join(f"{dataset} {each.text}" for dataset, each in judged.items())
    return Finding(
        _FIGURE,
        name,
        max(each.value for each in judged.values()),
        unit,
        claim,
        texts,
        all(each.holds for each in judged.values()),
        {"by_dataset": {dataset: each.value for dataset, each in judged.items()}},
    )


def mean_bits(trace: Trace) -> Array:
    """Bits per coordinate and step that a worker sends, without the exact first step: ``[seeds]``."""
    return (trace.bits[-1] - trace.bits[1]) / (trace.steps[-1] - trace.steps[1])


def _few_bits(minimised: Minimised) -> _Judged:
    bits, trace = mean_bits(minimised.traces["intdiana"]), minimised.traces["intdiana"]
    largest, largest_sum = int(trace.largest_sent.max()), int(trace.largest_sum.max())
    worst = float(bits.max())
    return _Judged(worst, worst < _FEW_BITS, f"{worst:.2f} (integers up to {largest}, sums up to {largest_sum})")


def _blow_up(minimised: Minimised) -> _Judged:
    last = {name: minimised.traces[name].largest_sent[-1] for name in ("intgd", "intdiana")}
    sent = minimised.traces["intgd"].largest_sent
    # Up to the first record all may have been exact.
    at_first = sent[1] if sent[1].any() else sent[2]
    grown = float((last["intgd"] / np.maximum(1.0, at_first)).min())
    holds = bool((last["intgd"] >= _BLOWN_UP * np.maximum(1.0, last["intdiana"])).all()) and grown > 1
    text = f"{at_first.max():.0f} grew to {last['intgd'].max():.3g}, IntDIANA's {last['intdiana'].max():.0f}"
    return _Judged(float(last["intgd"].max()), holds, text)


def gaps(minimised: Minimised, name: str) -> Array:
    """``f − f*``, ``[records, seeds]``, where rounding error is not counted."""
    return np.maximum(minimised.traces[name].values - minimised.known.optimum.value, _FLOOR)


def _as_fast_as(name: str, twin: str) -> Callable[[Minimised], _Judged]:
    def judge(minimised: Minimised) -> _Judged:
        own, full = gaps(minimised, name), gaps(minimised, twin).mean(1)
        # Full precision's gap after half of its steps, so that a method that is slower gets there, too.
        target = max(_REACHED, float(full[len(full) // 2]))
        taken = [_steps_to(minimised.traces[name], own[:, seed], target) for seed in range(own.shape[1])]
        most = max(taken) / _steps_to(minimised.traces[twin], full, target)
        straight = linearity(minimised.traces[name].steps, own.mean(1))
        text = f"{most:.2f}x the steps to a gap of {target:.1e}"
        return _Judged(most, most <= _AS_FAST and straight >= _LINEAR, text)

    return judge


def _steps_to(trace: Trace, gap: Array, target: float) -> float:
    """Steps after which ``gap [records]`` is ``target``, between two records by its logarithm; infinity if never."""
    below = np.nonzero(gap <= target)[0]
    if not len(below):
        return math.inf
    at = int(below[0])
    if at == 0 or gap[at] == gap[at - 1]:
        return float(trace.steps[at])
    share = math.log(gap[at - 1] / target) / math.log(gap[at - 1] / gap[at])
    return float(trace.steps[at - 1] + share * (trace.steps[at] - trace.steps[at - 1]))


def linearity(steps: Array, gap: Array) -> float:
    """R² of a straight line through the gap's logarithm over the second half of the way to its end, or to the floor of
    rounding error; 0 where there is too little to tell."""
    kept = np.nonzero(gap > 10 * _FLOOR)[0]
    kept = kept[len(kept) // 2 :]
    if len(kept) < 3 or np.ptp(gap[kept]) == 0:
        return 0.0
    correlation = np.corrcoef(steps[kept], np.log(gap[kept]))[0, 1]
    return float(correlation**2) if correlation < 0 else 0.0


def _fewer_gradients(minimised: Minimised) -> _Judged:
    """At the gap that IntDIANA ends with, or VR-IntDIANA if its is larger."""
    own, other = (gaps(minimised, name).mean(1) for name in ("vr-intdiana", "intdiana"))
    target = max(_REACHED, float(own.min()), float(other.min()))
    taken = []
    for name, gap in (("vr-intdiana", own), ("intdiana", other)):
        trace = minimised.traces[name]
        taken.append(float(np.interp(_steps_to(trace, gap, target), trace.steps, trace.gradients.mean(1))))
    return _Judged(taken[0] / taken[1], taken[0] < taken[1], f"{taken[0]:.0f} against {taken[1]:.0f} at {target:.1e}")


def bound(coordinates: int, workers: int) -> float:
    """``√(d/2n)``: what no ``α·g`` exceeds for ``α = η√d / (√(2n)‖x − x'‖)`` where local gradients are no larger than
    the step, section 4.2."""
    return math.sqrt(coordinates / (2 * workers))


def _within_bound(minimised: Minimised) -> _Judged:
    # An integer is that rounded, maybe up.
    most = 1.0 + math.log2(math.ceil(bound(minimised.known.coordinates, minimised.num_workers)))
    bits = float(mean_bits(minimised.traces["intdiana"]).max())
    return _Judged(bits, bits <= most, f"{bits:.2f} of {most:.2f}")


def _by_dataset(found: Sequence[Minimised]) -> list[Finding]:
    """What every method came to, for the JSON file; block-wise and coordinate-wise scales for people, too."""
    rows = []
    for minimised in found:
        for method in METHODS:
            trace, gap = minimised.traces[method.name], gaps(minimised, method.name)
            rows.append(
                Finding(
                    _FIGURE,
                    f"gap/{minimised.source.name}/{method.name}",
                    float(gap[-1].mean()),
                    "",
                    "",
                    f"gap {gap[-1].mean():.1e} after {trace.steps[-1]:.0f} steps",
                    None,
                    _curves(trace, gap),
                )
            )
    for name in ("intdiana blocks", "intdiana coordinates"):
        title = next(method.title for method in METHODS if method.name == name)
        texts = []
        for minimised in found:
            bits = mean_bits(minimised.traces[name]).mean()
            ratio = gaps(minimised, name)[-1].mean() / gaps(minimised, "gd")[-1].mean()
            texts.append(f"{minimised.source.name} {bits:.2f} bits, {ratio:.2f}x GD's gap")
        value = max(float(mean_bits(minimised.traces[name]).mean()) for minimised in found)
        rows.append(Finding(_FIGURE, f"bits/{name}", value, "bits", "", "; ".join(texts), None, aside=title))
    return rows


def _curves(trace: Trace, gap: Array) -> dict[str, Any]:
    return {
        "steps": trace.steps.tolist(),
        "gap_mean": gap.mean(1).tolist(),
        "gap_least": gap.min(1).tolist(),
        "gap_most": gap.max(1).tolist(),
        "gradients": trace.gradients.mean(1).tolist(),
        "bits_per_coordinate": trace.bits.mean(1).tolist(),
        "largest_sent": trace.largest_sent.max(1).tolist(),
        "largest_sum": trace.largest_sum.max(1).tolist(),
        "num_seeds": int(gap.shape[1]),
    }


def _draw(study: Study, minimised: Minimised) -> None:
    name = minimised.source.name
    known = minimised.known
    figure, panels = plots.canvas(
        3,
        titles=[f"{name}: {known.rows} x {known.coordinates}, {known.origin}", "", ""],
        x="",
        y=["f(x) − f*", "f(x) − f*", "largest integer that a worker sends"],
    )
    for method in METHODS:
        trace, gap, colour = minimised.traces[method.name], gaps(minimised, method.name), _COLOURS[method.name]
        style: dict[str, Any] = {"color": colour, "linestyle": "--" if method.name in _DASHED else "-"}
        # One panel has the legend of all three.
        panels[1].plot([], [], label=method.title, **style)
        for axes, across in zip(panels, (trace.bits.mean(1), trace.gradients.mean(1)), strict=False):
            axes.plot(across, gap.mean(1), **style)
            axes.fill_between(across, gap.min(1), gap.max(1), color=colour, alpha=0.2, linewidth=0)
        if method.integers:
            panels[2].plot(trace.steps[1:], trace.largest_sent[1:].mean(1), **style)
            low, high = trace.largest_sent[1:].min(1), trace.largest_sent[1:].max(1)
            panels[2].fill_between(trace.steps[1:], low, high, color=colour, alpha=0.2, linewidth=0)
    most = bound(known.coordinates, minimised.num_workers)
    panels[2].axhline(most, color="#333333", linewidth=0.8, linestyle=":", label="√(d/2n), section 4.2")
    panels[0].set(xlabel="bits per coordinate that a worker has sent", xscale="log", yscale="log")
    panels[1].set(xlabel="gradients over a worker's data", yscale="log")
    panels[2].set(xlabel="step", yscale="log")
    plots.save(figure, study.picture(f"6-{name}"))
