"""L-GreCo against uniform compression at equal bytes, in quality: paired trainings under strong compression."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

from experiments.framework.claims import Claim, Row, Rows, estimated
from experiments.framework.verdicts import Judgment, exceeds, if_seen, unsound
from experiments.papers.lgreco.methods import lgreco, with_policy
from experiments.papers.lgreco.quality import gains, side_named
from experiments.papers.lgreco.study import LGrecoStudy
from thinwire_tools import plots
from thinwire_tools.compare.comparison import Comparison, Side
from thinwire_tools.compare.statistics import estimate, relative_differences
from thinwire_tools.compare.variants import ALONE, Variant

FIGURE = "equal bytes"
_MORE_BYTES = 0.02
"""So much more than uniform compression may L-GreCo send, and the two still count as equal."""


@dataclass(frozen=True)
class Pair:
    """A uniform compression that costs quality, and ``half``: the same family at about half of the bytes, which is the
    graded control. Where it does not end clearly worse than ``uniform``, the task cannot tell such differences."""

    name: str
    title: str
    uniform: str
    half: str


PAIRS = (
    Pair("bits", "2 bits", "minmax(bits=2, bucket=128)", "minmax(bits=1, bucket=128)"),
    Pair("topk", "top-k 5 %", "topk(density=0.05)", "topk(density=0.025)"),
    Pair("powersgd", "PowerSGD of rank 4", "powersgd(rank=4)", "powersgd(rank=2)"),
)


def equal_bytes(study: LGrecoStudy) -> list[Row]:
    """Trainings of the GPT by uniform compression, by L-GreCo in as many bytes, by half of the bytes, and alone."""
    policy = lgreco(study.scale.every("gpt"), "objective='error'")
    adapted = {pair.name: with_policy(pair.uniform, policy) for pair in PAIRS}
    variants = [ALONE, *(spec for pair in PAIRS for spec in (pair.uniform, adapted[pair.name], pair.half))]
    comparison = study.compare("gpt", variants)
    sides = {ALONE: side_named(comparison, ALONE)}
    for pair in PAIRS:
        for kind, spec in (("uniform", pair.uniform), ("lgreco", adapted[pair.name]), ("half", pair.half)):
            sides[f"{pair.name}/{kind}"] = side_named(comparison, str(Variant.parse(spec)))
    _draw(study, comparison, sides)
    assert comparison.control is not None
    rows = [_lost(comparison, name, side) for name, side in ({"control": comparison.control} | sides).items()]
    return rows + [_gain(pair, sides) for pair in PAIRS]


def _losses(side: Side) -> list[float]:
    return [run.val_loss for run in side.runs]


def _lost(comparison: Comparison, name: str, side: Side) -> Row:
    ours, theirs = _losses(side), _losses(comparison.baseline)
    lost = relative_differences(ours, theirs)
    data = {"lost": lost, "losses": ours, "fp32_losses": theirs, "spec": side.name, "sent": side.bytes_per_step}
    return Row(FIGURE, f"lost/{name}", fmean(lost), "", data)


def _gain(pair: Pair, sides: dict[str, Side]) -> Row:
    """How much lower L-GreCo's loss is than uniform's, as a share of that, from the same seeds."""
    uniform, ours, half, alone = (sides[name] for name in (*(f"{pair.name}/{kind}" for kind in _KINDS), ALONE))
    lower = [-difference for difference in relative_differences(_losses(ours), _losses(uniform))]
    data = {
        "by_seed": lower,
        "half_loses": relative_differences(_losses(half), _losses(uniform)),
        "alone_loses": relative_differences(_losses(alone), _losses(uniform)),
        "fewer_bytes": gains(ours.runs, uniform.runs),
    }
    return Row(FIGURE, f"lower_loss/{pair.name}", fmean(lower), "", data)


_KINDS = ("uniform", "lgreco", "half")


def _draw(study: LGrecoStudy, comparison: Comparison, sides: dict[str, Side]) -> None:
    titles = ["GPT of words: loss beyond fp32's"]
    figure, (axes,) = plots.canvas(1, titles=titles, x="kB that a rank sends in a step", y="held-out loss, %")
    colors = dict(zip((pair.name for pair in PAIRS), ("#0a7d4f", "#c0392b", "#8250c4"), strict=True))
    for pair in PAIRS:
        for kind, marker, title in (("half", "v", "half"), ("uniform", "o", "uniform"), ("lgreco", "*", "L-GreCo")):
            side = sides[f"{pair.name}/{kind}"]
            lost = estimate(relative_differences(_losses(side), _losses(comparison.baseline)))
            half = lost.upper - lost.mean
            axes.errorbar(
                [side.bytes_per_step / 1e3],
                [100 * lost.mean],
                yerr=[100 * half] if math.isfinite(half) else None,
                marker=marker,
                markersize=9 if marker == "*" else 6,
                color=colors[pair.name],
                label=f"{pair.title}, {title}",
                linestyle="none",
            )
    axes.set_xscale("log")
    plots.save(figure, study.picture("equal-bytes"))


# --- claims


def claims() -> Iterator[Claim]:
    """One for each kind of compression."""
    yield from map(_of_pair, PAIRS)


def _of_pair(pair: Pair) -> Claim:
    row = f"lower_loss/{pair.name}"

    def rule(rows: Rows) -> Judgment:
        found = rows[row]
        lower = exceeds(estimated(found, "by_seed"))
        if fmean(found["fewer_bytes"]) < 1 - _MORE_BYTES:
            return unsound("L-GreCo sent more than uniform compression", lower)
        if estimated(found, "alone_loses").lower <= 0:
            return unsound("uniform compression is not shown to be better than sending nothing", lower)
        return if_seen(estimated(found, "half_loses").lower > 0, lower)

    statement = "at equal bytes L-GreCo ends at a lower loss than uniform (chapter 4 implies it)"
    return Claim(FIGURE, row, f"GPT, {pair.title}: {statement}", rule)
