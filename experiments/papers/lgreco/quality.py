"""Tables 4.1 to 4.3 and figure B.2: what L-GreCo gains on uniform compression, at which quality and cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from experiments.framework import pictures
from experiments.framework.claims import Row
from experiments.papers.lgreco.judging import bytes_from, first_plan, gains, kept, lost, side_named
from experiments.papers.lgreco.methods import FAMILIES, POWERSGD, Family
from experiments.papers.lgreco.study import NAMES, TITLES, LGrecoScale, LGrecoStudy
from experiments.papers.lgreco.tasks import Name
from thinwire.policies import LGreco, parse_policy
from thinwire_tools import plots
from thinwire_tools.compare.comparison import Comparison, Run, Side
from thinwire_tools.compare.variants import Variant

TABLES: dict[Name, str] = {"gpt": "table 4.3", "cnn": "table 4.2"}


def variants(scale: LGrecoScale, name: Name) -> list[str]:
    """Every family, uniform and by L-GreCo."""
    return [spec for f in FAMILIES for spec in (f.spec(name), f.adapted(name, scale.every(name)))]


def steps(scale: LGrecoScale) -> int:
    """Of trainings of all variants, of fp32 and of the control."""
    return sum(scale.task(name).steps * scale.seeds * (2 + len(variants(scale, name))) for name in NAMES)


def quality(study: LGrecoStudy) -> list[Row]:
    """Paired trainings of both networks."""
    comparisons = {name: study.compare(name, variants(study.scale, name)) for name in NAMES}
    rows = [row for name in NAMES for row in table(study.scale, name, comparisons[name])]
    _draw(study, {f"{row.figure}/{row.name}": row for row in rows})
    adapted = side_named(comparisons["cnn"], POWERSGD.adapted("cnn", study.scale.every("cnn")))
    _draw_b2(study, adapted)
    return rows


def table(scale: LGrecoScale, name: Name, comparison: Comparison) -> list[Row]:
    """Rows of one network: the control's, which is 1 if its damage is seen; quality, gain and overhead of every
    family."""
    assert comparison.control is not None
    control = lost(comparison.control.runs, comparison.baseline.runs, comparison.margin)
    rows = [Row(TABLES[name], f"control/{name}", float(kept(control).holds is False), "", control)]
    for family in FAMILIES:
        uniform = side_named(comparison, family.spec(name))
        adapted = side_named(comparison, family.adapted(name, scale.every(name)))
        for kind, side in (("uniform", uniform), ("l-greco", adapted)):
            data = lost(side.runs, comparison.baseline.runs, comparison.margin)
            more = {"spec": side.name, "losses": side.losses, "accuracies": [run.accuracy for run in side.runs]}
            more |= {"fp32_losses": comparison.baseline.losses}
            rows.append(Row(TABLES[name], f"lost/{name}/{family.name}/{kind}", data["lost"], "", data | more))
        rows += [gain(name, family, adapted, uniform, comparison.baseline), overhead(name, family, adapted)]
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
        "reference": uniform.name,
        "bytes_per_step": {"uniform": uniform.bytes_per_step, "lgreco": adapted.bytes_per_step},
        "from_step": step,
        "plans": [run.plans for run in adapted.runs],
    }
    return Row(TABLES[name], f"gain/{name}/{family.name}", fmean(by_seed), "x", data)


def overhead(name: Name, family: Family, adapted: Side) -> Row:
    """Table 4.1: seconds of a decision as a share of training, where one comes every so many steps as by default."""
    policy = parse_policy(Variant.parse(adapted.name).policy or "lgreco()")
    parts = [shares(run, policy.window_steps) for run in adapted.runs if run.plans]
    mean = {key: fmean(part[key] for part in parts) for key in (parts[0] if parts else ())}
    data = {
        "share": mean,
        "by_seed": [sum(part.values()) for part in parts],
        "every_here": policy.every,
        **{key: [[plan[key] for plan in run.plans] for run in adapted.runs] for key in ("errors_s", "solve_s")},
        "adapt_s": [run.adapt_s for run in adapted.runs],
        "step_s": [median(run.step_s) for run in adapted.runs],
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


def _draw(study: LGrecoStudy, rows: Mapping[str, Row]) -> None:
    titles = [f"{TITLES[name]}: times less than fp32" for name in NAMES]
    figure, panels = plots.canvas(len(NAMES), titles=titles, x="", y="compression ratio, measured")
    for axes, name in zip(panels, NAMES, strict=True):
        bars = []
        for family in FAMILIES:
            ratio = rows[f"{TABLES[name]}/gain/{name}/{family.name}"].data["ratio"]
            bars.append((f"{family.title}, uniform", f"{family.color}80", ratio["uniform"]))
            bars.append((f"{family.title}, L-GreCo", family.color, ratio["lgreco"]))
        pictures.bars(axes, bars)
    plots.save(figure, study.picture("4.2-4.3"))


def _draw_b2(study: LGrecoStudy, adapted: Side) -> None:
    figure, (axes,) = plots.canvas(1, titles=["L-GreCo with PowerSGD, CNN"], x="step", y="ratio to uniform")
    for seed, run in enumerate(adapted.runs):
        axes.plot([plan["step"] for plan in run.plans], plan_gains(run.plans), marker="o", label=f"seed {seed}")
    plots.save(figure, study.picture("B.2"))
