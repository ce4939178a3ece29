"""Tables 4.1 to 4.4 and figure B.2: what L-GreCo gains on uniform compression and others, at which quality and cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean, median
from typing import Any

from experiments.framework.claims import Row, bounded
from experiments.framework.verdicts import Judgment, matches
from experiments.papers.lgreco.methods import (
    BITS,
    FAMILIES,
    POWERSGD,
    TOPK,
    Family,
    Name,
    accordion,
    policy_of,
    with_policy,
)
from experiments.papers.lgreco.study import NAMES, LGrecoScale, LGrecoStudy
from thinwire.policies import LGreco, parse_policy
from thinwire_tools import plots
from thinwire_tools.compare.comparison import Comparison, Run, Side
from thinwire_tools.compare.statistics import Estimate, estimate, relative_differences
from thinwire_tools.compare.variants import Variant


def lost(runs: Sequence[Run], baseline: Sequence[Run], margin: float) -> dict[str, Any]:
    """What ``runs`` lose of the baseline's quality, for a row: points of accuracy, of a task that counts right answers;
    else a share of its held-out loss. ``margin`` is a share of the baseline's."""
    ours, theirs = _accuracies(runs), _accuracies(baseline)
    if ours and theirs:
        difference, allowed = estimate([b - a for a, b in zip(ours, theirs, strict=True)]), margin * fmean(theirs)
    else:
        ours, theirs = [run.val_loss for run in runs], [run.val_loss for run in baseline]
        difference, allowed = estimate(relative_differences(ours, theirs)), margin
    return {
        "lost": difference.mean,
        "lower": difference.lower,
        "upper": difference.upper,
        "ours": fmean(ours),
        "theirs": fmean(theirs),
        "margin": allowed,
        "counts_right": bool(_accuracies(runs)),
    }


def kept(row: Mapping[str, Any], margin: float | None = None) -> Judgment:
    """Whether a row's `lost`, in points of accuracy or as a share of perplexity, is at most the margin."""
    allowed = row["margin"] if margin is None else margin
    # The loss is the logarithm of perplexity: a difference of 0.01 is 1 % of it.
    nats = 1.0 if row["counts_right"] else row["theirs"]
    lost = bounded(row, row["lost"])
    difference = Estimate(nats * lost.mean, lost.deviation, nats * lost.lower, nats * lost.upper, 2)
    return matches(difference, allowed, "points" if row["counts_right"] else "%")


def bytes_from(run: Run, step: int) -> float:
    """Payload that rank 0 sends in a step, from ``step`` on as far as there are probes."""
    steps = [0, *run.probe_steps]
    at = min(next((i for i, probed in enumerate(steps) if probed >= step), 0), len(steps) - 2)
    return (run.payload_bytes[-1] - run.payload_bytes[at]) / (steps[-1] - steps[at])


def first_plan(runs: Sequence[Run]) -> int:
    """The step from which a policy's plans hold; 0 without a policy."""
    return max((run.plans[0]["step"] for run in runs if run.plans), default=0)


def gains(runs: Sequence[Run], uniform: Sequence[Run]) -> list[float]:
    """By seed, how many times fewer bytes than ``uniform`` are sent once both have chosen a plan."""
    step = max(first_plan(runs), first_plan(uniform))
    return [bytes_from(other, step) / bytes_from(run, step) for run, other in zip(runs, uniform, strict=True)]


def side_named(comparison: Comparison, name: str) -> Side:
    return next(side for side in comparison.variants if side.name == name)


def _accuracies(runs: Sequence[Run]) -> list[float]:
    return [run.accuracy for run in runs if run.accuracy is not None]


TABLES: dict[Name, str] = {"gpt": "table 4.3", "cnn": "table 4.2"}


def variants(scale: LGrecoScale, name: Name) -> list[str]:
    """Every family, uniform and by L-GreCo."""
    return [spec for family in FAMILIES for spec in _pair(scale, name, family)]


def _pair(scale: LGrecoScale, name: Name, family: Family) -> tuple[str, str]:
    """Uniform compression and L-GreCo, both after as many dense steps."""
    return family.uniform(name, scale.warm_up), family.adapted(name, scale.every(name), scale.warm_up)


def quality(name: Name, study: LGrecoStudy) -> list[Row]:
    """Paired trainings of one network."""
    comparison = study.compare(name, variants(study.scale, name))
    if name == "cnn":
        _draw_b2(study, side_named(comparison, _pair(study.scale, name, POWERSGD)[1]))
    return table(study.scale, name, comparison)


def overheads(study: LGrecoStudy) -> list[Row]:
    """Table 4.1: what L-GreCo takes of the trainings of both networks."""
    rows = []
    for name, family in product(NAMES, FAMILIES):
        _, adapted = _pair(study.scale, name, family)
        rows.append(overhead(name, family, adapted, [study.train(name, adapted, seed) for seed in study.seeds]))
    return rows


def table(scale: LGrecoScale, name: Name, comparison: Comparison) -> list[Row]:
    """Rows of one network: the control's, which is 1 if its damage is seen; quality and gain of every family."""
    assert comparison.control is not None
    control = lost(comparison.control.runs, comparison.baseline.runs, comparison.margin)
    rows = [Row(TABLES[name], f"control/{name}", float(kept(control).holds is False), "", control)]
    for family in FAMILIES:
        uniform, adapted = (side_named(comparison, variant) for variant in _pair(scale, name, family))
        for kind, side in (("uniform", uniform), ("l-greco", adapted)):
            data = lost(side.runs, comparison.baseline.runs, comparison.margin)
            more = {"spec": side.name, "losses": side.losses, "accuracies": [run.accuracy for run in side.runs]}
            more |= {"fp32_losses": comparison.baseline.losses}
            rows.append(Row(TABLES[name], f"lost/{name}/{family.name}/{kind}", data["lost"], "", data | more))
        rows.append(gain(name, family, adapted, uniform, comparison.baseline))
    return rows


def gain(name: Name, family: Family, adapted: Side, uniform: Side, baseline: Side) -> Row:
    """How many times fewer bytes L-GreCo's plans send, as measured, from the first one on."""
    by_seed, step = gains(adapted.runs, uniform.runs), first_plan(adapted.runs)
    ratio = {
        kind: fmean(
            bytes_from(dense, step) / bytes_from(run, step) for run, dense in zip(side.runs, baseline.runs, strict=True)
        )
        for kind, side in (("uniform", uniform), ("lgreco", adapted))
    }
    data = {
        "by_seed": by_seed,
        "ratio": ratio,
        "reference": family.spec(name),
        "bytes_per_step": {"uniform": uniform.bytes_per_step, "lgreco": adapted.bytes_per_step},
        "from_step": step,
        "plans": [run.plans for run in adapted.runs],
    }
    return Row(TABLES[name], f"gain/{name}/{family.name}", fmean(by_seed), "x", data)


def overhead(name: Name, family: Family, adapted: str, runs: Sequence[Run]) -> Row:
    """Seconds of a decision as a share of training, where one comes every so many steps as by default."""
    policy = parse_policy(Variant.parse(adapted).policy or "lgreco()")
    parts = [shares(run, policy.window_steps) for run in runs if run.plans]
    mean = {key: fmean(part[key] for part in parts) for key in (parts[0] if parts else ())}
    data = {
        "share": mean,
        "by_seed": [sum(part.values()) for part in parts],
        "every_here": policy.every,
        **{key: [[plan[key] for plan in run.plans] for run in runs] for key in ("errors_s", "solve_s")},
        "adapt_s": [run.adapt_s for run in runs],
        "step_s": [median(run.step_s) for run in runs],
    }
    return Row("table 4.1", f"overhead/{name}/{family.name}", sum(mean.values()) if mean else float("nan"), "", data)


def shares(run: Run, window: int) -> dict[str, float]:
    """Of training: the medians of decisions, at the default's pace, of the median step."""
    default = LGreco()
    whole = default.every * median(run.step_s)
    waited = sum(plan["waited_s"] for plan in run.plans)
    # With the changes of plans, of which there are more here for every step whose gradients are summed.
    summing_s = max(0.0, run.adapt_s - waited) / (window * len(run.plans)) * default.window_steps
    return {
        "errors": median(plan["errors_s"] for plan in run.plans) / whole,
        "solving": median(plan["solve_s"] for plan in run.plans) / whole,
        "summing": summing_s / whole,
    }


def plan_gains(plans: Sequence[Mapping[str, Any]]) -> list[float]:
    """How many times fewer bytes than its reference's each plan sends."""
    return [plan["reference_wire_bytes"] / plan["wire_bytes"] for plan in plans]


def _draw_b2(study: LGrecoStudy, adapted: Side) -> None:
    figure, (axes,) = plots.canvas(1, titles=["L-GreCo with PowerSGD, CNN"], x="step", y="ratio to uniform")
    for seed, run in enumerate(adapted.runs):
        axes.plot([plan["step"] for plan in run.plans], plan_gains(run.plans), marker="o", label=f"seed {seed}")
    plots.save(figure, study.picture("B.2"))


THRESHOLD = 0.05
"""λ of Rethink-GS, tuned by hand, as its authors do, until it sends about what L-GreCo does and training survives."""
GLOBAL_DENSITY = 0.0025
"""Of the global top-k (section 4.6.3)."""


@dataclass(frozen=True)
class Policy:
    """A row of a table: a variant, and what the thesis's table says of it, relative to uniform compression."""

    name: str
    title: str
    variant: str
    thesis: float | None = None


def table_3_8(scale: LGrecoScale) -> list[Policy]:
    every, spec, low = scale.every("gpt"), BITS.spec("gpt"), "minmax(bits=3, bucket=128)"
    return [
        Policy("uniform", "uniform", spec, 1.0),
        Policy("kmeans", "k-means", with_policy(spec, policy_of("kmeans", every)), 1.47),
        Policy("accordion", "Accordion", with_policy(spec, accordion(every, spec, low)), 1.21),
        Policy("lgreco", "L-GreCo", BITS.adapted("gpt", every)),
    ]


def table_4_4(scale: LGrecoScale) -> list[Policy]:
    every, weak, strong = scale.every("cnn"), "topk(density=0.02)", "topk(density=0.001)"
    return [
        Policy("uniform", "uniform, 2 %", weak, 1.0),
        Policy("strong", "uniform, 0.1 %", strong, 20.0),
        Policy("accordion", "Accordion", with_policy(weak, accordion(every, weak, strong)), 3.5),
        Policy("threshold", "Rethink-GS", f"threshold(lam={THRESHOLD})", 5.7),
        Policy("global", "global top-k", f"globaltopk(density={GLOBAL_DENSITY})"),
        Policy("lgreco", "L-GreCo", TOPK.adapted("cnn", every), 6.7),
    ]


def table_4_5(scale: LGrecoScale) -> list[Policy]:
    every, spec = scale.every("gpt"), POWERSGD.spec("gpt")
    hybrid = accordion(every, "powersgd(rank=64)", "powersgd(rank=16)")

    def adapted(policy: str, bounds: tuple[int, int], more: str = "") -> str:
        return with_policy(spec, policy_of(policy, every, f", bounds={bounds}{more}"))

    return [
        Policy("uniform", "uniform", spec, 1.0),
        Policy("lgreco", "L-GreCo", adapted("lgreco", (8, 64)), 23.5 / 14.1),
        Policy("accordion", "Accordion", with_policy(spec, hybrid), 23.9 / 14.1),
        Policy("kmeans", "k-means", adapted("kmeans", (8, 64)), 21.6 / 14.1),
        Policy("both", "L-GreCo + Accordion", adapted("lgreco", (8, 128), f", reference={hybrid}"), 36.9 / 14.1),
    ]


def policies(figure: str, name: Name, table: Callable[[LGrecoScale], list[Policy]], study: LGrecoStudy) -> list[Row]:
    """Trainings under every policy: how many times fewer bytes than uniform's each sends, as measured once plans are
    chosen, and its quality."""
    rows, margin = table(study.scale), study.scale.margin
    base = [study.train(name, None, seed) for seed in study.seeds]
    trained = {method.name: [study.train(name, method.variant, seed) for seed in study.seeds] for method in rows}
    made = []
    for method in rows:
        runs = trained[method.name]
        data = {"variant": method.variant, "thesis": method.thesis, "title": method.title, **lost(runs, base, margin)}
        data |= {"plans": [run.plans for run in runs]}
        made.append(Row(figure, f"ratio/{name}/{method.name}", fmean(gains(runs, trained["uniform"])), "x", data))
    if "threshold" not in trained:
        return made
    beside = lost(trained["lgreco"], trained["threshold"], margin)
    return [*made, Row(figure, "lgreco_no_worse_than_threshold", beside["lost"], "", beside)]
