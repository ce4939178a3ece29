"""Figures 4.2 to 4.4 with figure B.3: how fast steps are over slow links, from one rank to several."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from experiments.framework.claims import Row
from experiments.framework.methods import FP32, NOTHING, Method
from experiments.framework.study import draw_bars
from experiments.framework.timing import Times
from experiments.papers.lgreco.methods import (
    BITS,
    FAMILIES,
    POWERSGD,
    kmeans_method,
    lgreco,
    lgreco_method,
    settled,
    uniform_method,
    with_policy,
)
from experiments.papers.lgreco.study import RATES, LGrecoScale, LGrecoStudy, where
from experiments.tasks.images import Model
from thinwire_tools import plots

AllTimes = dict[tuple[int, str], Times]
"""By number of ranks and rate."""
FIGURES: dict[str, str] = dict(zip(RATES, ("figure 4.3", "figure 4.4"), strict=True))
"""The slower link stands for several nodes, the faster one for a single node's bus."""
STAGES = {"encode_s": "encoding", "reduce_s": "reducing", "decode_s": "decoding", "wire_s": "the wire"}


def methods(scale: LGrecoScale) -> list[Method]:
    pairs = [method for f in FAMILIES for method in (uniform_method(f), lgreco_method(f, scale.warm_up))]
    others = [kmeans_method(family, scale.warm_up) for family in (BITS, POWERSGD)]
    return [FP32, *pairs, *others, NOTHING]


def steps(scale: LGrecoScale) -> int:
    """Of all turns, of one rank by itself too."""
    turns = len(methods(scale)) * len(scale.worlds) * len(RATES) + 1
    return turns * (1 + scale.rounds) * scale.turn_steps * scale.runs


def speed(study: LGrecoStudy) -> list[Row]:
    """All methods in turns, over links of each rate, by worlds of several sizes."""
    scale, model, all_times = study.scale, study.model, {}
    for num_ranks in scale.worlds:
        times = study.times(methods(scale), num_ranks=num_ranks, rates=tuple(study.rates.values()))
        all_times |= {(num_ranks, rate): at for rate, at in zip(study.rates, times, strict=True)}
    # One rank by itself sends nothing.
    (alone,) = study.times((FP32,), num_ranks=1, rates=(None,))
    _draw_scaling(study, model, all_times, alone)
    _draw_profile(study, all_times)
    rows = []
    for rate in study.rates:
        largest = all_times[max(scale.worlds), rate]
        rows.append(scaling(scale, model, rate, all_times, alone))
        for family in (BITS, POWERSGD):
            names = (family.name, f"{family.name} lgreco", f"{family.name} kmeans")
            data = {"step_s": {name: largest.rounds[name] for name in names}}
            gained = largest.times_faster(*names[1:])
            rows.append(Row("table 4.5", f"speed_over_kmeans/{family.name}/{rate}", gained, "x", data))
        # Where each rank has a core of its own.
        fewest = all_times[min(scale.worlds), rate]
        data = {"stages_s": fewest.least_stages, "step_s": fewest.rounds}
        compressing = fmean(compressing_shares(data, POWERSGD.name, POWERSGD.name))
        rows.append(Row("figure B.3", f"profile/{rate}", compressing, "", data))
    return rows


def profile(row: Mapping[str, Any]) -> dict[str, float]:
    """Share of a step by PowerSGD that each stage takes, in the mean of runs; much of it while backward goes on."""
    steps_s = row["step_s"][POWERSGD.name]
    return {
        stage: fmean(s / step_s for s, step_s in zip(seconds, steps_s, strict=True))
        for stage, seconds in row["stages_s"][POWERSGD.name].items()
    }


def compressing_shares(row: Mapping[str, Any], name: str, step: str) -> list[float]:
    """By run, the seconds that method ``name`` compresses, as a share of a step by ``step``."""
    by_stage = [seconds for stage, seconds in row["stages_s"][name].items() if stage != "wire_s"]
    return [sum(stages) / step_s for *stages, step_s in zip(*by_stage, row["step_s"][step], strict=True)]


def items_per_s(model: Model, times: Times, name: str, num_ranks: int) -> float:
    """Of all ranks together."""
    return num_ranks * model.items_per_batch / times.step_s(name)


def scaling(scale: LGrecoScale, model: Model, rate: str, all_times: AllTimes, alone: Times) -> Row:
    """Throughput by method and number of ranks, and all that it follows from."""
    worlds, shown = scale.worlds, [method for method in methods(scale) if method is not NOTHING]
    by_method = {m.name: {n: items_per_s(model, all_times[n, rate], m.name, n) for n in worlds} for m in shown}
    ideal = {n: items_per_s(model, all_times[n, rate], NOTHING.name, n) for n in worlds}
    data = {
        "items_per_s": {"1": items_per_s(model, alone, FP32.name, 1), **by_method},
        "nothing_sent": ideal,
        "titles": {method.name: method.title for method in shown},
        "payload_bytes": {n: all_times[n, rate].payload_bytes for n in worlds},
        "step_s": {str(n): all_times[n, rate].rounds for n in worlds},
    }
    most = max(worlds)
    return Row(FIGURES[rate], f"scaling/{rate}", by_method["powersgd lgreco"][most] / ideal[most], "", data)


# --- figure 4.2: quality against step time over ranks of PowerSGD, uniform and by L-GreCo


def _spec(rank: int) -> str:
    return f"powersgd(rank={rank})"


def rank_methods(scale: LGrecoScale) -> list[Method]:
    methods = []
    for rank in scale.ranks:
        methods.append(Method(f"rank {rank}", f"rank {rank}", f"{POWERSGD.color}80", spec=_spec(rank)))
        adapt = settled("lgreco", scale.warm_up)
        methods.append(
            Method(f"rank {rank} lgreco", f"L-GreCo from {rank}", POWERSGD.color, spec=_spec(rank), adapt=adapt)
        )
    return methods


def rank_steps(scale: LGrecoScale) -> int:
    """Of trainings from one seed, and of all turns."""
    turns = (1 + scale.rounds) * scale.turn_steps
    return 2 * len(scale.ranks) * (scale.gpt.steps + scale.runs * turns)


def figure_4_2(study: LGrecoStudy) -> list[Row]:
    """Train with every rank, and time every rank over the slower link."""
    scale, (name, rate) = study.scale, next(iter(study.rates.items()))
    policy = lgreco(scale.every("gpt"))
    losses = {
        rank: (
            study.train("gpt", _spec(rank), 0).val_loss,
            study.train("gpt", with_policy(_spec(rank), policy), 0).val_loss,
        )
        for rank in scale.ranks
    }
    (times,) = study.times(rank_methods(scale), rates=(rate,))
    points = [point(rank, *losses[rank], times) for rank in scale.ranks]
    _draw_4_2(study, points, name)
    data = {"points": points, "payload_bytes": times.payload_bytes, "step_s": times.rounds, "rate": name}
    return [Row("figure 4.2", "frontier", fmean(p["uniform_s"] / p["lgreco_s"] for p in points), "x", data)]


def point(rank: int, uniform: float, adapted: float, times: Times) -> dict[str, float]:
    """One rank: its trainings' losses and its step's time, uniform and by L-GreCo."""
    seconds = {"uniform_s": times.step_s(f"rank {rank}"), "lgreco_s": times.step_s(f"rank {rank} lgreco")}
    return {"rank": rank, "uniform_loss": uniform, "lgreco_loss": adapted, **seconds}


# --- pictures


def _draw_4_2(study: LGrecoStudy, points: list[dict[str, float]], rate: str) -> None:
    figure, (axes,) = plots.canvas(1, titles=[f"PowerSGD, GPT {where(rate)}"], x="ms a step", y="held-out loss")
    for key, title, color in (("uniform", "uniform", "#555555"), ("lgreco", "L-GreCo", POWERSGD.color)):
        places = [(1e3 * p[f"{key}_s"], p[f"{key}_loss"]) for p in points]
        axes.plot(*zip(*places, strict=True), color=color, marker="o", label=title)
        for p, place in zip(points, places, strict=True):
            axes.annotate(f"{p['rank']}", place, textcoords="offset points", xytext=(4, 4), fontsize=8)
    plots.save(figure, study.picture("4.2"))


def _draw_scaling(study: LGrecoStudy, model: Model, all_times: AllTimes, alone: Times) -> None:
    worlds, rates = study.scale.worlds, list(study.rates)
    titles = [f"{model.title} {where(rate)}" for rate in rates]
    figure, panels = plots.canvas(len(rates), titles=titles, x="ranks", y=model.unit)
    single = items_per_s(model, alone, FP32.name, 1)
    for axes, rate in zip(panels, rates, strict=True):
        for method in methods(study.scale):
            values = [items_per_s(model, all_times[n, rate], method.name, n) for n in worlds]
            style = ":" if method is NOTHING else "--" if method.name in ("bits", "topk", "powersgd") else "-"
            axes.plot([1, *worlds], [single, *values], style, color=method.color, marker="o", label=method.title)
        axes.set_xticks([1, *worlds])
        axes.set_ylim(bottom=0)
    # Beside the last panel: inside, it would hide lines.
    panels[-1].legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    plots.save(figure, study.picture("4.3-4.4"), legends=False)


def _draw_profile(study: LGrecoStudy, all_times: AllTimes) -> None:
    """Bars from computing, as long as a step with nothing sent, and what communication adds to it."""
    rates, num_ranks = list(study.rates), min(study.scale.worlds)
    titles = [f"{num_ranks} ranks {where(rate)}" for rate in rates]
    figure, panels = plots.canvas(len(rates), titles=titles, x="", y="ms a step")
    for axes, rate in zip(panels, rates, strict=True):
        times = all_times[num_ranks, rate]
        shown = [("nothing sent", "#aaaaaa", 1e3 * times.step_s(NOTHING.name))]
        shown += [("fp32", FP32.color, 1e3 * times.step_s(FP32.name))]
        shown += [(f"{POWERSGD.title}, uniform", POWERSGD.color, 1e3 * times.step_s(POWERSGD.name))]
        stages = times.least_stages[POWERSGD.name]
        shown += [(f"  of it {title}", "#c9b3e6", 1e3 * fmean(stages[s])) for s, title in STAGES.items() if s in stages]
        draw_bars(axes, shown)
    plots.save(figure, study.picture("B.3"))
