"""The claims of the full stack, the second half of the AQ-SGD paper, its parts, and its command."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import fmean, median
from typing import Any

from experiments.framework.claims import Claim, Rows, known, over
from experiments.framework.paper import Paper, Part, command
from experiments.framework.verdicts import Course, Judgment, Sooner, all_hold, exceeds, faster, if_seen, matches, sooner
from experiments.papers.aqsgd import stack, tasks
from experiments.papers.aqsgd.methods import (
    ACTIVATIONS,
    ADAM,
    AQSGD,
    CENTER_BITS,
    CONTROL,
    DIRECT,
    FP32,
    ONLY_GRADIENTS,
    QUANTIZED,
    SPLIT_BITS,
    SUM_BITS,
)
from experiments.papers.aqsgd.split import Splitting
from experiments.papers.aqsgd.stack import OPTIMIZERS, TIMED, StackScale, StackStudy
from thinwire_tools.compare.statistics import Estimate, estimate, relative_differences

MARGIN = 0.01
"""Up to so much of the loss may be lost, and a training still ends at the same."""
FASTER, SOONER = 8.5, 4.9
"""Times FP32's throughput, and times sooner at the same loss (section 4.3; the blog post)."""
_POINTS = 0.02
"""Of accuracy: what "similar" is taken for."""
_LOSS_MARGIN = 0.1
"""Of a training loss that is close to zero."""


# --- losses beside each other, seed by seed


Losses = Callable[[Rows], Sequence[float]]


def _of_table(name: str) -> Losses:
    """By seed, from the row of a part that trains in one process."""
    return lambda rows: known(rows["table"]["loss"][name])


def _compared(
    figure: str,
    row: str,
    statement: str,
    ours: Losses,
    others: Losses,
    *,
    margin: float | None = None,
    control: Losses | None = None,
) -> Claim:
    """Our losses are at most ``margin`` above the others', where the control's are not, or above them where that is
    None."""

    def rule(rows: Rows) -> Judgment:
        difference = estimate(relative_differences(ours(rows), others(rows)))
        if margin is None:
            return exceeds(difference)
        seen = control is None or exceeds(estimate(relative_differences(control(rows), others(rows)))).holds is True
        return if_seen(seen, matches(difference, margin))

    return Claim(figure, row, statement, rule, value=lambda rows: fmean(relative_differences(ours(rows), others(rows))))


# --- figure 5: loss


def _row(method: Any) -> str:
    return f"loss/{method.name}"


def _losses(method: Any) -> Losses:
    """By seed; FP32's are beside every other method's."""
    return lambda rows: rows[_row(AQSGD)]["baseline"]["losses"] if method is FP32 else rows[_row(method)]["losses"]


def _lost(rows: Rows, method: Any) -> Estimate:
    """How much higher a method's loss is than FP32's."""
    return estimate(relative_differences(_losses(method)(rows), _losses(FP32)(rows)))


def _curve(method: Any) -> Claim:
    """One method's loss beside FP32's, on what is trained and on what is held out."""

    def rule(rows: Rows) -> Judgment:
        if method is not AQSGD:
            return exceeds(_lost(rows, method))
        margin = min(MARGIN, _lost(rows, DIRECT).lower / 2)
        return if_seen(matches(_lost(rows, CONTROL), MARGIN).holds is False, matches(_lost(rows, AQSGD), margin))

    ends = f"within {MARGIN:.0%} of FP32's loss" if method is AQSGD else "at a worse loss"
    return Claim("figure 5", _row(method), f"{method.title} ends {ends}", rule)


# --- figure 5: throughput and time


_PARTS = (ACTIVATIONS, ONLY_GRADIENTS)


def _ratios(rows: Rows, rate: str, slow: Any) -> list[float]:
    """How many times faster both compressed are, by round."""
    return over(rows["throughput"]["by_round"][rate], AQSGD.name, slow.name)


def _slowest(rows: Rows) -> str:
    return next(iter(rows["throughput"]["by_round"]))


def ceiling(by_round: Rows, slow: str) -> float:
    """Times FP32's throughput over the slowest link that no compression surpasses: steps that send hardly anything,
    over the fastest link, against FP32's over the slowest."""
    fastest = min(median(rounds[method.name]) for rounds in by_round.values() for method in TIMED)
    return median(by_round[slow][FP32.name]) / fastest


def _in_time(rows: Rows) -> Sooner:
    ours, base = (Course.of(rows["sooner"], name) for name in ("aqsgd", "fp32"))
    return sooner(ours, base, rows["throughput"]["by_round"][_slowest(rows)])


# --- QuantizedAdam


def _ends(rows: Rows, method: Any) -> list[float]:
    """Losses of the last epoch, by seed."""
    return known([losses[-1] for losses in rows["seconds"]["methods"][method.name]["losses"]])


def _optimizer(method: Any) -> Claim:
    row = f"sooner/{method.name}"

    def rule(rows: Rows) -> Judgment:
        return faster([1 / (1 + value) for value in known(rows[row]["differences"])])

    statement = f"over 100 Mbit/s QuantizedAdam is at the same loss sooner than {method.title}"
    return Claim("adam", row, statement, rule, over_link=True)


# --- split learning


def _accuracy(row: str, statement: str, ours: str, others: str, *, margin: float | None = None) -> Claim:
    """Our accuracy is at most ``margin`` below the others', where the control's is not, or theirs is worse where that
    is None."""

    def lost(rows: Rows, ours: str = ours) -> list[float]:
        accuracy = rows["table"]["accuracy"]
        return [theirs - mine for mine, theirs in zip(accuracy[ours], accuracy[others], strict=True)]

    def rule(rows: Rows) -> Judgment:
        difference = estimate(lost(rows))
        if margin is None:
            return exceeds(difference, unit="points")
        return if_seen(exceeds(estimate(lost(rows, "control"))).holds is True, matches(difference, margin, "points"))

    return Claim("figure 10", row, statement, rule, value=lambda rows: fmean(lost(rows)))


# --- appendices G and F, of which there is the record


def _appendices() -> Iterator[Claim]:
    centers = "cluster centers", "cluster centers help, DirectQ ends at a worse loss"
    deltas = "delta compensation", "delta compensation helps, without it the loss is worse"
    for figure, kind, all_bits, setting, (remedy, helps) in (
        ("appendix G", "centers", CENTER_BITS, "one epoch, fw{} bw6", centers),
        ("appendix F", "delta", SUM_BITS, "tensor parallelism, {} bits", deltas),
    ):
        for bits in all_bits:
            ours, of_bits = _of_table(f"{kind}{bits}"), setting.format(bits)
            kept = f"{of_bits}: with {remedy} the loss is within {MARGIN:.0%} of FP32's"
            yield _compared(figure, f"loss/{bits}", kept, ours, _of_table("fp32"), margin=MARGIN)
            yield _compared(figure, f"direct/{bits}", f"{of_bits}: {helps}", _of_table(f"direct{bits}"), ours)


CLAIMS = (
    *(_curve(method) for method in (AQSGD, DIRECT)),
    _compared(
        "figure 5",
        "loss/direct against aqsgd",
        "with compressed gradients, DirectQ converges to a worse model than AQ-SGD of as many bits",
        _losses(DIRECT),
        _losses(AQSGD),
    ),
    Claim(
        "figure 5",
        "faster",
        f"over 100 Mbit/s both compressed have up to {FASTER}x FP32's throughput",
        lambda rows: faster(_ratios(rows, _slowest(rows), FP32), FASTER),
        over_link=True,
        value=lambda rows: median(_ratios(rows, _slowest(rows), FP32)),
        unit="x",
    ),
    Claim(
        "figure 5",
        "both_count",
        "switching off either part costs throughput",
        lambda rows: all_hold(faster(_ratios(rows, _slowest(rows), method)) for method in _PARTS),
        over_link=True,
        value=lambda rows: min(median(_ratios(rows, _slowest(rows), method)) for method in _PARTS),
        unit="x",
    ),
    Claim(
        "figure 5",
        "sooner",
        f"both compressed are at FP32's loss {SOONER}x sooner, end to end",
        lambda rows: _in_time(rows).above(SOONER),
        over_link=True,
    ),
    _compared(
        "adam",
        "loss",
        f"QuantizedAdam in 4 bits ends within {MARGIN:.0%} of Adam's loss",
        partial(_ends, method=QUANTIZED),
        partial(_ends, method=ADAM),
        margin=MARGIN,
    ),
    *(_optimizer(method) for method in OPTIMIZERS[:-1]),
    _compared(
        "figure 10",
        "loss/aqsgd",
        f"split learning: AQ-SGD {SPLIT_BITS} has a training loss similar to FP32's (within {_LOSS_MARGIN:.0%})",
        _of_table("aqsgd"),
        _of_table("fp32"),
        margin=_LOSS_MARGIN,
        control=_of_table("control"),
    ),
    _accuracy(
        "accuracy/aqsgd",
        f"split learning: AQ-SGD {SPLIT_BITS} keeps FP32's test accuracy (within {100 * _POINTS:.0f} points)",
        "aqsgd",
        "fp32",
        margin=_POINTS,
    ),
    _compared(
        "figure 10",
        "loss/direct",
        "split learning: AQ-SGD converges better than DirectQ",
        _of_table("direct"),
        _of_table("aqsgd"),
    ),
    _accuracy("accuracy/direct", "split learning: AQ-SGD generalizes better than DirectQ", "direct", "aqsgd"),
    *_appendices(),
)

_DIFFERS = (
    "byte-level GPTs of 0.2 and 0.8 million parameters, first trained on one half of the source of Python's standard "
    "library, are fine-tuned on samples of the other half, where the paper has GPT2-1.5B on WikiText2 and arXiv",
    "2 stages in 2 replicas: four processes that share this machine's two cores, on emulated links, over gloo",
    "links are slower than the paper's by a factor that keeps the paper's ratio of the activations' communication "
    "to computation; a stage's gradient has about as many values as its activations of a step",
    "gradients are sent in min-max quantization, 4 bits in buckets of 128; QuantizedAdam's first steps are exact: an "
    "epoch of five where loss is compared, an eighth of the steps where time is",
    "a scale for every 128 values; forward, values become the midpoints of 2**bits intervals, and backward they are "
    "rounded at random to max-abs levels; 5 epochs, from the same first training for all seeds",
    "times to a loss are steps of trainings by seconds of a step; the first epoch takes as long as FP32's, and the "
    "rest of QuantizedAdam's warm-up as long as with compressed activations only",
    "split learning: scikit-learn's digits, 8 x 8 pixels, unless CIFAR-10 is given; three convolutions and a "
    "classifier in place of ResNet34, cut behind the first ReLU and the last; forward, four levels from the least to "
    "the greatest of 128 values, which keep a ReLU's zeros, and as the control the midpoints of section 4.1, "
    "which do not; crops move an image by an eighth of its size, and its message at the second cut by the "
    "nearest number of positions; clients hand on momenta with the weights; 40 rounds, of which the last 8 have a "
    "tenth of the learning rate",
    "cluster centers: 256 for the vectors of all positions; both sides move them toward what arrives; the paper "
    "has no experiment, and the code of this one is in commit 89cbcd14ece4",
    "tensor parallelism: the sums behind attention and behind the MLP, over 2 ranks, in one process; their gradients "
    "are not compressed; the paper has no experiment, and the code of this one is in commit 89cbcd14ece4",
)
_JUDGED = (
    "Losses of the last epoch may exceed FP32's by at most 1 %, and by at most half of what DirectQ loses with as "
    "many bits. DirectQ fw2 bw4 is the control."
)

PAPER = Paper(
    "fullstack",
    "The full stack, as found here",
    {
        "5": Part("figure 5: loss, throughput, time", stack.figure_5),
        "adam": Part("QuantizedAdam and others", stack.adam),
        "split": Part("figure 10: split learning", stack.figure_10),
    },
    CLAIMS,
    judged=_JUDGED,
    differs=_DIFFERS,
    scale=StackScale(),
    smoke=StackScale(
        small=tasks.STACKED_SMALL_SMOKE,
        timed=tasks.STACKED_TIMED_SMOKE,
        to_loss=tasks.STACKED_TO_LOSS_SMOKE,
        replicated=tasks.REPLICATED_SMOKE,
        split=Splitting(most_images=48, clients=3, rounds=2),
        seeds=1,
        rounds=1,
        rates=("100mbit", "10gbit"),
    ),
    study=StackStudy,
)

fullstack = command(
    PAPER,
    """Repeat what the AQ-SGD paper does beyond activations of a pipeline, claim by claim.

    A pipeline in replicas whose activations, their gradients and the optimizer's momenta are all compressed (figure 5),
    QuantizedAdam against Adam, bf16 and PowerSGD (adam), and split learning (split: figure 10). Takes about 20 minutes
    on two cores.""",
)
