"""Figures 4.5b, B.1 and B.6b: what is sent in each bucket, and what a bucket's bytes cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np

from experiments.framework.claims import Row
from experiments.framework.methods import Method
from experiments.papers.lgreco.gradients import Snapshot, choose, plan_bytes, reference_of
from experiments.papers.lgreco.methods import POWERSGD, kmeans_method, lgreco_method, settled, uniform_method
from experiments.papers.lgreco.study import NUM_RANKS, LGrecoScale, LGrecoStudy
from experiments.policies.baselines import ByPriority
from thinwire.compressors import Compressor
from thinwire.plan import sent_bytes
from thinwire.policies import LGreco, Policy, Sync, parse_policy
from thinwire.policies.lgreco import seconds_per_byte
from thinwire_tools import plots

_SKIPPED_STEPS = 2
"""Of a new plan: its first steps open new messages."""

PerBucket = dict[str, list[float]]
"""Bytes of each bucket in communication order, in the mean over training, by policy."""


def methods(scale: LGrecoScale) -> list[Method]:
    """Whose steps are timed: as L-GreCo is, and with buckets weighed."""
    prioritized = Method(
        "priority",
        "PowerSGD, L-GreCo by priority",
        "#1f6fb2",
        spec=POWERSGD.spec("gpt"),
        adapt=settled("lgreco", scale.warm_up),
        by_priority=True,
    )
    adapted, other = lgreco_method(POWERSGD, scale.warm_up), kmeans_method(POWERSGD, scale.warm_up)
    return [uniform_method(POWERSGD), adapted, prioritized, other]


def time_aware(scale: LGrecoScale) -> Method:
    """A policy that tries plans until it knows what each bucket costs."""
    adapt = f"lgreco(every={scale.trial_steps}, window=1, lag=2, objective='time')"
    return Method("time", "PowerSGD, time-aware L-GreCo", "#0a7d4f", spec=POWERSGD.spec("gpt"), adapt=adapt)


def steps(scale: LGrecoScale) -> int:
    """Of all turns, of the trials, and of the trainings whose gradients are recorded."""
    turns = len(methods(scale)) * (1 + scale.rounds) * scale.turn_steps
    return scale.runs * (turns + scale.trials * scale.trial_steps) + scale.recorded_steps


def buckets(study: LGrecoStudy) -> list[Row]:
    """What policies put into each bucket, and how long it takes."""
    scale, (name, rate) = study.scale, next(iter(study.rates.items()))
    (times,) = study.times(methods(scale), rates=(rate,))
    bucket_of = {row["name"]: row["bucket"] for row in times.layers[POWERSGD.name]}
    recording = study.recording()
    snapshots = list(recording.snapshots(recording.of("gpt")[0]))
    by_method = per_bucket(snapshots, bucket_of)
    runs = study.timing(NUM_RANKS).each(
        lambda timing: timing.syncs(
            study.model, time_aware(scale), steps=scale.trials * scale.trial_steps, rate=rate, on_turn=study.advance
        )[0]
    )
    tried = [(syncs, per_byte) for syncs in runs if (per_byte := seconds_per_byte(syncs)) is not None]
    _draw(study, by_method, [per_byte for _, per_byte in tried])
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


def _policies() -> dict[str, Policy]:
    return {"lgreco": LGreco(), "kmeans": parse_policy("kmeans()"), "priority": ByPriority()}


def per_bucket(snapshots: Sequence[Snapshot], bucket_of: Mapping[str, int]) -> PerBucket:
    """What uniform PowerSGD and each policy send in each bucket, in the mean over the snapshots."""
    spec = POWERSGD.spec("gpt")
    plans: dict[str, list[Mapping[str, Compressor]]] = {"uniform": [reference_of(spec, s) for s in snapshots]}
    for name, policy in _policies().items():
        plans[name] = choose(policy, spec, snapshots, bucket_of)
    by_method = {}
    for name, chosen in plans.items():
        sums = [_by_bucket(plan, s, bucket_of) for plan, s in zip(chosen, snapshots, strict=True)]
        by_method[name] = [fmean(column) for column in zip(*sums, strict=True)]
    return by_method


def _by_bucket(plan: Mapping[str, Compressor], snapshot: Snapshot, bucket_of: Mapping[str, int]) -> list[float]:
    sums = [0.0] * (1 + max(bucket_of.values()))
    for name, gradient in snapshot.gradients.items():
        sums[bucket_of[name]] += sent_bytes(plan[name], tuple(gradient.shape), NUM_RANKS)
    return sums


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


def _draw(study: LGrecoStudy, by_method: PerBucket, per_byte: Sequence[Sequence[float]]) -> None:
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
