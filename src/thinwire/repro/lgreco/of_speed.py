"""Figures 4.3 and 4.4 with figure B.3: how fast steps are over slow links, from one rank to several."""

from __future__ import annotations

from collections.abc import Mapping

from thinwire.repro import plots
from thinwire.repro.cgx.contest import Times
from thinwire.repro.cgx.judging import above
from thinwire.repro.cgx.models import Model
from thinwire.repro.cgx.ways import FP32, NOTHING, Way
from thinwire.repro.findings import Finding
from thinwire.repro.lgreco.methods import BITS, FAMILIES, POWERSGD, kmeans_way, lgreco_way, uniform_way
from thinwire.repro.lgreco.study import Scale, Study, Work, where

AllTimes = dict[tuple[int, str | None], Times]
"""By number of ranks and rate."""
_THESIS = {
    "bits": "2 % on one node",
    "topk": "up to 25 % on one node",
    "powersgd": "up to 25 % on one node, up to 2.4x on several",
}
_MOST_COMPRESSING = 0.1
_STAGES = {"encode_s": "encoding", "reduce_s": "reducing", "decode_s": "decoding", "wire_s": "the wire"}


def ways(scale: Scale) -> list[Way]:
    pairs = [way for f in FAMILIES for way in (uniform_way(f), lgreco_way(f, scale.warm_up))]
    others = [kmeans_way(family, scale.warm_up) for family in (BITS, POWERSGD)]
    return [FP32, *pairs, *others, NOTHING]


def work(scale: Scale) -> Work:
    """Steps of all turns, of one rank by itself too."""
    turns = len(ways(scale)) * len(scale.worlds) * len(scale.rates) + 1
    return Work(steps=turns * (1 + scale.rounds) * scale.steps)


def speed(study: Study) -> list[Finding]:
    """All ways in turns, over links of each rate, by worlds of several sizes."""
    found = _measure(study)
    alone = _alone(study)
    model, largest = study.model, max(study.scale.worlds)
    _draw_scaling(study, model, found, alone)
    _draw_profile(study, found)
    rows = []
    for rate in study.rates:
        times = found[largest, rate]
        rows += [
            _throughput(study, model, rate, found, alone),
            *(row for family in FAMILIES for row in _faster(study, rate, largest, family.name, times)),
            *(_over_kmeans(study, rate, family.name, times) for family in (BITS, POWERSGD)),
        ]
    return [*rows, *(_profile(study, rate, found) for rate in study.rates)]


def _measure(study: Study) -> AllTimes:
    scale, found = study.scale, {}
    for num_ranks in scale.worlds:
        times = study.contest(num_ranks).times_by_rate(
            study.model,
            ways(scale),
            rounds=scale.rounds,
            steps=scale.steps,
            rates=study.rates,
            on_turn=lambda steps, title, n=num_ranks: study.advance(steps, f"{n} ranks, {title}"),
        )
        found |= {(num_ranks, rate): at for rate, at in zip(study.rates, times, strict=True)}
    return found


def _alone(study: Study) -> Times:
    """Steps of one rank by itself, which sends nothing."""
    scale = study.scale
    return study.contest(1).times(
        study.model,
        (FP32,),
        rounds=scale.rounds,
        steps=scale.steps,
        rate=None,
        on_turn=lambda steps, _: study.advance(steps, "one rank"),
    )


def _faster(study: Study, rate: str | None, num_ranks: int, family: str, times: Times) -> list[Finding]:
    """Whether steps by L-GreCo are shorter than by uniform compression, and than uncompressed ones."""
    figure = _figure(study, rate)
    adapted, sent = f"{family} lgreco", times.payload_bytes
    gained = times.times_faster(adapted, family)
    return [
        Finding(
            figure,
            f"lgreco_over_uniform/{family}/{rate}",
            gained,
            "x",
            f"{_title(family)}: steps by L-GreCo are faster than by uniform compression ({_THESIS[family]})",
            f"{gained:.3f}x uniform's throughput, {num_ranks} ranks {where(rate)}: "
            f"{sent[adapted] / 1e3:.0f} kB a step against {sent[family] / 1e3:.0f} kB",
            study.verdict(above(times.over(adapted, family))),
            {"step_s": {name: times.rounds[name] for name in (adapted, family)}, "payload_bytes": sent},
        ),
        Finding(
            figure,
            f"lgreco_over_fp32/{family}/{rate}",
            times.times_faster(adapted, FP32.name),
            "x",
            f"{_title(family)}: steps by L-GreCo are faster than uncompressed ones",
            f"{times.times_faster(adapted, FP32.name):.2f}x fp32's throughput, {num_ranks} ranks {where(rate)}; "
            f"uniform {times.times_faster(family, FP32.name):.2f}x",
            study.verdict(above(times.over(adapted, FP32.name))),
        ),
    ]


def _over_kmeans(study: Study, rate: str | None, family: str, times: Times) -> Finding:
    adapted, other = f"{family} lgreco", f"{family} kmeans"
    gained = times.times_faster(adapted, other)
    return Finding(
        "table 4.5",
        f"speed_over_kmeans/{family}/{rate}",
        gained,
        "x",
        f"{_title(family)}: L-GreCo's steps are faster than those of k-means (PowerSGD: 144k against 124k tokens/s on "
        "one node, 150k against 112k on several)",
        f"{gained:.3f}x its throughput, {where(rate)}; k-means {times.times_faster(other, family):.3f}x uniform's",
        study.verdict(above(times.over(adapted, other))),
    )


def items_per_s(model: Model, times: Times, name: str, num_ranks: int) -> float:
    """Of all ranks together."""
    return num_ranks * model.items_per_batch / times.step_s(name)


def _throughput(study: Study, model: Model, rate: str | None, found: AllTimes, alone: Times) -> Finding:
    worlds, shown = study.scale.worlds, [*ways(study.scale)]
    by_way = {
        way.name: {n: items_per_s(model, found[n, rate], way.name, n) for n in worlds}
        for way in shown
        if way is not NOTHING
    }
    ideal = {n: items_per_s(model, found[n, rate], NOTHING.name, n) for n in worlds}
    largest = max(worlds)
    texts = [f"{way.title} {by_way[way.name][largest]:,.0f}" for way in shown if way is not NOTHING]
    return Finding(
        _figure(study, rate),
        f"scaling/{rate}",
        by_way["powersgd lgreco"][largest] / ideal[largest],
        "",
        "",
        f"{model.unit} of {largest} ranks {where(rate)}: {', '.join(texts)}; nothing sent {ideal[largest]:,.0f}; one "
        f"rank {items_per_s(model, alone, FP32.name, 1):,.0f}",
        None,
        {
            "items_per_s": {"1": items_per_s(model, alone, FP32.name, 1), **by_way},
            "nothing_sent": ideal,
            "titles": {way.name: way.title for way in shown},
            "payload_bytes": {n: found[n, rate].payload_bytes for n in worlds},
            "step_s": {str(n): found[n, rate].rounds for n in worlds},
        },
        aside=f"throughput {where(rate)}",
    )


def _profile(study: Study, rate: str | None, found: AllTimes) -> Finding:
    """Figure B.3: what a step by PowerSGD is made of, where each rank has a core of its own."""
    times = found[min(study.scale.worlds), rate]
    name = POWERSGD.name
    shares = profile(times, name)
    compressing = sum(share for stage, share in shares.items() if stage != "wire_s")
    return Finding(
        "figure B.3",
        f"profile/{rate}",
        compressing,
        "",
        "PowerSGD's compression takes less than 10 % of a step (section B.5)",
        f"{compressing:.1%} of a step {where(rate)}: "
        + ", ".join(f"{title} {shares[stage]:.1%}" for stage, title in _STAGES.items() if stage in shares)
        + f"; uncompressed steps take {times.step_s(FP32.name) / times.step_s(name):.2f}x as long",
        study.verdict(compressing < _MOST_COMPRESSING),
        {
            "stages_s": times.stages,
            "step_s": {way: times.step_s(way) for way in times.rounds},
        },
    )


def profile(times: Times, name: str) -> Mapping[str, float]:
    """Share of a step that each stage takes, much of it while backward goes on."""
    return {stage: seconds / times.step_s(name) for stage, seconds in times.stages[name].items()}


def _figure(study: Study, rate: str | None) -> str:
    """The slower link stands for several nodes, the faster one for a single node's bus."""
    return "figure 4.4" if len(study.rates) > 1 and rate == study.rates[-1] else "figure 4.3"


def _title(family: str) -> str:
    return next(f.title for f in FAMILIES if f.name == family)


def _draw_scaling(study: Study, model: Model, found: AllTimes, alone: Times) -> None:
    worlds, rates = study.scale.worlds, study.rates
    titles = [f"{model.title} {where(rate)}" for rate in rates]
    figure, panels = plots.canvas(len(rates), titles=titles, x="ranks", y=model.unit)
    single = items_per_s(model, alone, FP32.name, 1)
    for axes, rate in zip(panels, rates, strict=True):
        for way in ways(study.scale):
            values = [items_per_s(model, found[n, rate], way.name, n) for n in worlds]
            style = ":" if way is NOTHING else "--" if way.name in ("bits", "topk", "powersgd") else "-"
            axes.plot([1, *worlds], [single, *values], style, color=way.colour, marker="o", label=way.title)
        axes.set_xticks([1, *worlds])
        axes.set_ylim(bottom=0)
    # Beside the last panel: inside, it would hide lines.
    panels[-1].legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    plots.save(figure, study.picture("4.3-4.4"), legends=False)


def _draw_profile(study: Study, found: AllTimes) -> None:
    """Bars from computing, as long as a step with nothing sent, and what communication adds to it."""
    rates, num_ranks = study.rates, min(study.scale.worlds)
    titles = [f"{num_ranks} ranks {where(rate)}" for rate in rates]
    figure, panels = plots.canvas(len(rates), titles=titles, x="", y="ms a step")
    for axes, rate in zip(panels, rates, strict=True):
        times = found[num_ranks, rate]
        shown = [("nothing sent", "#aaaaaa", 1e3 * times.step_s(NOTHING.name))]
        shown += [("fp32", FP32.colour, 1e3 * times.step_s(FP32.name))]
        shown += [(f"{POWERSGD.title}, uniform", POWERSGD.colour, 1e3 * times.step_s(POWERSGD.name))]
        stages = times.stages[POWERSGD.name]
        shown += [(f"  of it {title}", "#c9b3e6", 1e3 * stages[s]) for s, title in _STAGES.items() if s in stages]
        plots.bars(axes, shown)
    plots.save(figure, study.picture("B.3"))
