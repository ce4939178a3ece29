"""The claims of the thesis's chapter on L-GreCo, the parts that measure for them, and its command."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from experiments.framework.claims import Claim, Rows, Rule
from experiments.framework.methods import FP32, NOTHING
from experiments.framework.paper import Paper, Part, command
from experiments.framework.verdicts import JUDGED, Judgement, all_hold, exceeds, faster_in_runs, if_seen, matches
from experiments.papers.lgreco import buckets, correlation, equal_bytes, laboratory, policies, quality, speed
from experiments.papers.lgreco.judging import kept, shown
from experiments.papers.lgreco.methods import BITS, FAMILIES, POWERSGD, RANK, Family
from experiments.papers.lgreco.quality import TABLES
from experiments.papers.lgreco.speed import FIGURES, STAGES
from experiments.papers.lgreco.study import CONTROL, NAMES, RATES, SMOKE, TITLES, LGrecoScale, LGrecoStudy, where
from experiments.papers.lgreco.tasks import Name
from thinwire.policies import LGreco
from thinwire_tools.compare.statistics import Estimate, estimate

# --- tables 4.1 to 4.3, section 4.4

_MOST_OVERHEAD = 0.01


def _lost(name: Name, row: str) -> tuple[Callable[[Rows], str], Rule]:
    """Quality says something only where the control's damage is seen."""
    return lambda rows: shown(rows[row]), lambda rows: if_seen(rows[f"control/{name}"]["value"] == 1, kept(rows[row]))


def _gain(row: str) -> Callable[[Rows], str]:
    def text(rows: Rows) -> str:
        ratio = rows[row]["ratio"]
        less = f"{ratio['lgreco']:.1f}x less than fp32, uniform {ratio['uniform']:.1f}x"
        return f"{rows[row]['value']:.2f}x less: {less}"

    return text


def _beyond_one(gains: Sequence[float]) -> Estimate:
    return estimate([gain - 1 for gain in gains])


def _overhead(row: str) -> Callable[[Rows], str]:
    def text(rows: Rows) -> str:
        parts = ", ".join(f"{key} {value:.3%}" for key, value in rows[row]["share"].items())
        return f"{sum(rows[row]['share'].values()):.2%}, a decision every {LGreco().every} steps: {parts}"

    return text


def _of_family(name: Name, family: Family) -> Iterator[Claim]:
    figure, title = TABLES[name], f"{TITLES[name]}, {family.title}"
    metric = "perplexity" if name == "gpt" else "accuracy"
    for kind, how in (("uniform", "uniform"), ("l-greco", "L-GreCo")):
        row = f"lost/{name}/{family.name}/{kind}"
        margin = LGrecoScale().margin
        yield Claim(
            figure, row, f"{title}, {how}: {metric} within {margin:.0%} of fp32's (section 4.6.2)", *_lost(name, row)
        )
    row = f"gain/{name}/{family.name}"
    less = f"L-GreCo sends less than uniform ({family.thesis[name]})"
    yield Claim(
        figure,
        row,
        f"{title}: {less}",
        _gain(row),
        lambda rows, row=row: exceeds(_beyond_one(rows[row]["by_seed"]), family.gain[name] - 1),
    )
    row = f"overhead/{name}/{family.name}"
    yield Claim(
        "table 4.1",
        row,
        f"{title}: errors, solving and summing gradients take under {_MOST_OVERHEAD:.0%} of training "
        f"({family.overhead[name]})",
        _overhead(row),
        lambda rows: faster_in_runs([_MOST_OVERHEAD / share for share in rows[row]["by_seed"]]),
    )


def _control(name: Name) -> Claim:
    row = f"control/{name}"

    def text(rows: Rows) -> str:
        seen = "damage is seen" if rows[row]["value"] == 1 else "damage is not shown to be seen"
        return f"{shown(rows[row])}: {seen}"

    return Claim(TABLES[name], row, f"{TITLES[name]}, a control that must fail, {CONTROL}", text)


def _claims_of_quality() -> Iterator[Claim]:
    for name in NAMES:
        for family in FAMILIES:
            yield from _of_family(name, family)
        yield _control(name)


# --- tables 3.8, 4.4 and 4.5: trainings

_THRESHOLD_LOSES = 0.003
"""Of accuracy, against L-GreCo, in the thesis."""


def _ratio(figure: str, name: Name, method: policies.Method) -> Claim:
    row = f"ratio/{name}/{method.name}"
    theirs = "" if method.thesis is None else f" (thesis {method.thesis:.2f}x)"
    return Claim(
        figure,
        row,
        f"{TITLES[name]}, {method.title}: compression relative to uniform",
        lambda rows: f"{rows[row]['value']:.2f}x{theirs}; {shown(rows[row])}",
    )


def _claims_of_policies() -> Iterator[Claim]:
    for figure, (name, methods) in policies.TABLES.items():
        yield from (_ratio(figure, name, method) for method in methods(LGrecoScale()))
    row = "lgreco_no_worse_than_threshold"
    yield Claim(
        "table 4.4",
        row,
        "L-GreCo ends at no worse an accuracy than Rethink-GS (71.7 against 71.4 %)",
        lambda rows, row=row: shown(rows[row]),
        lambda rows, row=row: kept(rows[row], _THRESHOLD_LOSES / 2),
    )


# --- figures 4.2 to 4.4, B.3, and k-means of table 4.5

_THESIS = {
    "bits": "2 % on one node",
    "topk": "up to 25 % on one node",
    "powersgd": "up to 25 % on one node, up to 2.4x on several",
}


def _over(rounds: dict[str, list[float]], fast: str, slow: str) -> list[float]:
    """How many times faster ``fast`` is than ``slow``, run by run."""
    return [theirs / mine for mine, theirs in zip(rounds[fast], rounds[slow], strict=True)]


def _largest(rows: Rows, rate: str) -> tuple[str, dict[str, list[float]], dict[str, float]]:
    """Number of ranks, seconds by method and round, and bytes by method, among the most ranks."""
    row = rows[f"scaling/{rate}"]
    most = max(row["step_s"], key=int)
    return most, row["step_s"][most], row["payload_bytes"][most]


def _faster(family: Family, rate: str, other: str, statement: str, text: Callable[[Rows], str]) -> Claim:
    """Steps by L-GreCo are faster than those of ``other``."""
    name = "uniform" if other == family.name else other

    def rounds(rows: Rows) -> list[float]:
        return _over(_largest(rows, rate)[1], f"{family.name} lgreco", other)

    return Claim(
        FIGURES[rate],
        f"lgreco_over_{name}/{family.name}/{rate}",
        f"{family.title}: steps by L-GreCo are faster than {statement}",
        text,
        lambda rows: faster_in_runs(rounds(rows)),
        over_link=True,
        value=lambda rows: median(rounds(rows)),
        unit="x",
    )


def _of_link(family: Family, rate: str) -> Iterator[Claim]:
    adapted, uniform = f"{family.name} lgreco", family.name

    def over_uniform(rows: Rows) -> str:
        most, rounds, sent = _largest(rows, rate)
        sizes = f"{sent[adapted] / 1e3:.0f} kB a step against {sent[uniform] / 1e3:.0f} kB"
        gained = median(_over(rounds, adapted, uniform))
        return f"{gained:.3f}x uniform's throughput, {most} ranks {where(rate)}: {sizes}"

    def over_fp32(rows: Rows) -> str:
        most, rounds, _ = _largest(rows, rate)
        ours, theirs = (median(_over(rounds, name, FP32.name)) for name in (adapted, uniform))
        return f"{ours:.2f}x fp32's throughput, {most} ranks {where(rate)}; uniform {theirs:.2f}x"

    yield _faster(family, rate, uniform, f"by uniform compression ({_THESIS[family.name]})", over_uniform)
    yield _faster(family, rate, FP32.name, "uncompressed ones", over_fp32)


def _over_kmeans(family: Family, rate: str) -> Claim:
    row, other = f"speed_over_kmeans/{family.name}/{rate}", f"{family.name} kmeans"

    def text(rows: Rows) -> str:
        theirs = median(_over(rows[row]["step_s"], other, family.name))
        return f"{rows[row]['value']:.3f}x its throughput, {where(rate)}; k-means {theirs:.3f}x uniform's"

    return Claim(
        "table 4.5",
        row,
        f"{family.title}: L-GreCo's steps are faster than those of k-means (PowerSGD: 144k against 124k tokens/s on "
        "one node, 150k against 112k on several)",
        text,
        lambda rows: faster_in_runs(_over(rows[row]["step_s"], f"{family.name} lgreco", other)),
        over_link=True,
    )


def _throughput(rate: str) -> Claim:
    def text(rows: Rows) -> str:
        row = rows[f"scaling/{rate}"]
        most = max(row["nothing_sent"], key=int)
        shown = ", ".join(
            f"{title} {row['items_per_s'][name][most]:,.0f}"
            for name, title in row["titles"].items()
            if name in row["items_per_s"]
        )
        ends = f"nothing sent {row['nothing_sent'][most]:,.0f}; one rank {row['items_per_s']['1']:,.0f}"
        return f"tokens/s of {most} ranks {where(rate)}: {shown}; {ends}"

    return Claim(FIGURES[rate], f"scaling/{rate}", f"throughput {where(rate)}", text)


_PROFILED = 0.1


def _profile(rate: str) -> Claim:
    name = f"profile/{rate}"

    def text(rows: Rows) -> str:
        row = rows[name]
        shares = speed.profile(row)
        stages = ", ".join(f"{title} {shares[stage]:.1%}" for stage, title in STAGES.items() if stage in shares)
        longer = median(_over(row["step_s"], POWERSGD.name, FP32.name))
        return f"{row['value']:.1%} of a step {where(rate)}: {stages}; uncompressed steps take {longer:.2f}x as long"

    return Claim(
        "figure B.3",
        name,
        f"PowerSGD's compression takes less than {_PROFILED:.0%} of a step (section B.5)",
        text,
        lambda rows: faster_in_runs(
            [_PROFILED / share for share in speed.compressing_shares(rows[name], POWERSGD.name, POWERSGD.name)]
        ),
        over_link=True,
    )


_TABLE_3_3 = {
    "bits": ("quantisation", 0.03),
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

    def text(rows: Rows) -> str:
        steps_s = [s for name, row in rows.items() if name.startswith("profile/") for s in row["step_s"][NOTHING.name]]
        return (
            f"{fmean(_computing(rows, family)):.0%} of a step of {1e3 * fmean(steps_s):.0f} ms in which nothing is "
            "sent: encoding, reducing and decoding, which run beside the backward pass"
        )

    return Claim(
        "figure B.3",
        f"overhead/{family}",
        f"table 3.3: {title} has a computational overhead of at most {most:.0%}",
        text,
        lambda rows: faster_in_runs([most / share for share in _computing(rows, family)]),
        value=lambda rows: fmean(_computing(rows, family)),
    )


def _frontier(rows: Rows) -> str:
    row = rows["frontier"]
    points = "; ".join(
        f"rank {p['rank']}: {p['uniform_loss']:.4f} at {1e3 * p['uniform_s']:.1f} ms, L-GreCo {p['lgreco_loss']:.4f} "
        f"at {1e3 * p['lgreco_s']:.1f} ms"
        for p in row["points"]
    )
    return f"{points}, {where(row['rate'])}"


def _on_frontier(rows: Rows) -> Judgement:
    row = rows["frontier"]
    names = [f"rank {p['rank']}" for p in row["points"]]
    speed = [faster_in_runs(_over(row["step_s"], f"{name} lgreco", name)) for name in names]
    # One training each: the ranks are what there is of repetitions.
    return all_hold([*speed, exceeds(estimate([-excess for excess in _excess(rows)]))])


def _excess(rows: Rows) -> list[float]:
    return [p["lgreco_loss"] / p["uniform_loss"] - 1 for p in rows["frontier"]["points"]]


def _over_ranks(rows: Rows) -> str:
    sent, names = rows["frontier"]["payload_bytes"], [f"rank {p['rank']}" for p in rows["frontier"]["points"]]
    less = ", ".join(f"{sent[name] / sent[f'{name} lgreco']:.2f}x" for name in names)
    excess = ", ".join(f"{value:+.2%}" for value in _excess(rows))
    return f"loss of one seed beyond uniform's, by rank: {excess}; bytes {less} less"


def _claims_of_speed() -> Iterator[Claim]:
    for rate in RATES:
        yield _throughput(rate)
        for family in FAMILIES:
            yield from _of_link(family, rate)
        yield from (_over_kmeans(family, rate) for family in (BITS, POWERSGD))
    yield from map(_profile, RATES)
    yield from map(_table_3_3, _TABLE_3_3)
    statement = "at every rank L-GreCo takes less time a step than uniform PowerSGD, and ends at a lower loss"
    yield Claim("figure 4.2", "frontier", statement, _frontier, _on_frontier, over_link=True)
    yield Claim(
        "figure 4.2",
        "loss_over_ranks",
        "L-GreCo's loss against that of uniform compression",
        _over_ranks,
        value=lambda rows: fmean(_excess(rows)),
    )


# --- figures B.1 and B.6b, section 4.6.5

_GOOD_FIT, _ALIKE, _SAME_PLANS = 0.9, 0.2, 0.02


def _slower_by_priority(rows: Rows) -> str:
    row, adapted = rows["priority_slower"], f"{POWERSGD.name} lgreco"
    sent = row["payload_bytes"]
    return (
        f"L-GreCo has {row['value']:.3f}x the throughput of L-GreCo by priority, {where(row['rate'])}: "
        f"{sent[adapted] / 1e3:.0f} kB a step against {sent['priority'] / 1e3:.0f} kB"
    )


def _claims_of_buckets() -> Iterator[Claim]:
    yield Claim(
        "figure B.1",
        "priority_slower",
        "bucket priority performs worse than L-GreCo itself (section B.1)",
        _slower_by_priority,
        lambda rows: faster_in_runs(_over(rows["priority_slower"]["step_s"], f"{POWERSGD.name} lgreco", "priority")),
        over_link=True,
    )
    yield Claim(
        "section 4.6.5",
        "fit",
        "bucket sizes predict communication time almost perfectly: the regression's score is close to 1; asked here: "
        f"at least {_GOOD_FIT}",
        lambda rows: (
            "too few different plans were tried"
            if rows["fit"]["value"] is None
            else f"R² {rows['fit']['value']:.3f} of the median times of the plans that another run tried"
        ),
        lambda rows: exceeds(estimate([score - _GOOD_FIT for score in rows["fit"]["by_run"]])),
        over_link=True,
    )
    row = "coefficients_alike"
    yield Claim(
        "figure B.6b",
        row,
        "the coefficients of the buckets are close to each other (section B.7); asked here: the largest is at most "
        f"{_ALIKE:.0%} above the mean",
        lambda rows, row=row: (
            f"ns a byte, by bucket: {', '.join(f'{value:.1f}' for value in _mean_coefficients(rows[row]))}; the "
            f"largest is {rows[row]['value']:.0%} above the mean"
        ),
        lambda rows, row=row: matches(estimate(rows[row]["by_run"]), _ALIKE),
        over_link=True,
    )
    yield Claim(
        "section 4.6.5",
        "time_plan_alike",
        "plans that minimise time are close to those that minimise bytes; asked here: in bytes, within "
        f"{_SAME_PLANS:.0%}",
        lambda rows: f"weighed by these times, they send {rows['time_plan_alike']['value']:.3f}x the bytes",
        lambda rows: matches(estimate([ratio - 1 for ratio in rows["time_plan_alike"]["by_run"]]), _SAME_PLANS),
        over_link=True,
    )


def _mean_coefficients(row: Mapping[str, Any]) -> list[float]:
    return [fmean(of_runs) for of_runs in zip(*row["ns_per_byte"], strict=True)]


# --- figure B.6a


_HIGH = 0.7
"""What is taken for a high correlation."""


def _correlations(rows: Rows, key: str) -> list[float]:
    """By seed; where a metric is the same for all there is none, which JSON keeps as null."""
    return [one[key] or 0.0 for one in rows["correlation"]["correlations"]]


def _correlated(rows: Rows) -> str:
    row = rows["correlation"]
    spearman = estimate(_correlations(rows, "spearman"))
    return (
        f"over {row['correlations'][0]['count']} layers and ranks after {row['steps']} steps: Spearman's "
        f"{spearman.mean:.2f} ({spearman.lower:.2f} to {spearman.upper:.2f}), Pearson's "
        f"{fmean(_correlations(rows, 'pearson')):.2f}"
    )


# --- the chapter

PAPER = Paper(
    "lgreco",
    "L-GreCo, section 3.6 and chapter 4 of the thesis, as found here",
    {
        "quality": Part("tables 4.1 to 4.3: L-GreCo and uniform", quality.quality, quality.steps, 0.035, 10.0),
        "policies": Part("tables 3.8, 4.4, 4.5: policies", policies.policies, policies.steps, 0.035, 5.0),
        "speed": Part("figures 4.3, 4.4: throughput", speed.speed, speed.steps, 0.12, 45.0),
        "ranks": Part("figure 4.2: ranks", speed.figure_4_2, speed.rank_steps, 0.045, 20.0),
        "buckets": Part("figures 4.5b, B.1: buckets", buckets.buckets, buckets.steps, 0.045, 20.0),
        "laboratory": Part(
            "tables 3.8, 4.4, 4.5: policies on recorded gradients", laboratory.laboratory, laboratory.steps, 0.04, 90.0
        ),
        "equal": Part("L-GreCo at uniform's bytes", equal_bytes.equal_bytes, equal_bytes.steps, 0.05, 10.0),
        "metric": Part("figure B.6a: the loss as a metric", correlation.metric, correlation.steps, 0.03, 2.0),
    },
    (
        *_claims_of_quality(),
        *_claims_of_policies(),
        *_claims_of_speed(),
        *_claims_of_buckets(),
        *laboratory.claims(),
        *equal_bytes.claims(),
        Claim(
            "figure B.6a",
            "correlation",
            f"the loss-based metric and the error have a high correlation (section 4.6.4), of over {_HIGH} here",
            _correlated,
            lambda rows: exceeds(estimate([one - _HIGH for one in _correlations(rows, "spearman")])),
        ),
    ),
    judged=(
        f"{JUDGED}. At most {LGrecoScale().margin:.0%} of fp32's perplexity or accuracy may be lost; bytes are counted "
        "for every seed"
    ),
    differs=(
        "a GPT of 2 layers on the words of Python's standard library stands for Transformer-XL and Transformer-LM: its "
        "embedding, tied to the output and scaled as PaLM's, is two thirds of all parameters; a residual network of 4 "
        "stages on small digits for ResNet-18 and ResNet-50; gradients are fp32, the GPT's quality is its loss on "
        "held-out text",
        "trainings last a few hundred steps on 2 ranks, and policies decide every 40 of them instead of once an "
        "epoch; there are no dense steps at the beginning, and bytes count from the first plan on",
        f"quantisation is min-max, not QSGD, as CGX's own; PowerSGD's reference is rank {RANK} on the GPT, whose "
        "matrices are 128 wide, instead of 32, and top-k's a density of 20 % there, instead of 10 %",
        "ranks are processes on this machine, on emulated links: 100 Mbit/s stands for several nodes, 1 Gbit/s for the "
        "bus of one; where steps are timed, a rank computed them once, alone on a core, and ranks sleep for as long",
        "the overhead is that of decisions as far apart as by default, one in 500 steps, from seconds measured here",
        "policies of tables 3.8 and 4.5 are trained from one seed, Bayes and Linear no more; what they save at the "
        "same error is judged on recorded gradients of five uncompressed trainings, without error feedback",
        "global top-k takes the threshold of the step before: it waits for no layer, as the thesis's has to",
        "Rethink-GS has a threshold tuned by hand for this network",
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
