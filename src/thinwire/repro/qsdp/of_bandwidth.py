"""Figure 5.3: step time against bandwidth, and on two nodes with a hierarchy against without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from thinwire.lab import parse_rate
from thinwire.repro import plots
from thinwire.repro.cgx.contest import RANKS_PER_NODE, Times
from thinwire.repro.cgx.judging import above
from thinwire.repro.findings import Finding
from thinwire.repro.qsdp.study import MORE_RANKS, NUM_RANKS, Scale, Study, Work, where
from thinwire.repro.qsdp.ways import FP16, FP32, NOTHING, RAW, W4G4, W8G8, Way

WAYS = (FP32, FP16, RAW, W8G8, replace(W4G4, colour="#1f6fb2"), NOTHING)
ASKED = {FP32.name: 4.5, RAW.name: 3.5, FP16.name: 2.2}
"""How many times faster W8G8's step is to be over the slowest link."""
_THESIS = {FP16.name: "QSDP's steps are up to 2.25x as fast as the baseline's (GPT 1.3B at 10 Gbit/s)"}
_CONSTANT = 0.15
"""What a step of W8G8 may be longer over a link that is ten times slower."""
_FAST_BPS = 10**9

FLAT = replace(W8G8, name="flat", title="W8G8, flat", transport="auto", colour="#8250c4")
HIERARCHICAL = replace(W8G8, name="hierarchical", title="W8G8, hierarchical", transport="auto", topology="hierarchical")
NODE_WAYS = (FP32, FLAT, HIERARCHICAL, NOTHING)

AllTimes = Mapping[str | None, Times]


def bandwidth_work(scale: Scale) -> Work:
    """Steps of all turns, over links and between nodes."""
    steps = sum(len(WAYS) * (1 + scale.rounds) * _steps(scale, rate) for rate in scale.rates)
    return Work(steps=steps + len(NODE_WAYS) * (1 + scale.rounds))


def _steps(scale: Scale, rate: str | None) -> int:
    """Of a turn: over fast links single steps are too short to tell apart."""
    return scale.fast_steps if rate is None or parse_rate(rate) >= _FAST_BPS else 1


def figure_5_3(study: Study) -> list[Finding]:
    """All ways in turns, over links of each rate; then on two nodes."""
    found = _measure(study)
    _draw(study, found)
    rows = [_step_times(study, found)]
    rows += [_faster(study, found, way) for way in (FP16, FP32, RAW)]
    rows += _constant(study, found)
    return [*rows, *_between_nodes(study)]


def _measure(study: Study) -> AllTimes:
    scale, found = study.scale, {}
    for steps in sorted({_steps(scale, rate) for rate in study.rates}):
        rates = [rate for rate in study.rates if _steps(scale, rate) == steps]
        times = study.contest().times_by_rate(
            study.model, WAYS, rounds=scale.rounds, steps=steps, rates=rates, on_turn=study.advance
        )
        found |= dict(zip(rates, times, strict=True))
    return {rate: found[rate] for rate in study.rates}


def _faster(study: Study, found: AllTimes, way: Way) -> Finding:
    """Of W8G8 over the slowest link; other links are told beside it."""
    slowest, asked = study.rates[0], ASKED[way.name]
    gained = {rate: times.times_faster(W8G8.name, way.name) for rate, times in found.items()}
    claim = _THESIS.get(way.name, "not in the thesis")
    shown = ", ".join(f"{value:.2f}x {where(rate)}" for rate, value in gained.items())
    return Finding(
        "figure 5.3",
        f"faster/{way.name}",
        gained[slowest],
        "x",
        f"{claim}; asked here: W8G8 at least {asked:g}x as fast as {way.title}, {where(slowest)}",
        shown,
        study.verdict(above(found[slowest].over(W8G8.name, way.name), asked)),
        {"gained": {str(rate): value for rate, value in gained.items()}},
    )


def _constant(study: Study, found: AllTimes) -> list[Finding]:
    """Whether a step takes as long over the second fastest link as over the fastest."""
    if len(study.rates) < 2:
        return []
    slow, fast = study.rates[-2:]
    names = {way.name: way.title for way in (W8G8, FP16)}
    longer = {name: found[slow].step_s(name) / found[fast].step_s(name) - 1 for name in names}
    faster = zip(found[slow].rounds[W8G8.name], found[fast].rounds[W8G8.name], strict=True)
    return [
        Finding(
            "figure 5.3",
            "constant",
            longer[W8G8.name],
            "",
            f"QSDP's step time is essentially constant: {where(slow)} within {_CONSTANT:.0%} of {where(fast)}",
            ", ".join(f"{title} {longer[name]:+.1%}" for name, title in names.items()),
            study.verdict(above([there / here for here, there in faster], 1 / (1 + _CONSTANT))),
        )
    ]


def _step_times(study: Study, found: AllTimes) -> Finding:
    """Every step time, and what the link makes of the baseline."""
    slowdown = {rate: times.step_s(FP16.name) / times.step_s(NOTHING.name) for rate, times in found.items()}
    shown = ", ".join(f"{value:.1f}x {where(rate)}" for rate, value in slowdown.items())
    return Finding(
        "figure 5.3",
        "step_s",
        found[study.rates[0]].step_s(W8G8.name),
        "s",
        "",
        f"steps of the baseline, with nothing sent as 1: {shown}",
        None,
        {
            "step_s": {way.name: {str(rate): times.step_s(way.name) for rate, times in found.items()} for way in WAYS},
            "by_round": {str(rate): times.rounds for rate, times in found.items()},
            "titles": {way.name: way.title for way in WAYS},
            "payload_bytes": next(iter(found.values())).payload_bytes,
            "stages_s": {str(rate): times.stages for rate, times in found.items()},
            "slowdown_of_the_baseline": {str(rate): value for rate, value in slowdown.items()},
            "num_ranks": NUM_RANKS,
        },
        aside="communication to computation",
    )


def _between_nodes(study: Study) -> list[Finding]:
    """Two nodes of two ranks."""
    scale, rate = study.scale, study.rate_or(study.scale.slow_rate)
    times = study.contest("nodes", MORE_RANKS).times(
        study.model, NODE_WAYS, rounds=scale.rounds, steps=1, rate=rate, on_turn=study.advance
    )
    gained = times.times_faster(HIERARCHICAL.name, FLAT.name)
    return [
        Finding(
            "section 5.6.1",
            "hierarchical_over_flat",
            gained,
            "x",
            "between nodes, hierarchical gathers and reductions are faster than flat ones, for they send less",
            f"{gained:.2f}x, {MORE_RANKS // RANKS_PER_NODE} nodes of {RANKS_PER_NODE} ranks {where(rate)} each; "
            f"{times.times_faster(HIERARCHICAL.name, FP32.name):.2f}x as fast as {FP32.title}",
            study.verdict(above(times.over(HIERARCHICAL.name, FLAT.name))),
            {
                "step_s": {way.name: times.step_s(way.name) for way in NODE_WAYS},
                "by_round": times.rounds,
                "titles": {way.name: way.title for way in NODE_WAYS},
                "payload_bytes": times.payload_bytes,
                "num_ranks": MORE_RANKS,
            },
        )
    ]


def _draw(study: Study, found: AllTimes) -> None:
    title = f"{study.model.title} on {NUM_RANKS} ranks, {study.scale.num_micro} accumulations"
    figure, (axes,) = plots.canvas(1, titles=[title], x="Gbit/s of each link", y="seconds a step")
    rates: Sequence[float] = [parse_rate(rate) / 1e9 if rate else 1.0 for rate in found]
    for way in WAYS:
        style = ":" if way is NOTHING else "-"
        seconds = [times.step_s(way.name) for times in found.values()]
        axes.plot(rates, seconds, style, color=way.colour, marker="o", label=way.title)
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.minorticks_off()
    plots.save(figure, study.picture("5.3-bandwidth"))
