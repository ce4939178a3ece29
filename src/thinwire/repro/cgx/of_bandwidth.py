"""Figure 3.1: how long a step takes when only the first of every so many elements travel."""

from __future__ import annotations

from collections.abc import Mapping

from thinwire.repro import plots
from thinwire.repro.cgx.contest import Times
from thinwire.repro.cgx.judging import above, all_hold
from thinwire.repro.cgx.models import Model
from thinwire.repro.cgx.study import Scale, Study
from thinwire.repro.cgx.ways import FP32, NOTHING, Way
from thinwire.repro.findings import Finding

_NEAR = 0.88
"""Share of the ideal that the thesis's least ideal network reaches once bandwidth costs nothing (table 3.7)."""
_MOST_OF_IT = 0.5
_ORDER, _TWO_ORDERS = 10, 100


def ways(scale: Scale) -> list[Way]:
    truncated = [_truncated(gamma) for gamma in scale.gammas]
    return [FP32, *truncated, NOTHING]


def figure_3_1(study: Study) -> list[Finding]:
    """Step time by gamma, beside that of perfect scaling."""
    found = {model.name: study.times(model, ways(study.scale)) for model in study.scale.models}
    _draw(study, found)
    return [row for model in study.scale.models for row in _rows(study, model, found[model.name])]


def _rows(study: Study, model: Model, times: Times) -> list[Finding]:
    gammas = study.scale.gammas
    seconds = {gamma: times.step_s(_truncated(gamma).name) for gamma in gammas}
    ideal, first, last = NOTHING.name, _truncated(gammas[0]).name, _truncated(gammas[-1]).name
    near = all_hold([above(times.over(last, ideal), _NEAR), _not(above(times.over(first, ideal), _NEAR))])
    order = _truncated(_ORDER).name
    closed = [
        (whole - at) / (whole - rest)
        for whole, at, rest in zip(times.rounds[first], times.rounds[order], times.rounds[last], strict=True)
    ]
    more = {
        "gammas": list(gammas),
        "step_s": [seconds[gamma] for gamma in gammas],
        "by_round": times.rounds,
        "fp32_step_s": times.step_s(FP32.name),
        "ideal_step_s": times.step_s(ideal),
        "model": model.title,
        "where": study.where(model),
    }
    rows = [
        Finding(
            "3.1",
            f"share_of_ideal/{model.name}",
            times.times_faster(last, ideal),
            "",
            f"{model.title}: throughput nears the ideal as transmission shrinks, so bandwidth is the bottleneck",
            f"{times.times_faster(first, ideal):.0%} of the ideal's with everything sent, "
            f"{times.times_faster(last, ideal):.0%} with {gammas[-1]:g} times less, {study.where(model)}",
            study.verdict(near),
            more,
        ),
        Finding(
            "3.1",
            f"gained_by_an_order/{model.name}",
            sorted(closed)[len(closed) // 2],
            "",
            f"{model.title}: an order of magnitude is enough for most of it (section 3.3.1)",
            f"{_ORDER} times less gains {sorted(closed)[len(closed) // 2]:.0%} of what {gammas[-1]:g} times less does",
            study.verdict(above(closed, _MOST_OF_IT)),
        ),
    ]
    if model.name == "gpt":
        gained = times.times_faster(_truncated(_TWO_ORDERS).name, order)
        rows.append(
            Finding(
                "3.1",
                f"gained_by_two_orders/{model.name}",
                gained,
                "x",
                "transformers still benefit from up to two orders of magnitude (section 3.3.1)",
                f"{_TWO_ORDERS} times less is {gained:.2f}x as fast as {_ORDER} times less",
                study.verdict(above(times.over(_truncated(_TWO_ORDERS).name, order))),
            )
        )
    return rows


def _truncated(gamma: float) -> Way:
    return Way(f"gamma {gamma:g}", f"1/{gamma:g} sent", "#0a7d4f", spec=f"truncate(gamma={gamma:g})")


def _not(verdict: bool | None) -> bool | None:
    return None if verdict is None else not verdict


def _draw(study: Study, found: Mapping[str, Times]) -> None:
    models = study.scale.models
    titles = [f"{model.title} {study.where(model)}" for model in models]
    figure, panels = plots.canvas(len(models), titles=titles, x="compression gamma", y="seconds a step")
    for axes, model in zip(panels, models, strict=True):
        times, gammas = found[model.name], study.scale.gammas
        seconds = [times.step_s(_truncated(gamma).name) for gamma in gammas]
        axes.plot(gammas, seconds, color="#0a7d4f", marker="o", label="the first of gamma elements sent")
        axes.axhline(times.step_s(FP32.name), color=FP32.colour, linewidth=1, label=FP32.title)
        axes.axhline(times.step_s(NOTHING.name), color="#222222", linewidth=1, linestyle=":", label="ideal scaling")
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
    plots.save(figure, study.picture("3.1"))
