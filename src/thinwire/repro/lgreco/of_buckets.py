"""Figures 4.5b, B.1 and B.6b: what travels in each bucket, and what a bucket's bytes cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from thinwire.compressors import Compressor
from thinwire.plan import LGreco, Policy, Sync, parse_policy, sent_bytes
from thinwire.plan.timing import fit_quality, seconds_per_byte
from thinwire.repro import plots
from thinwire.repro.cgx.contest import Times
from thinwire.repro.cgx.judging import above
from thinwire.repro.cgx.ways import Way
from thinwire.repro.findings import Finding
from thinwire.repro.lgreco.gradients import Snapshot, choose, reference_of
from thinwire.repro.lgreco.methods import POWERSGD, kmeans_way, lgreco_way, settled, uniform_way
from thinwire.repro.lgreco.study import NUM_RANKS, Scale, Study, Work, where

_GOOD_FIT = 0.9
_ALIKE = 0.1
_SKIPPED_STEPS = 2
"""Of a new plan: its first steps open new messages."""
_PRIORITY = "objective='priority'"

PerBucket = dict[str, list[float]]
"""Bytes of each bucket in communication order, in the mean over training, by policy."""


def ways(scale: Scale) -> list[Way]:
    """Whose steps are timed: as L-GreCo is, and with buckets weighed."""
    prioritised = Way(
        "priority",
        "PowerSGD, L-GreCo by priority",
        "#1f6fb2",
        spec=POWERSGD.spec("gpt"),
        adapt=settled("lgreco", scale.warm_up, _PRIORITY),
    )
    adapted, other = lgreco_way(POWERSGD, scale.warm_up), kmeans_way(POWERSGD, scale.warm_up)
    return [uniform_way(POWERSGD), adapted, prioritised, other]


def time_aware(scale: Scale) -> Way:
    """A policy that tries plans until it knows what each bucket costs."""
    adapt = f"lgreco(every={scale.trial_steps}, window=1, lag=2, objective='time')"
    return Way("time", "PowerSGD, time-aware L-GreCo", "#0a7d4f", spec=POWERSGD.spec("gpt"), adapt=adapt)


def work(scale: Scale) -> Work:
    """Steps of all turns and of the trials, and snapshots."""
    turns = len(ways(scale)) * (1 + scale.rounds) * scale.steps
    return Work(snapshots=frozenset({"gpt"}), steps=turns + scale.trials * scale.trial_steps)


def buckets(study: Study) -> list[Finding]:
    """What policies put into each bucket, and how long it takes."""
    scale, model, rate = study.scale, study.model, study.rates[0]
    contest = study.contest(NUM_RANKS)
    times = contest.times(model, ways(scale), rounds=scale.rounds, steps=scale.steps, rate=rate, on_turn=study.advance)
    trials = contest.syncs(
        model, time_aware(scale), steps=scale.trials * scale.trial_steps, rate=rate, on_turn=study.advance
    )
    bucket_of = {row["name"]: row["bucket"] for row in times.layers[POWERSGD.name]}
    snapshots = study.snapshots("gpt")
    found = per_bucket(snapshots, bucket_of)
    per_byte, quality = fitted(trials[0])
    _draw(study, found, per_byte)
    return [
        *bucket_rows(found),
        priority_row(times, where(rate), timed=study.emulated),
        *time_rows(per_byte, quality, _weighed(trials[0], snapshots, bucket_of), timed=study.emulated),
    ]


def _policies() -> dict[str, Policy]:
    return {
        "lgreco": LGreco(),
        "kmeans": parse_policy("kmeans()"),
        "priority": LGreco(objective="priority"),
    }


def per_bucket(snapshots: Sequence[Snapshot], bucket_of: Mapping[str, int]) -> PerBucket:
    """What uniform PowerSGD and each policy send in each bucket, in the mean over the snapshots."""
    spec = POWERSGD.spec("gpt")
    plans: dict[str, list[Mapping[str, Compressor]]] = {"uniform": [reference_of(spec, s) for s in snapshots]}
    for name, policy in _policies().items():
        plans[name] = [at.plan for at in choose(policy, spec, snapshots, bucket_of=bucket_of)]
    found = {}
    for name, chosen in plans.items():
        sums = [_by_bucket(plan, s, bucket_of) for plan, s in zip(chosen, snapshots, strict=True)]
        found[name] = [fmean(column) for column in zip(*sums, strict=True)]
    return found


def _by_bucket(plan: Mapping[str, Compressor], snapshot: Snapshot, bucket_of: Mapping[str, int]) -> list[float]:
    sums = [0.0] * (1 + max(bucket_of.values()))
    for name, gradient in snapshot.gradients.items():
        sums[bucket_of[name]] += sent_bytes(plan[name], tuple(gradient.shape), NUM_RANKS)
    return sums


def bucket_rows(found: PerBucket) -> list[Finding]:
    """Figures 4.5b and B.1: the largest bucket, and that which leaves last."""
    uniform, ours, theirs = (found[name] for name in ("uniform", "lgreco", "kmeans"))
    saved = [whole / part for whole, part in zip(uniform, ours, strict=True)]
    largest = int(np.argmax(uniform))
    wanted = {largest, len(uniform) - 1}
    most = sorted(range(len(saved)), key=lambda b: saved[b], reverse=True)[: len(wanted)]
    texts = {name: " / ".join(f"{value / 1e3:.1f}" for value in values) for name, values in found.items()}
    share = {name: sum(values[len(values) // 2 :]) / sum(values) for name, values in found.items()}
    return [
        Finding(
            "figure 4.5b",
            "largest_and_last_compressed_most",
            saved[-1],
            "x",
            "L-GreCo compresses the largest and the last bucket the most (section 4.6.3)",
            f"kB by bucket as they leave: uniform {texts['uniform']}, L-GreCo {texts['lgreco']}, k-means "
            f"{texts['kmeans']}; the largest is number {largest + 1} of {len(uniform)}",
            set(most) == wanted,
            {"bytes_per_bucket": found},
        ),
        Finding(
            "figure 4.5b",
            "last_bucket_over_kmeans",
            theirs[-1] / ours[-1],
            "x",
            "in the last bucket L-GreCo sends less than k-means",
            f"{ours[-1] / 1e3:.1f} kB against {theirs[-1] / 1e3:.1f} kB",
            ours[-1] < theirs[-1],
        ),
        Finding(
            "figure B.1",
            "priority_shifts",
            share["lgreco"] / share["priority"],
            "x",
            "by priority the buckets that leave last are compressed more (section B.1)",
            f"kB by bucket: L-GreCo {texts['lgreco']}, by priority {texts['priority']}; the later half has "
            f"{share['lgreco']:.1%} of the bytes against {share['priority']:.1%}",
            share["priority"] < share["lgreco"],
            {"bytes_per_bucket": found},
        ),
    ]


def priority_row(times: Times, place: str, *, timed: bool) -> Finding:
    """Section B.1: whether steps by priority are slower than by L-GreCo itself."""
    adapted = f"{POWERSGD.name} lgreco"
    slower = times.times_faster(adapted, "priority")
    return Finding(
        "figure B.1",
        "priority_slower",
        slower,
        "x",
        "bucket priority performs worse than L-GreCo itself (section B.1)",
        f"L-GreCo has {slower:.3f}x the throughput of L-GreCo by priority, {place}: "
        f"{times.payload_bytes[adapted] / 1e3:.0f} kB a step against {times.payload_bytes['priority'] / 1e3:.0f} kB",
        above(times.over(adapted, "priority")) if timed else None,
        {"step_s": times.rounds, "payload_bytes": times.payload_bytes, "layers": times.layers},
    )


def fitted(syncs: Sequence[Sync]) -> tuple[list[float] | None, float]:
    """Seconds a byte by bucket from the plans that were tried, and R² of their medians' prediction."""
    per_byte = seconds_per_byte(syncs)
    if per_byte is None:
        return None, float("nan")
    return per_byte, fit_quality(_medians(syncs, len(per_byte)), per_byte)


def _medians(syncs: Sequence[Sync], num_buckets: int) -> list[Sync]:
    """Each plan's median time, of those that the regression takes."""
    seen: dict[tuple[int, ...], list[float]] = {}
    for sync in syncs:
        seen.setdefault(sync.bucket_bytes, []).append(sync.seconds)
    settled_ones = {sizes: seconds[_SKIPPED_STEPS:] for sizes, seconds in seen.items() if len(sizes) == num_buckets}
    return [Sync(sizes, float(np.median(seconds))) for sizes, seconds in settled_ones.items() if seconds]


def time_rows(per_byte: list[float] | None, quality: float, weighed: float, *, timed: bool) -> list[Finding]:
    """Section 4.6.5 and figure B.6b: how well bytes tell times, and what plans become that minimise them: ``weighed``,
    their bytes for those of plans that minimise bytes."""
    if per_byte is None:
        claim = "bucket sizes predict communication time almost perfectly (section 4.6.5)"
        return [Finding("section 4.6.5", "fit", float("nan"), "", claim, "too few different plans were tried", None)]
    shown = ", ".join(f"{1e9 * value:.1f}" for value in per_byte)
    more: dict[str, Any] = {"ns_per_byte": [1e9 * value for value in per_byte], "r_squared": quality}
    spread = max(per_byte) / fmean(per_byte) - 1
    return [
        Finding(
            "section 4.6.5",
            "fit",
            quality,
            "",
            "bucket sizes predict communication time almost perfectly: the regression's score is close to 1",
            f"R² {quality:.3f} of the median times of the plans that were tried",
            quality > _GOOD_FIT if timed else None,
            more,
        ),
        Finding(
            "figure B.6b",
            "coefficients_alike",
            spread,
            "",
            "the coefficients of the buckets are close to each other (section B.7)",
            f"ns a byte, by bucket: {shown}; the largest is {spread:.0%} above the mean",
            spread < _ALIKE if timed else None,
            more,
        ),
        Finding(
            "section 4.6.5",
            "time_plan_alike",
            weighed,
            "x",
            "plans that minimise time are close to those that minimise bytes",
            f"weighed by these times, they send {weighed:.3f}x the bytes",
            abs(weighed - 1) < _ALIKE if timed else None,
        ),
    ]


def _weighed(syncs: Sequence[Sync], snapshots: Sequence[Snapshot], bucket_of: Mapping[str, int]) -> float:
    """Bytes of plans that minimise the predicted time, for those of plans that minimise bytes."""
    spec = POWERSGD.spec("gpt")
    by_bytes = choose(LGreco(), spec, snapshots, bucket_of=bucket_of)
    by_time = choose(LGreco(objective="time"), spec, snapshots, bucket_of=bucket_of, syncs=syncs)
    return fmean(timed.sent_bytes / plain.sent_bytes for timed, plain in zip(by_time, by_bytes, strict=True))


def _draw(study: Study, found: PerBucket, per_byte: list[float] | None) -> None:
    titles = ["figures 4.5b and B.1: what each bucket sends", "figure B.6b: what a byte of it costs"]
    figure, panels = plots.canvas(2, titles=titles, x="bucket, as they leave", y=["kB a step", "ns a byte"])
    colours = {"uniform": "#aaaaaa", "lgreco": POWERSGD.colour, "kmeans": "#d98a00", "priority": "#1f6fb2"}
    width = 0.8 / len(found)
    for at, (name, values) in enumerate(found.items()):
        places = [1 + bucket + (at - (len(found) - 1) / 2) * width for bucket in range(len(values))]
        panels[0].bar(places, [value / 1e3 for value in values], width, color=colours[name], label=name)
    for axes in panels:
        axes.set_xticks(range(1, 1 + len(found["uniform"])))
    if per_byte is not None:
        panels[1].bar(range(1, 1 + len(per_byte)), [1e9 * value for value in per_byte], color="#0a7d4f")
    plots.save(figure, study.picture("4.5b-B.1-B.6b"))
