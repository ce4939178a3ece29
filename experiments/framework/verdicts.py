"""Verdicts on claims: *holds*, *does not hold*, or *inconclusive* with the difference that could be seen.

Every rule looks at an interval: of paired differences over seeds, or of paired ratios over rounds that is widened by
the scatter of such ratios from run to run, and from seed to seed where they are of times to a loss. A single training
decides nothing, nor does an interval that is wider than the margin.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, geometric_mean, median
from typing import Any, Self

from thinwire_tools.compare.statistics import CONFIDENCE, Estimate, estimate, need_scipy, reached

RUN_SCATTER = 0.083
"""Standard deviation, between runs of the same experiment, of the logarithm of a ratio of step times; pooled over the
figures that were timed more than once (a test makes it of the recorded runs)."""
_SCATTER_FREEDOM = 72

WORDS = {True: "holds", False: "does not hold", None: "inconclusive"}
"""Verdicts, as tables show them."""


@dataclass(frozen=True)
class Judgment:
    """A verdict; None: it is inconclusive. ``why``: the reason, for people. ``detectable``: half the width of the
    interval, as a share of the baseline's value or in its unit: smaller differences are not told from none. ``found``:
    what was measured, with its bounds, for people."""

    holds: bool | None
    why: str = ""
    detectable: float | None = None
    found: str = ""


ONE_TRAINING = Judgment(None, "one training, so there is no interval")
ONE_MEASUREMENT = Judgment(None, "one measurement, so there is no interval")


def counted(holds: bool, found: str = "") -> Judgment:
    """Return the verdict on counts that are the same in every run: bytes, bits, integers."""
    return Judgment(holds, found=found)


def unsound(why: str, judgment: Judgment | None = None) -> Judgment:
    """Return the verdict where the set-up of the recorded run cannot judge the claim, whatever ``judgment`` says."""
    return Judgment(None, why, found=judgment.found if judgment else "")


def matches(difference: Estimate, margin: float, unit: str = "%") -> Judgment:
    """Judge whether a difference (positive is worse), of which a hundredth is one ``unit``, is at most ``margin``."""
    return replace(_matches(difference, margin), found=shown_difference(difference, unit))


def _matches(difference: Estimate, margin: float) -> Judgment:
    half = difference.upper - difference.mean
    if math.isinf(difference.mean):
        return Judgment(False, "a training diverged")
    if not math.isfinite(half):
        return ONE_TRAINING
    if difference.lower > margin:
        return Judgment(False, detectable=half)
    if half > margin:
        wide = f"half of the interval ({_shown(half)}) is wider than the margin ({_shown(margin)})"
        return Judgment(None, wide, half)
    if difference.upper < -margin:
        return Judgment(None, "better than the baseline by more than the margin: the baseline is not tuned", half)
    if difference.upper <= margin:
        return Judgment(True, detectable=half)
    return Judgment(None, f"the interval contains the margin, {_shown(margin)}", half)


def exceeds(difference: Estimate, effect: float | None = None, unit: str = "%") -> Judgment:
    """Judge whether a difference (positive is as claimed) is above zero; ``effect``: its size in the paper."""
    return replace(_exceeds(difference, effect), found=shown_difference(difference, unit))


def _exceeds(difference: Estimate, effect: float | None) -> Judgment:
    half = difference.upper - difference.mean
    if math.isinf(difference.mean):
        return Judgment(difference.mean > 0, "a training diverged")
    if not math.isfinite(half):
        return ONE_TRAINING
    if difference.upper <= (effect or 0.0) / 2:
        return Judgment(False, detectable=half)
    if difference.lower > 0:
        return Judgment(True, detectable=half)
    return Judgment(None, f"the interval (±{_shown(half)}) contains zero", half)


def faster(ratios: Sequence[float], bound: float = 1.0, *, by_seed: Sequence[float] | None = None) -> Judgment:
    """Whether ``ratios`` of times (one a round) are above ``bound``, as another run would find them, too; ``by_seed``:
    the same, one a training, where trainings differ in how many steps they take."""
    if len(ratios) < 2 or (by_seed is not None and len(by_seed) < 2):
        once = ONE_MEASUREMENT if len(ratios) < 2 else ONE_TRAINING
        return replace(once, found=_shown_ratio(ratios))
    rounds, *seeds = (estimate([math.log(ratio / bound) for ratio in some]) for some in (ratios, by_seed) if some)
    quantile = float(need_scipy().t.ppf(CONFIDENCE, _SCATTER_FREEDOM))
    half = math.hypot(quantile * RUN_SCATTER, *(found.upper - found.mean for found in (rounds, *seeds)))
    return _beyond(rounds.mean, half, bound)


def faster_in_runs(ratios: Sequence[float], bound: float = 1.0) -> Judgment:
    """Judge whether ``ratios`` of times (one a separate run) are above ``bound``."""
    if len(ratios) < 2:
        return replace(ONE_MEASUREMENT, found=_shown_ratio(ratios))
    runs = estimate([math.log(ratio / bound) for ratio in ratios])
    return _beyond(runs.mean, runs.upper - runs.mean, bound)


def _beyond(mean: float, half: float, bound: float) -> Judgment:
    """Judge whether a ratio is above ``bound``, by the logarithm of their quotient, and half of that one's interval."""
    share = math.expm1(half)
    found = _shown_ratio([bound * math.exp(mean)], half)
    if abs(mean) > half:
        return Judgment(mean > 0, detectable=share, found=found)
    return Judgment(None, f"the interval (±{_shown(share)}) contains the bound", share, found)


def larger(ratios: Sequence[float]) -> Judgment:
    """Judge whether ``ratios`` without a clock (of errors, of bytes) are above 1."""
    if len(ratios) < 2:
        return replace(ONE_MEASUREMENT, found=_shown_ratio(ratios))
    return larger_by([math.log(ratio) for ratio in ratios])


def larger_by(logarithms: Sequence[float], effect: float | None = None) -> Judgment:
    """Judge whether ratios with these ``logarithms`` are above 1; ``effect``: the logarithm of the paper's ratio."""
    found = estimate(logarithms)
    shown = _shown_ratio([math.exp(found.mean)], found.upper - found.mean)
    return replace(exceeds(found, effect), found=shown)


def all_hold(judgments: Iterable[Judgment]) -> Judgment:
    """Judge a claim of several parts: it fails with any of them, and is inconclusive where one of the others is."""
    parts = list(judgments)
    found = "; ".join(part.found for part in parts if part.found)
    for holds in (False, None):
        for part in parts:
            if part.holds is holds:
                return replace(part, found=found)
    return Judgment(True, detectable=max((part.detectable or 0.0 for part in parts), default=0.0), found=found)


def if_seen(seen: bool, judgment: Judgment) -> Judgment:
    """Return the judgment, if the control that must fail did; a task that sees no damage says nothing."""
    return judgment if seen else unsound("the control was not clearly worse", judgment)


def outcome(text: str, why: str | None) -> str:
    """Return the finding on a claim, and the reason if it decides nothing."""
    return "; ".join(part for part in (text, why) if part)


def shown_difference(difference: Estimate, unit: str = "%") -> str:
    """Format a difference, of which a hundredth is one ``unit``, with its bounds: ``"−0.40 % (−0.91 to +0.12)"``."""
    if not math.isfinite(difference.mean):
        return "diverges"
    text = f"{100 * difference.mean:+.2f} {unit}"
    if not math.isfinite(difference.lower):
        return text
    return f"{text} ({100 * difference.lower:+.2f} to {100 * difference.upper:+.2f})"


def _shown_ratio(ratios: Sequence[float], half: float | None = None) -> str:
    """Format a ratio, with the bounds that half of its logarithm's interval makes."""
    if not ratios:
        return ""
    if half is None or not math.isfinite(half):
        return f"{ratios[0]:.3g}x"
    return f"{ratios[0]:.3g}x ({ratios[0] * math.exp(-half):.3g} to {ratios[0] * math.exp(half):.3g})"


def _shown(share: float) -> str:
    return f"{100 * share:.2g} %"


Rounds = Mapping[str, Sequence[float]]
"""Seconds of a step, by method that was timed and round of turns."""


@dataclass(frozen=True)
class Course:
    """The trainings of a method: ``losses``, by seed, after each of ``steps``; ``pace`` says, in order, how many steps
    take as long as those of which method that was timed."""

    steps: Sequence[int]
    losses: Sequence[Sequence[float]]
    pace: Sequence[tuple[int, str]]

    @classmethod
    def of(cls, row: Mapping[str, Any], name: str) -> Self:
        """Return the course of that name in a row's ``courses``; JSON keeps losses that are not finite as null."""
        kept = row["courses"][name]
        losses = [[math.inf if loss is None else loss for loss in by_step] for by_step in kept["losses"]]
        return cls(kept["steps"], losses, kept["pace"])

    @property
    def ends(self) -> list[float]:
        """Last loss of each seed."""
        return [losses[-1] for losses in self.losses]

    @property
    def usual(self) -> str:
        """Name of the timed method whose steps all but the first ones take as long as."""
        return self.pace[-1][1]

    def seconds(self, steps: float, step_s: Mapping[str, float]) -> float:
        """Return the seconds of the first ``steps`` steps, by the seconds of one of each timed method's."""
        total = 0.0
        for count, name in self.pace:
            taken = min(steps, count)
            total, steps = total + taken * step_s[name], steps - taken
        return total

    def draw(self, axes: Any, rounds: Rounds, **style: Any) -> None:
        """Draw the seeds' mean loss against seconds, of each method's median round."""
        step_s = {name: median(seconds) for name, seconds in rounds.items()}
        means = [fmean(column) for column in zip(*self.losses, strict=True)]
        axes.plot([self.seconds(steps, step_s) for steps in self.steps], means, marker=".", **style)


@dataclass(frozen=True)
class Sooner:
    """The ratio of the times at which two methods are at a loss: ``ratios`` by seed and round, ``steps`` of ours and of
    the other's and their ``loss``, means over seeds, ``step_s`` the medians of both."""

    ratios: tuple[tuple[float, ...], ...]
    steps: tuple[float, float]
    loss: float
    step_s: tuple[float, float]

    @property
    def times(self) -> float:
        """Ratio in the median round."""
        return median(self._by_round)

    @property
    def text(self) -> str:
        ours_ms, other_ms = (1e3 * seconds for seconds in self.step_s)
        return (
            f"{self.times:.2f}x sooner at {self.loss:.3f}, after {self.steps[0]:.1f} steps against "
            f"{self.steps[1]:.1f}, of {ours_ms:.0f} ms against {other_ms:.0f}"
        )

    def above(self, bound: float) -> Judgment:
        """Whether the ratio is more than ``bound``, as other seeds and another run would find, too."""
        by_seed = [geometric_mean(by_round) for by_round in self.ratios]
        return replace(faster(self._by_round, bound, by_seed=by_seed), found=self.text)

    @property
    def _by_round(self) -> list[float]:
        return [geometric_mean(by_seed) for by_seed in zip(*self.ratios, strict=True)]


def courses(**by_name: Course) -> dict[str, Any]:
    """Return courses in the form that a row keeps."""
    return {name: asdict(course) for name, course in by_name.items()}


def sooner(ours: Course, other: Course, rounds: Rounds) -> Sooner:
    """Compare seed by seed at the worse of the two ends, which both reach.

    Raises:
        ValueError: a training diverged, so that there is no such loss.
    """
    losses = list(map(max, ours.ends, other.ends))
    if not all(map(math.isfinite, losses)):
        raise ValueError("a training diverged: there is no loss that both reach")
    steps = [
        [reached(course.steps, by_step, loss) or math.nan for by_step, loss in zip(course.losses, losses, strict=True)]
        for course in (ours, other)
    ]
    by_round = [dict(zip(rounds, seconds, strict=True)) for seconds in zip(*rounds.values(), strict=True)]
    ratios = tuple(
        tuple(other.seconds(others, step_s) / ours.seconds(mine, step_s) for step_s in by_round)
        for mine, others in zip(*steps, strict=True)
    )
    step_s = (median(rounds[ours.usual]), median(rounds[other.usual]))
    return Sooner(ratios, (fmean(steps[0]), fmean(steps[1])), fmean(losses), step_s)
