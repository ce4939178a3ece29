"""Tables 3.8, 4.4 and 4.5, figures 3.8, 4.5, B.1 and B.2 on recorded gradients: policies at the same error, or at the
same bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import fmean

from experiments.framework.claims import Claim, Row, Rows
from experiments.framework.verdicts import Judgment, larger_by, unsound
from experiments.papers.lgreco.methods import RANK, Name
from experiments.papers.lgreco.study import NAMES, TITLES, LGrecoStudy
from experiments.policies.candidates import FAMILIES
from experiments.policies.methods import METHODS
from experiments.policies.replay import (
    Bench,
    Line,
    Ratios,
    against,
    fewer_bytes,
    geometric_mean,
    less_error,
    places,
    replay,
)
from thinwire.compressors import PowerSGD

_CHAPTER_3 = ("kmeans", "bayes", "linear", "accordion")
_REPLAYED: dict[tuple[Name, str], tuple[str, ...]] = {
    ("gpt", "bits"): ("lgreco", *_CHAPTER_3),
    ("gpt", "powersgd"): ("lgreco", "kmeans", "priority", "accordion", "both"),
    ("cnn", "topk"): ("lgreco", "accordion", "global"),
    ("cnn", "powersgd"): ("lgreco",),
}
"""The policies that claims are about, by network and family."""


def laboratory(study: LGrecoStudy) -> list[Row]:
    """What policies save on the recorded gradients, training by training."""
    benches = {at: _replay(study, *at) for at in _REPLAYED}
    bits, ranks, densities = benches["gpt", "bits"], benches["gpt", "powersgd"], benches["cnn", "topk"]
    # Bayes decides on one snapshot of a training: the others are compared with it there.
    alike = places(bits, "bayes")
    return [
        _row(
            "table 3.8, replayed", "kmeans_saves_most", {name: fewer_bytes(bits, name, at=alike) for name in _CHAPTER_3}
        ),
        _row(
            "figure 3.8a",
            "kmeans_errs_least_at_equal_bytes",
            {name: less_error(bits, name, at=alike) for name in _CHAPTER_3},
        ),
        _row(
            "figure 3.8b",
            "lgreco_saves_more_later",
            {name: fewer_bytes(bits, name, later=True) for name in ("lgreco", "kmeans")},
        ),
        _row(
            "table 4.5, replayed",
            "lgreco_saves_more",
            {name: fewer_bytes(ranks, name, later=True) for name in ("lgreco", "kmeans")},
        ),
        _row(
            "table 4.5, replayed", "both_over_accordion", {"accordion": against(ranks, "both", "accordion", later=True)}
        ),
        *(
            _row("table 4.4, replayed", f"lgreco_over_{name}", {name: against(densities, "lgreco", name, later=True)})
            for name in ("global", "accordion")
        ),
        first_plan(ranks),
        *of_buckets(ranks),
        *(growth(benches[name, "powersgd"], name) for name in NAMES),
    ]


def _replay(study: LGrecoStudy, name: Name, family: str) -> Bench:
    """What policies decide, replayed once."""

    def make() -> AbstractContextManager[Bench]:
        chosen = [method for method in METHODS if method.name in _REPLAYED[name, family]]
        members = next(one for one in FAMILIES if one.name == family)
        return nullcontext(replay(study.recorded(name), chosen, members, lambda now: study.advance(1, now)))

    return study.kept(("replayed", name, family), make)


def bytes_of_buckets(study: LGrecoStudy) -> dict[str, list[float]]:
    """What uniform PowerSGD and each policy send in each DDP bucket, in the mean over trainings."""
    data = of_buckets(_replay(study, "gpt", "powersgd"))[0].data
    means = {name: [fmean(at) for at in zip(*each, strict=True)] for name, each in data["bytes_per_bucket"].items()}
    return {"uniform": data["uniform"], **means}


def _row(figure: str, name: str, ratios: Mapping[str, Sequence[float]]) -> Row:
    """One ratio a training, by policy, and the first policy's mean; nothing of a policy that has none."""
    found = {name: of_all if all(map(math.isfinite, of_all)) else () for name, of_all in ratios.items()}
    first = next(iter(found.values()))
    return Row(figure, name, fmean(first) if first else math.nan, "x", {"ratios": found})


def first_plan(bench: Bench) -> Row:
    """Figure 4.5a: how many times fewer bytes than uniform compression of the same error L-GreCo's plans send on all
    snapshots but the first one: plans that were made there, and the plan of the first one."""
    kept = []
    for training, uniform in enumerate(bench.uniform):
        later = [Line(points) for points in uniform[1:]]
        pairs = (pair for points in bench.kept[training] for pair in zip(later, points, strict=True))
        kept.append(geometric_mean(line.fewer_bytes(point) for line, point in pairs))
    found = {"the first plan": kept, "new plans": _on_snapshots(bench, lambda at, _: at > 0)}
    return _row("figure 4.5a", "first_plan_lasts", found)


def growth(bench: Bench, name: Name) -> Row:
    """Figure B.2: what L-GreCo saves in the last third of a training's snapshots, for what it saves in the first."""
    first = _on_snapshots(bench, lambda at, count: at < max(1, count // 3))
    last = _on_snapshots(bench, lambda at, count: at >= count - max(1, count // 3))
    ratios = [b / a for a, b in zip(first, last, strict=True)]
    return _row("figure B.2", f"saves_more_later/{name}", {"lgreco": ratios})


def _on_snapshots(bench: Bench, chosen: Callable[[int, int], bool]) -> Ratios:
    """`fewer_bytes` of L-GreCo's plans of those snapshots: by their index, of so many."""
    taken = {
        (t, step) for t, steps in enumerate(bench.steps) for at, step in enumerate(steps) if chosen(at, len(steps))
    }
    at = frozenset(place for place in places(bench, "lgreco") if place[:2] in taken)
    return fewer_bytes(bench, "lgreco", at=at)


def of_buckets(bench: Bench) -> list[Row]:
    """Figures 4.5b and B.1: bytes of each DDP bucket within the error of the reference's rank, by policy and training,
    in the order in which buckets are sent."""
    level = bench.family.levels.index(PowerSGD(rank=RANK))
    sent = {
        name: [_mean_buckets(bench, name, training, level) for training in range(len(bench.uniform))]
        for name in ("lgreco", "kmeans", "priority")
    }
    last = {name: fmean(buckets[-1] for buckets in trainings) for name, trainings in sent.items()}
    uniform = bench.uniform_buckets[level]
    data = {"bytes_per_bucket": sent, "uniform": uniform}
    shift = fmean(_later_share(a) / _later_share(b) for a, b in zip(sent["lgreco"], sent["priority"], strict=True))
    return [
        Row("figure 4.5b", "last_bucket_saves_most", uniform[-1] / last["lgreco"], "x", data),
        Row("figure 4.5b", "less_in_the_last_bucket", last["kmeans"] / last["lgreco"], "x"),
        Row("figure B.1, replayed", "priority_shifts", shift, "x", {"bytes_per_bucket": sent}),
    ]


def _mean_buckets(bench: Bench, method: str, training: int, level: int) -> list[float]:
    decisions = bench.decisions[method]
    mine = [one.by_bucket for one in decisions if (one.training, one.level) == (training, level)]
    return [fmean(column) for column in zip(*mine, strict=True)]


def _later_share(sizes: Sequence[float]) -> float:
    """Of the bytes, that of the buckets that leave last."""
    return sum(sizes[len(sizes) // 2 :]) / sum(sizes)


# --- claims


def _above_one(
    figure: str, row: str, statement: str, combine: Callable[[Sequence[float]], float], effect: float | None = None
) -> Claim:
    """What ``combine`` makes of each training's logarithms, method by method, is above zero."""

    def rule(rows: Rows) -> Judgment:
        columns = [[math.log(ratio) for ratio in of_policy] for of_policy in rows[row]["ratios"].values()]
        if not all(columns) or len({len(column) for column in columns}) > 1:
            return unsound("the policies were not all replayed on the same trainings")
        return larger_by([combine(logs) for logs in zip(*columns, strict=True)], effect)

    return Claim(figure, row, statement, rule)


def _beyond_others(logs: Sequence[float]) -> float:
    """Of the first one beyond the largest of the others."""
    return logs[0] - max(logs[1:])


def _beyond_half(logs: Sequence[float]) -> float:
    """Of the first one beyond half of the second."""
    kept, anew = logs
    return kept - anew / 2


_LAST, _LESS, _SHIFTS = "last_bucket_saves_most", "less_in_the_last_bucket", "priority_shifts"


def _savings_by_bucket(rows: Rows) -> list[list[float]]:
    """By training and bucket, how many times fewer bytes than uniform compression L-GreCo sends."""
    uniform, ours = rows[_LAST]["uniform"], rows[_LAST]["bytes_per_bucket"]["lgreco"]
    return [[theirs / mine for theirs, mine in zip(uniform, buckets, strict=True)] for buckets in ours]


def _last_bucket(rows: Rows, method: str) -> list[float]:
    return [buckets[-1] for buckets in rows[_LAST]["bytes_per_bucket"][method]]


def _later_shares(rows: Rows, method: str) -> list[float]:
    return [_later_share(buckets) for buckets in rows[_SHIFTS]["bytes_per_bucket"][method]]


def _ratio_above_one(over: Sequence[float], under: Sequence[float]) -> Judgment:
    return larger_by([math.log(a / b) for a, b in zip(over, under, strict=True)])


def claims() -> Iterator[Claim]:
    """What the recorded gradients judge."""
    yield _above_one(
        "table 3.8, replayed",
        "kmeans_saves_most",
        "k-means compresses more than Bayes, Linear and Accordion (1.47x against 1.34x, 1.15x and 1.21x)",
        _beyond_others,
        math.log(1.47 / 1.34),
    )
    yield _above_one(
        "figure 3.8a",
        "kmeans_errs_least_at_equal_bytes",
        "k-means has the lowest compression error of the policies of chapter 3 (section 3.7.3)",
        _beyond_others,
    )
    # On its own snapshot L-GreCo has the fewest bytes of all plans within its error by construction.
    yield _above_one(
        "figure 3.8b",
        "lgreco_saves_more_later",
        "L-GreCo compresses more than k-means, within the same error (section 4.6.3: up to 33 %)",
        _beyond_others,
    )
    statement = "L-GreCo compresses more than k-means (23.5x against 21.6x)"
    yield _above_one("table 4.5, replayed", "lgreco_saves_more", statement, _beyond_others, math.log(23.5 / 21.6))
    statement = "L-GreCo + Accordion compresses more than Accordion (36.9x against 23.9x)"
    yield _above_one("table 4.5, replayed", "both_over_accordion", statement, min, math.log(36.9 / 23.9))
    for other, title, theirs in (("global", "Rethink-GS", 5.7), ("accordion", "Accordion", 3.5)):
        statement = f"L-GreCo (6.7x) compresses more than {title} ({theirs}x), relative to 2 %"
        yield _above_one("table 4.4, replayed", f"lgreco_over_{other}", statement, min, math.log(6.7 / theirs))
    yield _above_one(
        "figure 4.5a",
        "first_plan_lasts",
        "the ratio that L-GreCo finds is relatively stable: it needs no frequent re-adjustment (section 4.6.1)",
        _beyond_half,
    )
    for name in NAMES:
        statement = "with PowerSGD the compression that L-GreCo finds generally increases during training (section B.3)"
        yield _above_one("figure B.2", f"saves_more_later/{name}", f"{TITLES[name]}: {statement}", min)
    yield Claim(
        "figure 4.5b",
        _LAST,
        "L-GreCo compresses the largest and the last bucket the most (section 4.6.3)",
        lambda rows: _ratio_above_one(
            [savings[-1] for savings in _savings_by_bucket(rows)],
            [max(savings[:-1]) for savings in _savings_by_bucket(rows)],
        ),
    )
    yield Claim(
        "figure 4.5b",
        _LESS,
        "in the last bucket L-GreCo sends less than k-means",
        lambda rows: _ratio_above_one(_last_bucket(rows, "kmeans"), _last_bucket(rows, "lgreco")),
    )
    yield Claim(
        "figure B.1, replayed",
        _SHIFTS,
        "by priority the buckets that leave last are compressed more (section B.1)",
        lambda rows: _ratio_above_one(_later_shares(rows, "lgreco"), _later_shares(rows, "priority")),
    )
