"""Time to a loss: the steps that trainings take to it, which need no clock, by seconds a step, of turns over a link."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, geometric_mean, median
from typing import Any, Self

from experiments.framework.verdicts import Judgment, faster
from thinwire_tools.compare.statistics import reached

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
