"""Tables 4.1 to 4.3 and figure B.2: what L-GreCo gains on uniform compression, at which quality and cost."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from thinwire.plan import LGreco, parse_policy
from thinwire.repro import plots
from thinwire.repro.comparison import Comparison, Side
from thinwire.repro.findings import Finding
from thinwire.repro.lgreco.judged import (
    at_least,
    bytes_from,
    first_plan,
    gains,
    kept_within,
    lost,
    sensitive,
    side_named,
)
from thinwire.repro.lgreco.methods import FAMILIES, POWERSGD, Family
from thinwire.repro.lgreco.study import CONTROL, NAMES, NUM_RANKS, TITLES, Scale, Study, Training, Work
from thinwire.repro.lgreco.tasks import Name
from thinwire.repro.report import Run
from thinwire.repro.variants import Variant

TABLES: dict[Name, str] = {"gpt": "table 4.3", "cnn": "table 4.2"}
_MOST_OVERHEAD = 0.01


def variants(scale: Scale, name: Name) -> list[str]:
    """Every family, uniform and by L-GreCo."""
    return [spec for f in FAMILIES for spec in (f.spec(name), f.adapted(name, scale.every(name)))]


def work(scale: Scale) -> Work:
    """Trainings of all variants, of fp32 and of the control."""
    trained: set[Training] = set()
    for name in NAMES:
        for variant in (None, *variants(scale, name), CONTROL):
            trained |= {(name, variant, seed) for seed in range(scale.seeds)}
    return Work(frozenset(trained))


def quality(study: Study) -> list[Finding]:
    """Paired trainings of both networks."""
    found: dict[Name, Comparison] = {name: study.compare(name, variants(study.scale, name)) for name in NAMES}
    _draw(study, found)
    _draw_b2(study, found["cnn"])
    rows = [row for name in NAMES for row in table(study.scale, name, found[name])]
    return [*rows, within_reference(found), rises(study.scale, found["cnn"])]


def table(scale: Scale, name: Name, found: Comparison) -> list[Finding]:
    """Rows of one network: quality, gain and overhead of every family, and the control's."""
    sees = sensitive(found)
    rows = []
    for family in FAMILIES:
        uniform = side_named(found, family.spec(name))
        adapted = side_named(found, family.adapted(name, scale.every(name)))
        rows += [
            _quality(name, family, uniform, found, sees, adapts=False),
            _quality(name, family, adapted, found, sees, adapts=True),
            gain(name, family, adapted, uniform, found.baseline),
            overhead(name, family, adapted),
        ]
    assert found.control is not None
    told = lost(found.control.runs, found.baseline.runs, found.margin)
    seen = "damage is seen" if sees else "damage is not shown to be seen"
    aside = f"{TITLES[name]}, a control that must fail, {CONTROL}"
    control = Finding(TABLES[name], f"control/{name}", float(sees), "", "", f"{told.text}: {seen}", None, aside=aside)
    return [*rows, control]


def _quality(name: Name, family: Family, side: Side, found: Comparison, sees: bool, *, adapts: bool) -> Finding:
    told = lost(side.runs, found.baseline.runs, found.margin)
    kind = "L-GreCo" if adapts else "uniform"
    text = told.text if sees else f"{told.text}; the control did not surely fail, so that this says nothing"
    return Finding(
        TABLES[name],
        f"lost/{name}/{family.name}/{kind.lower()}",
        told.estimate.mean,
        "",
        f"{TITLES[name]}, {family.title}, {kind}: quality within {found.margin:.0%} of fp32's (section 4.6.2)",
        text,
        told.within if sees else None,
        {
            "spec": side.name,
            "losses": side.losses,
            "fp32_losses": found.baseline.losses,
            "accuracies": [run.accuracy for run in side.runs],
            "lower": told.estimate.lower,
            "upper": told.estimate.upper,
            "num_ranks": NUM_RANKS,
        },
    )


def gain(name: Name, family: Family, adapted: Side, uniform: Side, baseline: Side) -> Finding:
    """How many times fewer bytes L-GreCo's plans send, as measured, from the first one on."""
    by_seed = gains(adapted.runs, uniform.runs)
    step = first_plan(adapted.runs)
    ratio = {
        kind: fmean(
            bytes_from(dense, step) / bytes_from(run, step) for run, dense in zip(side.runs, baseline.runs, strict=True)
        )
        for kind, side in (("uniform", uniform), ("lgreco", adapted))
    }
    return Finding(
        TABLES[name],
        f"gain/{name}/{family.name}",
        fmean(by_seed),
        "x",
        f"{TITLES[name]}, {family.title}: L-GreCo sends at least {family.least_gain:g}x less than uniform "
        f"({family.thesis[name]})",
        f"{fmean(by_seed):.2f}x less: {ratio['lgreco']:.1f}x less than fp32, uniform {ratio['uniform']:.1f}x",
        at_least(by_seed, family.least_gain),
        {
            "by_seed": by_seed,
            "ratio": ratio,
            "reference": uniform.name,
            "bytes_per_step": {"uniform": uniform.bytes_per_step, "lgreco": adapted.bytes_per_step},
            "from_step": step,
            "plans": [run.plans for run in adapted.runs],
        },
    )


def overhead(name: Name, family: Family, adapted: Side) -> Finding:
    """Table 4.1: seconds of a decision as a share of training, where one comes every so many steps as by default."""
    policy = parse_policy(Variant.parse(adapted.name).policy or "lgreco()")
    default = LGreco()
    parts = [_parts(run, policy.window_steps, default) for run in adapted.runs if run.plans]
    total = fmean(sum(part.values()) for part in parts) if parts else float("nan")
    mean = {key: fmean(part[key] for part in parts) for key in (parts[0] if parts else ())}
    return Finding(
        "table 4.1",
        f"overhead/{name}/{family.name}",
        total,
        "",
        f"{TITLES[name]}, {family.title}: errors, solving and summing gradients take under {_MOST_OVERHEAD:.0%} of "
        f"training ({family.overhead[name]})",
        f"{total:.2%}, a decision every {default.every} steps: "
        + ", ".join(f"{key} {value:.3%}" for key, value in mean.items()),
        total < _MOST_OVERHEAD if parts else None,
        {
            "share": mean,
            "every_here": policy.every,
            "errors_s": [[plan["errors_s"] for plan in run.plans] for run in adapted.runs],
            "solve_s": [[plan["solve_s"] for plan in run.plans] for run in adapted.runs],
            "waited_s": [[plan["waited_s"] for plan in run.plans] for run in adapted.runs],
            "adapt_s": [run.adapt_s for run in adapted.runs],
            "step_s": [median(run.step_s) for run in adapted.runs],
        },
    )


def _parts(run: Run, window: int, default: LGreco) -> dict[str, float]:
    """Shares of training: the medians of decisions, at the default's pace, of the median step."""
    whole = default.every * median(run.step_s)
    waited = sum(plan["waited_s"] for plan in run.plans)
    # With the changes of plans, of which there are more here for every step whose gradients are summed.
    summing_s = max(0.0, run.adapt_s - waited) / (window * len(run.plans)) * default.window_steps
    return {
        "errors": median(plan["errors_s"] for plan in run.plans) / whole,
        "solving": median(plan["solve_s"] for plan in run.plans) / whole,
        "summing": summing_s / whole,
    }


def within_reference(found: dict[Name, Comparison]) -> Finding:
    """Every plan's error beside its reference's."""
    runs = [run for comparison in found.values() for side in comparison.variants for run in side.runs]
    known, kept, largest = kept_within(runs)
    return Finding(
        "section 4.4",
        "error_within_reference/trainings",
        largest,
        "",
        "a plan errs no more than its reference, always",
        f"in {kept} of {known} decisions; the largest error is {largest:.2%} of the reference's",
        kept == known if known else None,
    )


def rises(scale: Scale, found: Comparison) -> Finding:
    """Figure B.2 and section B.3: with PowerSGD the gain grows while training goes on."""
    adapted = side_named(found, POWERSGD.adapted("cnn", scale.every("cnn")))
    grown = [last / first for first, last in (_ends(run) for run in adapted.runs if run.plans)]
    return Finding(
        "figure B.2",
        "gain_rises/cnn",
        fmean(grown) if grown else float("nan"),
        "x",
        "with PowerSGD the compression that L-GreCo finds generally increases during training (section B.3)",
        f"the last plans send {fmean(grown):.2f}x less than the first ones" if grown else "no plans",
        at_least(grown, 1.0) if grown else None,
        {"plans": [run.plans for run in adapted.runs]},
    )


def _ends(run: Run) -> tuple[float, float]:
    """Mean gain of the first and of the last third of the decisions."""
    values = _gains(run.plans)
    third = max(1, len(values) // 3)
    return fmean(values[:third]), fmean(values[-third:])


def _gains(plans: Sequence[dict[str, Any]]) -> list[float]:
    return [plan["reference_wire_bytes"] / plan["wire_bytes"] for plan in plans]


def _draw(study: Study, found: dict[Name, Comparison]) -> None:
    titles = [f"{TITLES[name]}: times less than fp32" for name in NAMES]
    figure, panels = plots.canvas(len(NAMES), titles=titles, x="", y="compression ratio, measured")
    for axes, name in zip(panels, NAMES, strict=True):
        rows = {row.name: row for row in table(study.scale, name, found[name])}
        bars = []
        for family in FAMILIES:
            ratio = rows[f"gain/{name}/{family.name}"].more["ratio"]
            bars.append((f"{family.title}, uniform", f"{family.colour}80", ratio["uniform"]))
            bars.append((f"{family.title}, L-GreCo", family.colour, ratio["lgreco"]))
        plots.bars(axes, bars)
    plots.save(figure, study.picture("4.2-4.3"))


def _draw_b2(study: Study, found: Comparison) -> None:
    adapted = side_named(found, POWERSGD.adapted("cnn", study.scale.every("cnn")))
    figure, (axes,) = plots.canvas(1, titles=["L-GreCo with PowerSGD, CNN"], x="step", y="ratio to uniform")
    for seed, run in enumerate(adapted.runs):
        axes.plot([plan["step"] for plan in run.plans], _gains(run.plans), marker="o", label=f"seed {seed}")
    plots.save(figure, study.picture("B.2"))
