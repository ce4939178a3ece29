"""Tables 5.3 and C.3: perplexity with levels that are learned, beside uniform ones, and what learning costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from thinwire.repro import plots
from thinwire.repro.findings import Finding
from thinwire.repro.qsdp.judged import facts, lost, mean_perplexity
from thinwire.repro.qsdp.study import Scale, Study, Work, trainings
from thinwire.repro.qsdp.trainings import Trained
from thinwire.repro.qsdp.ways import BUCKET, FP16, Way, learned, uniform


@dataclass(frozen=True)
class Pair:
    """Bits of weights and gradients (32: not compressed), and the thesis's perplexities of GPT 125M: with uniform
    levels and with learned ones."""

    table: str
    weights: int
    gradients: int
    uniform: float
    learned: float

    @property
    def name(self) -> str:
        return f"W{self.weights}G{self.gradients}"


PAIRS = (
    Pair("table 5.3", 6, 4, 35.81, 35.75),
    Pair("table 5.3", 5, 4, 36.34, 36.01),
    Pair("table 5.3", 4, 4, 37.61, 36.94),
    Pair("table 5.3", 4, 32, 37.11, 36.55),
    Pair("table C.3", 3, 32, 45.53, 42.31),
    Pair("table C.3", 2, 32, 57.92, 56.54),
    Pair("table C.3", 8, 3, 39.91, 37.72),
    Pair("table C.3", 8, 2, 44.79, 44.65),
)
_THESIS_BASELINE = 35.81
_ROUNDED = ("W5G4", "W4G4")
"""Of which uniform levels are also tried with rounding to the nearest, as learned ones are."""
_LEAST_BITS_KEPT = "W5G4"
"""The highest compression "without substantial accuracy impact" (section 5.7.1)."""

_THESIS_STEPS, _THESIS_LEARNINGS = 4800, 3
_THESIS_COST = 9 / (5 * 60)
"""Minutes of learning in those of training, W5G4 (section C.3)."""


def levels_work(scale: Scale) -> Work:
    """Trainings of both tables."""
    ways = [FP16]
    for pair in PAIRS:
        ways += [_uniform(pair), _learned(scale, pair)]
    return Work(trainings(scale, "small", [*ways, *_nearest().values()]))


def table_5_3(study: Study) -> list[Finding]:
    """Uniform and learned levels on the smallest network."""
    base = study.train("small", FP16)
    plain = {pair.name: study.train("small", _uniform(pair)) for pair in PAIRS}
    by_levels = {pair.name: study.train("small", _learned(study.scale, pair)) for pair in PAIRS}
    nearest = {name: study.train("small", way) for name, way in _nearest().items()}
    _draw(study, base, plain, by_levels, nearest)
    rows = [_better(pair, plain[pair.name], by_levels[pair.name], base) for pair in PAIRS]
    rows += [_beside_nearest(name, runs, by_levels[name]) for name, runs in nearest.items()]
    kept = lost(by_levels[_LEAST_BITS_KEPT], base, study.scale.margin)
    rows.append(
        Finding(
            "table 5.3",
            f"lost/{_LEAST_BITS_KEPT} learned",
            kept.estimate.mean,
            "",
            f"{_LEAST_BITS_KEPT} learned is within {study.scale.margin:.0%} of the baseline (36.01 against "
            f"{_THESIS_BASELINE}: no substantial impact)",
            kept.text,
            kept.within,
        )
    )
    return [*rows, cost(study, by_levels[_LEAST_BITS_KEPT])]


def _better(pair: Pair, plain: Sequence[Trained], by_levels: Sequence[Trained], base: Sequence[Trained]) -> Finding:
    told = lost(by_levels, plain, 0.0)
    return Finding(
        pair.table,
        f"learned/{pair.name}",
        told.estimate.mean,
        "",
        f"{pair.name}: learned levels end at a perplexity no higher than uniform ones ({pair.learned} against "
        f"{pair.uniform})",
        f"{told.text}; the baseline's {mean_perplexity(base):.3f}",
        told.within,
        {
            **facts(by_levels),
            "uniform_perplexities": [run.perplexity for run in plain],
            "baseline": mean_perplexity(base),
            "lower": told.estimate.lower,
            "upper": told.estimate.upper,
            "thesis": {"uniform": pair.uniform, "learned": pair.learned, "baseline": _THESIS_BASELINE},
            "pair": pair.name,
        },
    )


def _beside_nearest(name: str, nearest: Sequence[Trained], by_levels: Sequence[Trained]) -> Finding:
    """How much of that the levels themselves do: learned ones are coded by the nearest, not at random."""
    told = lost(by_levels, nearest, 0.0)
    return Finding(
        "table 5.3",
        f"learned_beside_nearest/{name}",
        told.estimate.mean,
        "",
        "",
        f"{told.text}",
        None,
        {
            **facts(nearest),
            "pair": name,
            "lower": told.estimate.lower,
            "upper": told.estimate.upper,
        },
        aside=f"{name}, learned levels against uniform ones that round to the nearest, too",
    )


def cost(study: Study, runs: Sequence[Trained]) -> Finding:
    """Seconds of learning, at the thesis's pace: three times in a training of its length."""
    size = study.scale.size("small")
    here = fmean(run.learn_share for run in runs)
    each_s = fmean(run.learn_s for run in runs) / len(size.learn_at)
    step_s = fmean(median(run.step_s) for run in runs)
    share = _THESIS_LEARNINGS * each_s / (_THESIS_STEPS * step_s)
    return Finding(
        "section C.3",
        "learning_cost",
        share,
        "",
        f"learning levels, W5G4, takes at most {_THESIS_COST:.0%} of training (9 minutes of 5 hours)",
        f"{share:.2%}, {_THESIS_LEARNINGS} times in {_THESIS_STEPS} steps: {1e3 * each_s:.0f} ms each, steps of "
        f"{1e3 * step_s:.0f} ms; {here:.1%} of these trainings of {size.task.steps} steps",
        share <= _THESIS_COST,
        {"learn_s": [run.learn_s for run in runs], "share_here": here, "learn_at": list(size.learn_at)},
    )


def _uniform(pair: Pair) -> Way:
    return uniform(pair.weights, pair.gradients)


def _learned(scale: Scale, pair: Pair) -> Way:
    return learned(pair.weights, pair.gradients, scale.size("small").learn_at)


def _nearest() -> dict[str, Way]:
    return {
        pair.name: uniform(pair.weights, pair.gradients, rounding="nearest") for pair in PAIRS if pair.name in _ROUNDED
    }


def _draw(
    study: Study,
    base: Sequence[Trained],
    plain: Mapping[str, Sequence[Trained]],
    by_levels: Mapping[str, Sequence[Trained]],
    nearest: Mapping[str, Sequence[Trained]],
) -> None:
    title = f"{study.scale.size('small').title}, buckets of {BUCKET}"
    figure, (axes,) = plots.canvas(1, titles=[title], x="", y="perplexity")
    bars = [("baseline", FP16.colour, mean_perplexity(base))]
    for pair in PAIRS:
        bars.append((f"{pair.name} uniform", "#0a7d4f80", mean_perplexity(plain[pair.name])))
        if pair.name in nearest:
            bars.append((f"{pair.name} uniform, nearest", "#0a7d4f", mean_perplexity(nearest[pair.name])))
        bars.append((f"{pair.name} learned", "#1f6fb2", mean_perplexity(by_levels[pair.name])))
    plots.bars(axes, bars)
    plots.save(figure, study.picture("5.3"))
