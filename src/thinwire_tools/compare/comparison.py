"""The results of paired runs: differences with their bounds, verdicts, a table, figures."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from thinwire_tools import plots
from thinwire_tools.compare import statistics
from thinwire_tools.compare.statistics import CONFIDENCE, Estimate, Verdict
from thinwire_tools.results import Results

_FIRST_STEPS = 5
_COLORS = {Verdict.WITHIN: "green", Verdict.BEYOND: "red", Verdict.UNDECIDED: "yellow"}
_VERDICT_WIDTH = 12


@dataclass(frozen=True)
class Ratio:
    """A speed in multiples of another: the median of the turns' ratios and its 95 % interval."""

    median: float
    lower: float
    upper: float

    def __str__(self) -> str:
        return f"{self.median:.2f}x ({self.lower:.2f} to {self.upper:.2f})"


@dataclass
class Run:
    """One training of one variant, and its figures."""

    name: str
    step_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    """Held-out loss on the probe at the start and after each of ``probe_steps``."""
    probe_steps: list[int] = field(default_factory=list)
    payload_bytes: list[float] = field(default_factory=list)
    """Bytes that rank 0 has sent at the start and after each of ``probe_steps``."""
    formula_bytes: float | None = None
    wire_bytes: int | None = None
    """Bytes that rank 0 sent over its interface in all steps, headers included."""
    val_loss: float = 0.0
    replicas_identical: bool = False
    alpha: list[tuple[int, float]] = field(default_factory=list)
    """Pairs of a step and the relative error of the received mean, where it was measured (`thinwire.Stats.alpha`)."""
    accuracy: float | None = None
    """Share of right answers on the held-out set, of tasks that count them."""
    plans: list[dict[str, Any]] = field(default_factory=list)
    """Decisions of a policy, in the order of steps; see `thinwire_tools.compare.paired.decided`."""
    adapt_s: float = 0.0
    """Seconds of the training thread that the policy took: summing gradients and changing plans."""

    @property
    def steps_per_s(self) -> float:
        """Inverse of the median step's seconds, without the first steps, in which DDP arranges its buckets."""
        return 1 / median(self.step_s[min(_FIRST_STEPS, len(self.step_s) // 2) :])

    @property
    def turns_s(self) -> list[float]:
        """Seconds of the median step between each probe and the next."""
        return [median(self.step_s[start:end]) for start, end in pairwise([0, *self.probe_steps])]

    @property
    def probe_s(self) -> list[float]:
        """Seconds of training until each probe, first steps included."""
        return [sum(self.step_s[:step]) for step in [0, *self.probe_steps]]

    def speedup(self, over: Run) -> Ratio:
        """Return the speed relative to ``over``, from the ratios of each turn's median steps."""
        ratios = [theirs / ours for ours, theirs in zip(self.turns_s, over.turns_s, strict=True)]
        return Ratio(median(ratios), *statistics.median_interval(ratios))


@dataclass(frozen=True)
class Side:
    """All runs of one variant (or the baseline), one for each seed, at one learning rate."""

    name: str
    learning_rate: float
    runs: tuple[Run, ...]
    title: str = ""
    """Name in the table, where that is another."""
    on_link: bool = True
    """Whether the runs went over the shaped link, where there is one; those for the loss alone do not."""

    @property
    def losses(self) -> list[float]:
        """Held-out loss at the end of each seed's run."""
        return [run.val_loss for run in self.runs]

    @property
    def held_out_loss(self) -> float:
        return math.fsum(self.losses) / len(self.runs)

    @property
    def bytes_per_step(self) -> float:
        return self._mean([run.payload_bytes[-1] / run.probe_steps[-1] for run in self.runs])

    @property
    def wire_bytes_per_step(self) -> float | None:
        """Bytes that rank 0 sends in a step as counted on its interface, with headers; None over loopback."""
        counted = [run.wire_bytes / run.probe_steps[-1] for run in self.runs if run.wire_bytes is not None]
        return self._mean(counted) if counted else None

    @property
    def alpha(self) -> float | None:
        """Mean relative error of the averaged gradient over the steps that were measured; None where none was."""
        alphas = [alpha for run in self.runs for _, alpha in run.alpha]
        return self._mean(alphas) if alphas else None

    @property
    def plan_gain(self) -> float | None:
        """Ratio of the bytes by the rules' plan to those by the plans that a policy chose, averaged over its decisions;
        None without a policy."""
        gains = [plan["reference_wire_bytes"] / plan["wire_bytes"] for run in self.runs for plan in run.plans]
        return self._mean(gains) if gains else None

    @property
    def steps_per_s(self) -> float:
        return self._mean([run.steps_per_s for run in self.runs])

    @staticmethod
    def _mean(values: Sequence[float]) -> float:
        return math.fsum(values) / len(values)


@dataclass(frozen=True)
class Judgment:
    """A variant's relative differences to the baseline, by seed, and what follows from them."""

    differences: list[float]
    estimate: Estimate
    verdict: Verdict
    seeds_needed: int | None
    """Number of seeds, about, that would decide where these do not; None if that cannot be estimated."""

    def __str__(self) -> str:
        if self.verdict is not Verdict.UNDECIDED:
            return str(self.verdict)
        if self.estimate.num_pairs == 1:
            return "undecided (needs at least 2 seeds)"
        needed = "over 1000" if self.seeds_needed is None else f"about {self.seeds_needed}"
        return f"undecided (needs {needed} seeds)"


@dataclass(frozen=True)
class Comparison:
    """Variants and the baseline. ``margin``: a loss higher by that share is still the same (0.01 for 1 %).

    ``shaped``: the runs went over a shaped link, so that seconds mean something.
    """

    seeds: tuple[int, ...]
    margin: float
    shaped: bool
    baseline: Side
    variants: tuple[Side, ...]
    control: Side | None
    about: dict[str, Any]
    """Facts about the task, the ranks, the link."""

    def judge(self, side: Side) -> Judgment:
        """Compare ``side`` to the baseline. Raises ``ValueError`` if the baseline diverged."""
        differences = statistics.relative_differences(side.losses, self.baseline.losses)
        estimate = statistics.estimate(differences)
        verdict = statistics.judge(estimate, self.margin)
        needed = statistics.seeds_needed(estimate, self.margin) if verdict is Verdict.UNDECIDED else None
        return Judgment(differences, estimate, verdict, needed)

    @property
    def control_verdict(self) -> Verdict | None:
        return self.judge(self.control).verdict if self.control else None

    @property
    def sensitive(self) -> bool:
        """Whether the control, which must fail, is outside the margin: otherwise "within" means nothing here."""
        return self.control_verdict is not Verdict.WITHIN

    def to_same_loss(self, side: Side) -> list[float | None]:
        """Return seconds of training (steps, where no link is shaped) until the same loss, by seed; None for never.

        The same loss is at most the margin above that which the seed's baseline ends with; both losses are those of the
        held-out probe, each averaged with the two before it, and between probes on a straight line.
        """
        seconds = []
        for run, baseline in zip(side.runs, self.baseline.runs, strict=True):
            target = statistics.smoothed(baseline.losses)[-1] * (1 + self.margin)
            at = run.probe_s if self.shaped else [0, *run.probe_steps]
            seconds.append(statistics.reached(at, statistics.smoothed(run.losses), target))
        return seconds

    def sides(self) -> Iterator[Side]:
        yield self.baseline
        yield from self.variants
        if self.control:
            yield self.control

    def table(self) -> Table:
        """Return a row for each variant; a column of verdicts, unless there is one seed, which decides nothing."""
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
        table.add_column("variant", overflow="fold", min_width=17)
        columns = list(self.columns())
        if len(self.seeds) > 1:
            margin = f"{self.margin:.3g}" if self.margin < 1e-3 else f"{self.margin * 100:g} %"
            columns.append((f"within\n{margin}?", self._verdict))
        for heading, _ in columns:
            table.add_column(heading, justify="left" if heading.startswith("within") else "right", no_wrap=True)
        for side in self.sides():
            name = escape(side.title or side.name) + (" (control)" if side is self.control and not side.title else "")
            table.add_row(name, *(cell(side) for _, cell in columns))
        return table

    def columns(self) -> Iterator[tuple[str, Callable[[Side], str]]]:
        """Yield the headings of the table, each with a function of a side."""
        yield "held-out\nloss", lambda side: f"{side.held_out_loss:.4f}"
        yield "difference\n%", self._difference
        yield "kB a\nstep", lambda side: f"{side.bytes_per_step / 1e3:.1f}"
        measured = any(side.alpha is not None for side in self.sides())
        # Over loopback speed means little: alpha takes its place.
        if measured:
            yield "alpha", lambda side: "–" if side.alpha is None else f"{side.alpha:.3f}"
        if self.shaped or not measured:
            yield "steps\na s", lambda side: f"{side.steps_per_s:.2f}" if self.timed(side) else "–"
        if self.shaped and len(self.seeds) == 1:
            yield "speed\n-up", self._speedup
        yield f"{'time' if self.shaped else 'steps'} to\nsame loss", self._reached

    def _difference(self, side: Side) -> str:
        if side is self.baseline:
            return "–"
        estimate = self.judge(side).estimate
        bounds = f"\n{estimate.lower * 100:+.2f}…{estimate.upper * 100:+.2f}" if len(self.seeds) > 1 else ""
        return f"{estimate.mean * 100:+.2f}{bounds}"

    def _verdict(self, side: Side) -> str:
        if side is self.baseline:
            return "–"
        judged = self.judge(side)
        return f"[{_COLORS[judged.verdict]}]{textwrap.fill(str(judged), _VERDICT_WIDTH)}[/]"

    def _speedup(self, side: Side) -> str:
        return f"{side.runs[0].speedup(self.baseline.runs[0]).median:.1f}x" if self.timed(side) else "–"

    def timed(self, side: Side) -> bool:
        """Whether times of ``side`` can be compared to the others'."""
        return side.on_link or not self.shaped

    def _reached(self, side: Side) -> str:
        if side is self.control or not self.timed(side):
            return "–"
        times = self.to_same_loss(side)
        reached = [time for time in times if time is not None]
        if not reached:
            return "never"
        mean = math.fsum(reached) / len(reached)
        text = f"{mean:.1f} s" if self.shaped else f"{mean:.0f}"
        return text if len(reached) == len(times) else f"{text}\n{len(reached)} of {len(times)} seeds"

    def picture(self, path: Path, title: str, x: str = "seconds of training", y: str = "held-out loss") -> None:
        """Draw losses by time, as SVG: a color for each variant, a line for each seed. Raises ``ImportError`` without
        matplotlib."""
        figure, (axes,) = plots.canvas(1, titles=[title], x=x, y=y)
        for at, side in enumerate(side for side in self.sides() if self.timed(side)):
            for seed, run in enumerate(side.runs):
                style = "--" if side is self.control else "-"
                label = (side.title or side.name) if seed == 0 else None
                axes.plot(*self.curve(run), f"C{at}", linestyle=style, linewidth=1.5, label=label)
        plots.save(figure, path)

    def curve(self, run: Run) -> tuple[Sequence[float], Sequence[float]]:
        """Return the coordinates of ``run`` in the picture, across and upwards."""
        # The fall of the first turn would leave no room for the differences.
        return run.probe_s[1:], run.losses[1:]

    def remarks(self) -> Iterator[str]:
        """Yield sentences on how to read the table, and on whether it means anything."""
        baseline = self.baseline.title or self.baseline.name
        if len(self.seeds) == 1:
            yield f"Difference: of the last loss to that of {baseline}. One seed decides nothing: --seeds 3 or more."
        else:
            yield (
                f"Difference: of the last loss to the same seed's {baseline}, mean over {len(self.seeds)} seeds, and "
                f"bounds, each of which the true one keeps with {CONFIDENCE:.0%} (paired t-test). Within "
                f"{self.margin:.2%}: yes where the upper bound is, no where even the lower bound is not."
            )
        if any("same loss" in heading for heading, _ in self.columns()):
            yield f"The same loss: at most {self.margin:.2%} above that which {baseline} ends with."
        if any(side.alpha is not None for side in self.sides()):
            yield "Alpha: error of the mean that arrived, as a share of the exact mean, averaged over measured steps."
        if self.control is None:
            yield "[yellow]No control was run: whether this training shows damage at all is not known.[/]"
            return
        judged = self.judge(self.control)
        name, mean = escape(self.control.name), f"{judged.estimate.mean:+.2%}"
        if judged.verdict is Verdict.WITHIN:
            yield (
                f"[bold red]Insensitive: the control, {name}, must fail and is within the margin ({mean}).[/] No "
                "verdict above means anything: train for longer, or give a more damaging control."
            )
        elif judged.verdict is Verdict.UNDECIDED:
            yield (
                f"[yellow]The control, {name}, is {judged}: it is not shown that damage would be seen. Give more "
                "seeds or steps.[/]"
            )
        else:
            yield f"The control, {name}, fails as it must ({mean}): damage is seen here."

    def record(self, results: Results, prefix: str = "") -> None:
        """Add all figures to ``results``; a figure that does not exist (a run diverged) is left out."""
        for side in self.sides():
            name = prefix + ("control/" if side is self.control else "") + side.name
            add = partial(add_known, results, name)
            add("held_out_loss", side.held_out_loss, "", by_seed=_known(side.losses))
            add("learning_rate", side.learning_rate, "")
            add("bytes_per_step", side.bytes_per_step, "B", formula=side.runs[0].formula_bytes)
            add("wire_bytes_per_step", side.wire_bytes_per_step, "B")
            add("alpha", side.alpha, "", by_seed=[_series(run.alpha) for run in side.runs])
            accuracies = [run.accuracy for run in side.runs if run.accuracy is not None]
            add("accuracy", math.fsum(accuracies) / len(accuracies) if accuracies else None, "", by_seed=accuracies)
            adapted = {"plans": [run.plans for run in side.runs], "adapt_s": [run.adapt_s for run in side.runs]}
            add("plan_gain", side.plan_gain, "x", **adapted)
            if self.timed(side):
                add("steps_per_s", side.steps_per_s, "1/s", by_seed=[run.steps_per_s for run in side.runs])
            if side is not self.control:
                times = self.to_same_loss(side)
                mean = None if None in times else math.fsum(time for time in times if time is not None) / len(times)
                label, unit = ("seconds_to_same_loss", "s") if self.shaped else ("steps_to_same_loss", "steps")
                add(label, mean, unit, by_seed=times)
            for seed, run in zip(self.seeds, side.runs, strict=True):
                curve = {"steps": [0, *run.probe_steps], "losses": _known(run.losses)}
                add(f"probe_loss/seed{seed}", run.losses[-1], "", **curve)
            if side is not self.baseline:
                self._record_judgment(side, add)

    def _record_judgment(self, side: Side, add: Callable[..., None]) -> None:
        judged = self.judge(side)
        estimate = judged.estimate
        facts = {
            "verdict": str(judged.verdict),
            "margin": self.margin,
            "seeds_needed": judged.seeds_needed,
            "by_seed": _known(judged.differences),
        }
        for label, value in (("mean", estimate.mean), ("lower", estimate.lower), ("upper", estimate.upper)):
            add(f"difference/{label}", value, "", **facts)
        add("within", float(judged.verdict is Verdict.WITHIN), "", **facts)


def add_known(results: Results, name: str, label: str, value: float | None, unit: str, **more: Any) -> None:
    """Add a figure of the variant ``name``, where it exists."""
    if value is not None and math.isfinite(value):
        results.add(f"{label}/{name}", value, unit, **more)


def _series(alpha: Sequence[tuple[int, float]]) -> dict[str, list[Any]]:
    return {"steps": [step for step, _ in alpha], "alpha": _known([value for _, value in alpha])}


def _known(values: Sequence[float]) -> list[float | None]:
    """Return ``values`` as JSON can represent them: None for those that are not finite."""
    return [value if math.isfinite(value) else None for value in values]
