"""Figures 4.2 to 4.4 with B.3, and 4.5b, B.1 and B.6b: how fast steps are over slow links, and what buckets cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np

from experiments.framework.claims import Row
from experiments.framework.methods import FP32, NOTHING, Method
from experiments.framework.study import draw_bars
from experiments.framework.timing import Times, where
from experiments.papers.lgreco.gradients import Snapshot, choose, plan_bytes
from experiments.papers.lgreco.laboratory import bytes_of_buckets
from experiments.papers.lgreco.methods import (
    BITS,
    FAMILIES,
    POWERSGD,
    adapted_method,
    policy_of,
    settled,
    uniform_method,
    with_policy,
)
from experiments.papers.lgreco.study import NUM_RANKS, RATES, LGrecoScale, LGrecoStudy
from experiments.tasks.images import Model
from thinwire.policies import LGreco, Sync
from thinwire.policies.lgreco import seconds_per_byte
from thinwire_tools import plots

AllTimes = dict[tuple[int, str], Times]
"""By number of ranks and rate."""
FIGURES: dict[str, str] = dict(zip(RATES, ("figure 4.3", "figure 4.4"), strict=True))
"""The slower link stands for several nodes, the faster one for a single node's bus."""
STAGES = {"encode_s": "encoding", "reduce_s": "reducing", "decode_s": "decoding", "wire_s": "the wire"}


def methods(scale: LGrecoScale) -> list[Method]:
    pairs = [method for f in FAMILIES for method in (uniform_method(f), adapted_method(f, "lgreco", scale.warm_up))]
    others = [adapted_method(family, "kmeans", scale.warm_up) for family in (BITS, POWERSGD)]
    return [FP32, *pairs, *others, NOTHING]


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


def figure_4_2(study: LGrecoStudy) -> list[Row]:
    """Train with every rank, and time every rank over the slower link."""
    scale, (name, rate) = study.scale, next(iter(study.rates.items()))
    policy = policy_of("lgreco", scale.every("gpt"))
    variants = {rank: (_spec(rank), with_policy(_spec(rank), policy)) for rank in scale.ranks}
    losses = {
        variant: [study.train("gpt", variant, seed).val_loss for seed in study.seeds]
        for pair in variants.values()
        for variant in pair
    }
    (times,) = study.times(rank_methods(scale), rates=(rate,))
    points = [point(rank, losses[uniform], losses[adapted], times) for rank, (uniform, adapted) in variants.items()]
    _draw_4_2(study, points, name)
    data = {"points": points, "payload_bytes": times.payload_bytes, "step_s": times.rounds, "rate": name}
    return [Row("figure 4.2", "frontier", fmean(p["uniform_s"] / p["lgreco_s"] for p in points), "x", data)]


def point(rank: int, uniform: Sequence[float], adapted: Sequence[float], times: Times) -> dict[str, Any]:
    """One rank: its trainings' losses by seed and its step's time, uniform and by L-GreCo."""
    seconds = {"uniform_s": times.step_s(f"rank {rank}"), "lgreco_s": times.step_s(f"rank {rank} lgreco")}
    return {"rank": rank, "uniform_losses": uniform, "lgreco_losses": adapted, **seconds}


def at_equal_loss(row: Mapping[str, Any]) -> list[float]:
    """How many times longer uniform compression's steps take at the losses that L-GreCo ends at, on the line through
    its ranks: the geometric mean of those within the line, by seed, each with the times of a run of its own."""
    points, step_s, ratios = row["points"], row["step_s"], []
    trained = [len(point["uniform_losses"]) for point in points]
    for at in range(min(*trained, *map(len, step_s.values()))):
        uniform, adapted = (
            sorted((p[f"{how}_losses"][at], math.log(step_s[f"rank {p['rank']}{of}"][at])) for p in points)
            for how, of in (("uniform", ""), ("lgreco", " lgreco"))
        )
        losses, log_s = zip(*uniform, strict=True)
        gains = [np.interp(loss, losses, log_s) - own for loss, own in adapted if losses[0] <= loss <= losses[-1]]
        ratios += [math.exp(fmean(gains))] if gains else []
    return ratios


# --- pictures


def _draw_4_2(study: LGrecoStudy, points: list[dict[str, Any]], rate: str) -> None:
    figure, (axes,) = plots.canvas(1, titles=[f"PowerSGD, GPT {where(rate)}"], x="ms a step", y="held-out loss")
    for key, title, color in (("uniform", "uniform", "#555555"), ("lgreco", "L-GreCo", POWERSGD.color)):
        places = [(1e3 * p[f"{key}_s"], fmean(p[f"{key}_losses"])) for p in points]
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


_SKIPPED_STEPS = 2
"""Of a new plan: its first steps open new messages."""


def bucket_methods(scale: LGrecoScale) -> list[Method]:
    """Whose steps are timed: as L-GreCo is, and with buckets weighed."""
    adapted, other = (adapted_method(POWERSGD, policy, scale.warm_up) for policy in ("lgreco", "kmeans"))
    title = "PowerSGD, L-GreCo by priority"
    prioritized = replace(adapted, name="priority", title=title, color="#1f6fb2", by_priority=True)
    return [uniform_method(POWERSGD), adapted, prioritized, other]


def time_aware(scale: LGrecoScale) -> Method:
    """A policy that tries plans until it knows what each bucket costs."""
    adapt = f"lgreco(every={scale.trial_steps}, window=1, lag=2, objective='time')"
    return Method("time", "PowerSGD, time-aware L-GreCo", "#0a7d4f", spec=POWERSGD.spec("gpt"), adapt=adapt)


def buckets(study: LGrecoStudy) -> list[Row]:
    """What policies put into each bucket, and how long it takes."""
    scale, (name, rate) = study.scale, next(iter(study.rates.items()))
    (times,) = study.times(bucket_methods(scale), rates=(rate,))
    bucket_of = {row["name"]: row["bucket"] for row in times.layers[POWERSGD.name]}
    snapshots = study.recorded("gpt")[0].snapshots
    by_method = bytes_of_buckets(study)
    runs = study.timing(NUM_RANKS).each(
        lambda timing: timing.syncs(
            study.model, time_aware(scale), steps=scale.trials * scale.trial_steps, rate=rate, on_turn=study.advance
        )[0]
    )
    tried = [(syncs, per_byte) for syncs in runs if (per_byte := seconds_per_byte(syncs)) is not None]
    _draw_buckets(study, by_method, [per_byte for _, per_byte in tried])
    adapted = f"{POWERSGD.name} lgreco"
    data = {
        "step_s": times.rounds,
        "payload_bytes": times.payload_bytes,
        "layers": times.layers,
        "bytes_per_bucket": by_method,
        "rate": name,
    }
    rows = [Row("figure B.1", "priority_slower", times.times_faster(adapted, "priority"), "x", data)]
    if not tried:
        return rows
    # What was fitted to the times of one run predicts those of the next.
    scores = [
        fit_quality(medians(syncs, len(per_byte)), per_byte)
        for (_, per_byte), (syncs, _) in zip(tried, [*tried[1:], tried[0]], strict=True)
    ]
    ns_per_byte = [[1e9 * value for value in per_byte] for _, per_byte in tried]
    spreads = [max(values) / fmean(values) - 1 for values in ns_per_byte]
    weighed = [_weighed(syncs, snapshots, bucket_of) for syncs, _ in tried]
    return [
        *rows,
        Row("section 4.6.5", "fit", fmean(scores), "", {"by_run": scores}),
        Row("figure B.6b", "coefficients_alike", fmean(spreads), "", {"ns_per_byte": ns_per_byte, "by_run": spreads}),
        Row("section 4.6.5", "time_plan_alike", fmean(weighed), "x", {"by_run": weighed}),
    ]


def medians(syncs: Sequence[Sync], num_buckets: int) -> list[Sync]:
    """Each plan's median time, of those that the regression takes."""
    seen: dict[tuple[int, ...], list[float]] = {}
    for sync in syncs:
        seen.setdefault(sync.bucket_bytes, []).append(sync.seconds)
    settled_ones = {sizes: seconds[_SKIPPED_STEPS:] for sizes, seconds in seen.items() if len(sizes) == num_buckets}
    return [Sync(sizes, float(np.median(seconds))) for sizes, seconds in settled_ones.items() if seconds]


def _weighed(syncs: Sequence[Sync], snapshots: Sequence[Snapshot], bucket_of: Mapping[str, int]) -> float:
    """Bytes of plans that minimize the predicted time, for those of plans that minimize bytes."""
    spec = POWERSGD.spec("gpt")
    by_bytes = choose(LGreco(), spec, snapshots, bucket_of)
    by_time = choose(LGreco(objective="time"), spec, snapshots, bucket_of, syncs)
    plans = zip(by_time, by_bytes, snapshots, strict=True)
    return fmean(plan_bytes(timed, at) / plan_bytes(plain, at) for timed, plain, at in plans)


def _draw_buckets(
    study: LGrecoStudy, by_method: Mapping[str, Sequence[float]], per_byte: Sequence[Sequence[float]]
) -> None:
    titles = ["figures 4.5b and B.1: what each bucket sends", "figure B.6b: what a byte of it costs"]
    figure, panels = plots.canvas(
        2, titles=titles, x="bucket, in the order of sending", y=["kB per step", "ns per byte"]
    )
    shown = {
        "uniform": ("uniform", "#aaaaaa"),
        "lgreco": ("L-GreCo", POWERSGD.color),
        "kmeans": ("k-means", "#d98a00"),
        "priority": ("L-GreCo by priority", "#1f6fb2"),
    }
    width = 0.8 / len(by_method)
    for at, (name, values) in enumerate(by_method.items()):
        places = [1 + bucket + (at - (len(by_method) - 1) / 2) * width for bucket in range(len(values))]
        title, color = shown[name]
        panels[0].bar(places, [value / 1e3 for value in values], width, color=color, label=title)
    for axes in panels:
        axes.set_xticks(range(1, 1 + len(by_method["uniform"])))
    if per_byte:
        mean = [1e9 * fmean(values) for values in zip(*per_byte, strict=True)]
        panels[1].bar(range(1, 1 + len(mean)), mean, color="#0a7d4f")
    plots.save(figure, study.picture("4.5b-B.1-B.6b"))


def fit_quality(syncs: Sequence[Sync], per_byte: Sequence[float]) -> float:
    """R² of the regression's times against those measured, of steps with as many buckets."""
    alike = [sync for sync in syncs if len(sync.bucket_bytes) == len(per_byte)]
    times = np.array([sync.seconds for sync in alike])
    predicted = np.array([sum(b * t for b, t in zip(sync.bucket_bytes, per_byte, strict=True)) for sync in alike])
    if not alike:
        return 0.0
    predicted += (times - predicted).mean()
    spread = float(((times - times.mean()) ** 2).sum())
    return 1.0 - float(((times - predicted) ** 2).sum()) / spread if spread else 1.0
