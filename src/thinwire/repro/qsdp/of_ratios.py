"""Figure C.1 and table C.2: step time when only the first of so many weights and gradients travel."""

from __future__ import annotations

from collections.abc import Mapping

from thinwire.repro import plots
from thinwire.repro.cgx.contest import Times
from thinwire.repro.cgx.judging import above
from thinwire.repro.findings import Finding
from thinwire.repro.qsdp.study import Scale, Study, Work, where
from thinwire.repro.qsdp.ways import NOTHING, Way, shortened

RATIOS = (1, 2, 4, 8)
_MOST = RATIOS[-1]
_NEAR = 0.85
"""Of the speed with nothing sent."""
THESIS = {
    (1, 1): 23.23,
    (1, 2): 21.36,
    (1, 4): 20.62,
    (1, 8): 20.2,
    (2, 1): 19.27,
    (2, 2): 17.17,
    (2, 4): 16.26,
    (2, 8): 15.95,
    (4, 1): 17.50,
    (4, 2): 15.35,
    (4, 4): 14.6,
    (4, 8): 14.08,
    (8, 1): 16.62,
    (8, 2): 14.52,
    (8, 4): 13.66,
    (8, 8): 13.21,
}
"""Seconds of a step by ratio of weights and of gradients, GPT 1.3B at 100 Gbit/s."""


def ratios_work(scale: Scale) -> Work:
    """Steps of all turns."""
    return Work(steps=(len(THESIS) + 1) * (1 + scale.ratio_rounds))


def table_c_2(study: Study) -> list[Finding]:
    """All pairs of ratios in turns."""
    ways = {(w, g): shortened(w, g) for w in RATIOS for g in RATIOS}
    rate = study.rate_or(study.scale.ratio_rate)
    times = study.contest().times(
        study.model,
        [*ways.values(), NOTHING],
        rounds=study.scale.ratio_rounds,
        steps=1,
        rate=rate,
        on_turn=study.advance,
    )
    _draw(study, times, ways)
    weights, gradients = ways[_MOST, 1].name, ways[1, _MOST].name
    gained = {name: times.times_faster(name, ways[1, 1].name) for name in (weights, gradients)}
    both, ideal = ways[_MOST, _MOST].name, NOTHING.name
    return [
        Finding(
            "table C.2",
            "weights_over_gradients",
            gained[weights] / gained[gradients],
            "x",
            f"compressing weights gains more than compressing gradients: {_MOST} times makes steps "
            f"{THESIS[1, 1] / THESIS[_MOST, 1]:.2f}x as fast against {THESIS[1, 1] / THESIS[1, _MOST]:.2f}x",
            f"{gained[weights]:.2f}x against {gained[gradients]:.2f}x, {where(rate)}",
            study.verdict(above(times.over(weights, gradients))),
        ),
        Finding(
            "figure C.1",
            "near_ideal",
            times.times_faster(both, ideal),
            "",
            f"{_MOST} times less of both almost reaches the ideal of a large model (section C.2)",
            f"steps of {1e3 * times.step_s(both):.0f} ms, {1e3 * times.step_s(ideal):.0f} ms with nothing sent, "
            f"{1e3 * times.step_s(ways[1, 1].name):.0f} ms with everything, {where(rate)}",
            study.verdict(above(times.over(both, ideal), _NEAR)),
        ),
        *_cells(study, times, ways),
    ]


def _cells(study: Study, times: Times, ways: Mapping[tuple[int, int], Way]) -> list[Finding]:
    """A row for each cell of the table; the first one shows them all."""
    shown = ", ".join(f"{w}/{g} {1e3 * times.step_s(way.name):.0f}" for (w, g), way in ways.items())
    return [
        Finding(
            "table C.2",
            f"step_s/{w}/{g}",
            times.step_s(way.name),
            "s",
            "",
            f"ms a step {where(study.rate_or(study.scale.ratio_rate))}, by ratio of weights/gradients: {shown}",
            None,
            {
                "weights": w,
                "gradients": g,
                "by_round": times.rounds[way.name],
                "relative": times.step_s(way.name) / times.step_s(ways[1, 1].name),
                "thesis_relative": THESIS[w, g] / THESIS[1, 1],
            },
            aside="step times" if (w, g) == (1, 1) else "",
        )
        for (w, g), way in ways.items()
    ]


def _draw(study: Study, times: Times, ways: Mapping[tuple[int, int], Way]) -> None:
    title = f"{study.model.title} {where(study.rate_or(study.scale.ratio_rate))}"
    figure, (axes,) = plots.canvas(1, titles=[title], x="compression ratio", y="seconds a step")
    lines = {
        "of weights": ([(ratio, 1) for ratio in RATIOS], "#0a7d4f"),
        "of gradients": ([(1, ratio) for ratio in RATIOS], "#1f6fb2"),
        "of both": ([(ratio, ratio) for ratio in RATIOS], "#8250c4"),
    }
    for label, (keys, colour) in lines.items():
        axes.plot(RATIOS, [times.step_s(ways[key].name) for key in keys], color=colour, marker="o", label=label)
    axes.axhline(times.step_s(NOTHING.name), color="#222222", linewidth=1, linestyle=":", label=NOTHING.title)
    axes.set_xscale("log")
    axes.set_xticks(RATIOS, [str(ratio) for ratio in RATIOS])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    plots.save(figure, study.picture("C.1"))
