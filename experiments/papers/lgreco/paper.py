"""The claims of the thesis's chapter on L-GreCo, the parts that measure for them, and its command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from statistics import fmean, median
from typing import Any

from experiments.framework.claims import Claim, Rows, Rule, estimated, over
from experiments.framework.methods import FP32, NOTHING
from experiments.framework.paper import Paper, Part, command
from experiments.framework.verdicts import Judgment, exceeds, faster_in_runs, if_seen, matches, unsound
from experiments.papers.lgreco import laboratory, quality, speed
from experiments.papers.lgreco.methods import BITS, FAMILIES, POWERSGD, Family, Name
from experiments.papers.lgreco.quality import TABLES, kept
from experiments.papers.lgreco.speed import FIGURES
from experiments.papers.lgreco.study import NAMES, RATES, SMOKE, TITLES, LGrecoScale, LGrecoStudy
from thinwire_tools.compare.statistics import estimate

# --- tables 4.1 to 4.3, section 4.4

_MOST_OVERHEAD = 0.01


def _lost(name: Name, row: str) -> Rule:
    """Quality says something only where the control's damage is seen."""
    return lambda rows: if_seen(rows[f"control/{name}"]["value"] == 1, kept(rows[row]))


def _of_family(name: Name, family: Family) -> Iterator[Claim]:
    figure, title = TABLES[name], f"{TITLES[name]}, {family.title}"
    metric = "perplexity" if name == "gpt" else "accuracy"
    for kind, how in (("uniform", "uniform"), ("l-greco", "L-GreCo")):
        row = f"lost/{name}/{family.name}/{kind}"
        margin = LGrecoScale().margin
        yield Claim(
            figure, row, f"{title}, {how}: {metric} within {margin:.0%} of fp32's (section 4.6.2)", _lost(name, row)
        )
    row = f"gain/{name}/{family.name}"
    less = f"L-GreCo sends less than uniform ({family.thesis[name]})"
    yield Claim(
        figure,
        row,
        f"{title}: {less}",
        lambda rows, row=row: exceeds(estimate([gain - 1 for gain in rows[row]["by_seed"]]), family.gain[name] - 1),
    )
    row = f"overhead/{name}/{family.name}"
    yield Claim(
        "table 4.1",
        row,
        f"{title}: errors, solving and summing gradients take under {_MOST_OVERHEAD:.0%} of training "
        f"({family.overhead[name]})",
        lambda rows: faster_in_runs([_MOST_OVERHEAD / share for share in rows[row]["by_seed"]]),
    )


# --- table 4.4: trainings

_THRESHOLD_LOSES = 0.003
"""Of accuracy, against L-GreCo, in the thesis."""

# --- figures 4.2 to 4.4, B.3, and k-means of table 4.5

_THESIS = {
    "bits": "2 % on one node",
    "topk": "up to 25 % on one node",
    "powersgd": "up to 25 % on one node, up to 2.4x on several",
}


def _faster(family: Family, rate: str, other: str, statement: str) -> Claim:
    """Steps by L-GreCo are faster than those of ``other``, among the most ranks."""
    name = "uniform" if other == family.name else other

    def rounds(rows: Rows) -> list[float]:
        step_s = rows[f"scaling/{rate}"]["step_s"]
        return over(step_s[max(step_s, key=int)], f"{family.name} lgreco", other)

    return Claim(
        FIGURES[rate],
        f"lgreco_over_{name}/{family.name}/{rate}",
        f"{family.title}: steps by L-GreCo are faster than {statement}",
        lambda rows: faster_in_runs(rounds(rows)),
        over_link=True,
        value=lambda rows: median(rounds(rows)),
        unit="x",
    )


def _with_kmeans(family: Family, rate: str) -> Iterator[Claim]:
    """Of table 4.5, and of table 3.8, whose row is made of the same times."""
    row, kmeans, lgreco = f"speed_over_kmeans/{family.name}/{rate}", f"{family.name} kmeans", f"{family.name} lgreco"
    yield Claim(
        "table 4.5",
        row,
        f"{family.title}: L-GreCo's steps are faster than those of k-means (PowerSGD: 144k against 124k tokens/s on "
        "one node, 150k against 112k on several)",
        lambda rows: faster_in_runs(over(rows[row]["step_s"], lgreco, kmeans)),
        over_link=True,
    )
    if family is BITS:
        yield Claim(
            "table 4.5",
            f"kmeans_over_uniform/{rate}",
            f"table 3.8: steps by k-means are faster than by uniform 4 bits ({_BY_KMEANS[rate]})",
            lambda rows: faster_in_runs(over(rows[row]["step_s"], kmeans, family.name)),
            over_link=True,
            value=lambda rows: median(over(rows[row]["step_s"], kmeans, family.name)),
            unit="x",
        )


_BY_KMEANS = dict(zip(RATES, ("40 % on several nodes", "5 % on one node"), strict=True))
_PROFILED = 0.1
_SEEN = 1e-3
"""Share of a step below which a timing tells nothing."""


def _below(most: float, shares: Sequence[float]) -> Judgment:
    """Judge whether shares of a step, one a run, are below ``most``."""
    return faster_in_runs([most / max(share, _SEEN) for share in shares])


def _profile(rate: str) -> Claim:
    name = f"profile/{rate}"

    return Claim(
        "figure B.3",
        name,
        f"PowerSGD's compression takes less than {_PROFILED:.0%} of a step (section B.5)",
        lambda rows: _below(_PROFILED, speed.compressing_shares(rows[name], POWERSGD.name, POWERSGD.name)),
        over_link=True,
    )


_TABLE_3_3 = {
    "bits": ("quantization", 0.03),
    "topk": ("sparsification (top-k)", 0.10),
    "powersgd": ("decomposition (PowerSGD)", 0.20),
}
"""What kinds of compression are called there, and the most of a step that they take."""


def _computing(rows: Rows, family: str) -> list[float]:
    """Seconds of compressing, as a share of a step in which nothing is sent, by run, in the mean of the links."""
    profiles = [row for name, row in rows.items() if name.startswith("profile/")]
    shares = [speed.compressing_shares(row, family, NOTHING.name) for row in profiles]
    return [fmean(of_links) for of_links in zip(*shares, strict=True)]


def _table_3_3(family: str) -> Claim:
    title, most = _TABLE_3_3[family]

    return Claim(
        "figure B.3",
        f"overhead/{family}",
        f"table 3.3: {title} has a computational overhead of at most {most:.0%}",
        lambda rows: _below(most, _computing(rows, family)),
        value=lambda rows: fmean(_computing(rows, family)),
    )


def _claims_of_speed() -> Iterator[Claim]:
    for rate in RATES:
        for family in FAMILIES:
            yield _faster(family, rate, family.name, f"by uniform compression ({_THESIS[family.name]})")
            yield _faster(family, rate, FP32.name, "uncompressed ones")
        yield from (claim for family in (BITS, POWERSGD) for claim in _with_kmeans(family, rate))
    yield from map(_profile, RATES)
    yield from map(_table_3_3, _TABLE_3_3)
    yield Claim(
        "figure 4.2",
        "frontier",
        "over ranks of PowerSGD L-GreCo has a markedly better trade-off than uniform compression (section 4.6.2): its "
        "steps are faster at an equal loss",
        lambda rows: faster_in_runs(speed.at_equal_loss(rows["frontier"])),
        over_link=True,
    )


# --- figures B.1 and B.6b, section 4.6.5

_GOOD_FIT, _ALIKE, _SAME_PLANS = 0.9, 0.2, 0.02


def _claims_of_buckets() -> Iterator[Claim]:
    yield Claim(
        "figure B.1",
        "priority_slower",
        "bucket priority performs worse than L-GreCo itself (section B.1)",
        lambda rows: faster_in_runs(over(rows["priority_slower"]["step_s"], f"{POWERSGD.name} lgreco", "priority")),
        over_link=True,
    )
    yield Claim(
        "section 4.6.5",
        "fit",
        "bucket sizes predict communication time almost perfectly: the regression's score is close to 1; asked here: "
        f"at least {_GOOD_FIT}",
        lambda rows: exceeds(estimate([score - _GOOD_FIT for score in rows["fit"]["by_run"]])),
        text=lambda rows: (
            f"R² {fmean(rows['fit']['by_run']):.3f} of another run's times" if rows["fit"]["by_run"] else ""
        ),
        over_link=True,
    )
    row = "coefficients_alike"
    yield Claim(
        "figure B.6b",
        row,
        "the coefficients of the buckets are close to each other (section B.7); asked here: the largest is at most "
        f"{_ALIKE:.0%} above the mean",
        lambda rows, row=row: matches(estimate(rows[row]["by_run"]), _ALIKE),
        over_link=True,
    )
    yield Claim(
        "section 4.6.5",
        "time_plan_alike",
        "plans that minimize time are close to those that minimize bytes; asked here: in bytes, within "
        f"{_SAME_PLANS:.0%}",
        lambda rows: matches(estimate([ratio - 1 for ratio in rows["time_plan_alike"]["by_run"]]), _SAME_PLANS),
        over_link=True,
    )


# --- L-GreCo against uniform compression at equal bytes, of which there is the record

_PAIRS = {"bits": "2 bits", "topk": "top-k 5 %", "powersgd": "PowerSGD of rank 4"}
"""Uniform compressions that cost quality."""
_MORE_BYTES = 0.02
"""So much more than uniform compression may L-GreCo send, and the two still count as equal."""


def _at_equal_bytes(pair: str) -> Claim:
    row = f"lower_loss/{pair}"

    def rule(rows: Rows) -> Judgment:
        found = rows[row]
        lower = exceeds(estimated(found, "by_seed"))
        if fmean(found["fewer_bytes"]) < 1 - _MORE_BYTES:
            return unsound("L-GreCo sent more than uniform compression", lower)
        if estimated(found, "alone_loses").lower <= 0:
            return unsound("uniform compression is not shown to be better than sending nothing", lower)
        # Half of the bytes must end clearly worse, or the task cannot tell such differences.
        return if_seen(estimated(found, "half_loses").lower > 0, lower)

    statement = "at equal bytes L-GreCo ends at a lower loss than uniform (chapter 4 implies it)"
    return Claim("equal bytes", row, f"GPT, {_PAIRS[pair]}: {statement}", rule)


# --- figure B.6a, of which there is the record


_HIGH = 0.7
"""What is taken for a high correlation."""


def _correlations(rows: Rows) -> list[float]:
    """Spearman's, by seed; where a metric is the same for all there is none, which JSON keeps as null."""
    return [one["spearman"] or 0.0 for one in rows["correlation"]["correlations"]]


# --- the chapter


def _of_policies(figure: str, name: Name, table: Any, what: str) -> Part:
    return Part(f"{figure}: policies over {what}", partial(quality.policies, figure, name, table))


PAPER = Paper(
    "lgreco",
    "L-GreCo, section 3.6 and chapter 4 of the thesis, as found here",
    {
        "4.2": Part("table 4.2: L-GreCo and uniform, CNN", partial(quality.quality, "cnn")),
        "4.3": Part("table 4.3: L-GreCo and uniform, GPT", partial(quality.quality, "gpt")),
        "4.1": Part("table 4.1: what deciding takes", quality.overheads),
        "3.8": _of_policies("table 3.8", "gpt", quality.table_3_8, "4 bits"),
        "4.4": _of_policies("table 4.4", "cnn", quality.table_4_4, "top-k"),
        "4.5": _of_policies("table 4.5", "gpt", quality.table_4_5, "PowerSGD"),
        "speed": Part("figures 4.3, 4.4: throughput", speed.speed),
        "ranks": Part("figure 4.2: ranks", speed.figure_4_2),
        "buckets": Part("figures 4.5b, B.1: buckets", speed.buckets),
        "laboratory": Part("tables 3.8, 4.4, 4.5: policies on recorded gradients", laboratory.laboratory),
    },
    (
        *(claim for name, family in product(NAMES, FAMILIES) for claim in _of_family(name, family)),
        Claim(
            "table 4.4",
            "lgreco_no_worse_than_threshold",
            "L-GreCo ends at no worse an accuracy than Rethink-GS (71.7 against 71.4 %)",
            lambda rows: kept(rows["lgreco_no_worse_than_threshold"], _THRESHOLD_LOSES / 2),
        ),
        *_claims_of_speed(),
        *_claims_of_buckets(),
        *laboratory.claims(),
        *map(_at_equal_bytes, _PAIRS),
        Claim(
            "figure B.6a",
            "correlation",
            f"the loss-based metric and the error have a high correlation (section 4.6.4), of over {_HIGH} here",
            lambda rows: exceeds(estimate([one - _HIGH for one in _correlations(rows)])),
            text=lambda rows: f"Spearman's {fmean(_correlations(rows)):.2f} over layers and ranks",
        ),
    ),
    judged=("At most 1% of fp32's perplexity or accuracy may be lost; bytes are counted for every seed."),
    differs=(
        "a GPT of 2 layers on the words of Python's standard library stands for Transformer-XL and Transformer-LM: its "
        "embedding, tied to the output and scaled as PaLM's, is two thirds of all parameters; a residual network of 4 "
        "stages on small digits for ResNet-18 and ResNet-50; gradients are fp32, the GPT's quality is its loss on "
        "held-out text",
        "trainings last a few hundred steps on 2 ranks, and policies decide every 40 of them instead of once an "
        "epoch; bytes count from the first plan on",
        "quantization is min-max, not QSGD, as CGX's own; top-k's density is 20 % on the GPT, instead of 10 %; what "
        "was recorded before records named their commit has rank 16 there, instead of 32, and no dense steps during "
        "the learning rate's warm-up",
        "ranks are processes on this machine, on emulated links: 100 Mbit/s stands for several nodes, 1 Gbit/s for "
        "the bus of one; where steps are timed, computation is [replayed](docs/results.md#how-steps-are-timed)",
        "the overhead is that of one decision in 500 steps, the default, at the times measured here",
        "what policies of tables 3.8 and 4.5 save at the same error is judged on recorded gradients of five "
        "uncompressed trainings, without error feedback",
        "global top-k takes the threshold of the step before, so that it need not wait for all layers, as the "
        "thesis's does",
        "Rethink-GS has a threshold tuned by hand for this network",
        "figure B.6a is of short trainings in which one layer is compressed; its code is in commit 110475c552fc",
        "the thesis has no trainings at equal bytes; the code of these is in commit 7544276bbd34",
        "AdaComp, which the thesis says did not converge, is left out",
    ),
    scale=LGrecoScale(),
    smoke=SMOKE,
    study=LGrecoStudy,
    source="thesis",
)

lgreco = command(
    PAPER,
    """Repeat section 3.6 and chapter 4 (L-GreCo) of Markov's thesis on this machine, claim by claim.

    A small GPT of words, whose embedding is its largest layer, and a small residual network train with gradients that
    are compressed uniformly, and with policies that choose each layer's compression while training goes on. Takes about
    a quarter of an hour on two cores.""",
)
