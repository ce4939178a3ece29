"""The results of paired runs: differences with their bounds, verdicts, a table, figures."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from thinwire_tools.compare import statistics
from thinwire_tools.compare.report import Run
from thinwire_tools.compare.statistics import CONFIDENCE, Estimate, Verdict
from thinwire_tools.compare.variants import ALONE
from thinwire_tools.results import Results

BASELINE = "fp32"
"""What variants are compared to: DDP with uncompressed gradients."""

_COLOURS = {Verdict.WITHIN: "green", Verdict.BEYOND: "red", Verdict.UNDECIDED: "yellow"}
_VERDICT_WIDTH = 12


@dataclass(frozen=True)
class Side:
    """All runs of one variant (or the baseline), one for each seed, at one learning rate."""

    name: str
    learning_rate: float
    runs: tuple[Run, ...]

    @property
    def losses(self) -> list[float]:
        """Held-out loss at the end, by seed."""
        return [run.val_loss for run in self.runs]

    @property
    def held_out_loss(self) -> float:
        return math.fsum(self.losses) / len(self.runs)

    @property
    def bytes_per_step(self) -> float:
        """Payload that rank 0 sends in a step."""
        return self._mean([run.payload_bytes[-1] / run.probe_steps[-1] for run in self.runs])

    @property
    def wire_bytes_per_step(self) -> float | None:
        """The same as counted on its interface, with headers; None over loopback."""
        counted = [run.wire_bytes / run.probe_steps[-1] for run in self.runs if run.wire_bytes is not None]
        return self._mean(counted) if counted else None

    @property
    def alpha(self) -> float | None:
        """Mean relative error of the averaged gradient over the steps that were measured; None where none was."""
        alphas = [alpha for run in self.runs for _, alpha in run.alpha]
        return self._mean(alphas) if alphas else None

    @property
    def plan_gain(self) -> float | None:
        """How many times fewer bytes the plans that a policy chose send than those that the rules name, in the mean
        over its decisions; None without a policy."""
        gains = [plan["reference_wire_bytes"] / plan["wire_bytes"] for run in self.runs for plan in run.plans]
        return self._mean(gains) if gains else None

    @property
    def steps_per_s(self) -> float:
        return self._mean([run.steps_per_s for run in self.runs])

    @staticmethod
    def _mean(values: Sequence[float]) -> float:
        return math.fsum(values) / len(values)


@dataclass(frozen=True)
class Judgement:
    """A variant's relative differences to the baseline, by seed, and what follows from them."""

    differences: list[float]
    estimate: Estimate
    verdict: Verdict
    seeds_needed: int | None
    """About how many seeds would decide, where these do not; None if that cannot be estimated."""

    def __str__(self) -> str:
        if self.verdict is not Verdict.UNDECIDED:
            return str(self.verdict)
        if self.estimate.num_pairs == 1:
            return "undecided (needs at least 2 seeds)"
        needed = "over 1000" if self.seeds_needed is None else f"about {self.seeds_needed}"
        return f"undecided (needs {needed} seeds)"


@dataclass(frozen=True)
class Comparison:
    """Variants beside the baseline. ``margin``: a loss higher by that share is still the same (0.01 for 1 %).

    ``shaped``: the runs went over a shaped link, so that seconds mean something. ``each_tuned``: the same with the
    learning rate of every variant tuned, where that was asked for.
    """

    seeds: tuple[int, ...]
    margin: float
    shaped: bool
    baseline: Side
    variants: tuple[Side, ...]
    control: Side | None
    about: dict[str, Any]
    """The task, the ranks, the link; and what was tried where learning rates were tuned."""
    each_tuned: Comparison | None = None

    def judge(self, side: Side) -> Judgement:
        """How ``side`` compares to the baseline. Raises ``ValueError`` if the baseline diverged."""
        differences = statistics.relative_differences(side.losses, self.baseline.losses)
        estimate = statistics.estimate(differences)
        verdict = statistics.judge(estimate, self.margin)
        needed = statistics.seeds_needed(estimate, self.margin) if verdict is Verdict.UNDECIDED else None
        return Judgement(differences, estimate, verdict, needed)

    @property
    def control_verdict(self) -> Verdict | None:
        return self.judge(self.control).verdict if self.control else None

    @property
    def sensitive(self) -> bool:
        """False where the control, which must fail, is within the margin: then "within" means nothing here."""
        here = self.control_verdict is not Verdict.WITHIN
        return here and (self.each_tuned is None or self.each_tuned.sensitive)

    @property
    def all_within(self) -> bool:
        """Whether every variant that communicates is within the margin, in a comparison that is sensitive."""
        judged = [side for side in self.variants if side.name != ALONE]
        return self.sensitive and all(self.judge(side).verdict is Verdict.WITHIN for side in judged)

    def to_same_loss(self, side: Side) -> list[float | None]:
        """Seconds of training (steps, where the link is not shaped) until the same loss, by seed; None for never.

        The same loss is at most the margin above that which the seed's baseline ends with; both losses are those of the
        held-out probe, each averaged with the two before it, and between probes on a straight line.
        """
        seconds = []
        for run, baseline in zip(side.runs, self.baseline.runs, strict=True):
            target = statistics.smoothed(baseline.losses)[-1] * (1 + self.margin)
            clock = run.step_s if self.shaped else [1.0] * len(run.step_s)
            seconds.append(replace(run, step_s=clock, losses=statistics.smoothed(run.losses)).seconds_to(target))
        return seconds

    def sides(self) -> Iterator[Side]:
        """Baseline, variants, control."""
        yield self.baseline
        yield from self.variants
        if self.control:
            yield self.control

    def table(self, title: str | None = None) -> Table:
        table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0), show_edge=False)
        table.add_column("variant", overflow="fold", min_width=17)
        numbers = [
            "held-out\nloss",
            "difference\n%",
            "kB a\nstep",
            # Over loopback speed means little: alpha takes its place.
            *(["alpha"] if self._measured else []),
            *(["steps\na s"] if self.shaped or not self._measured else []),
            f"{'time' if self.shaped else 'steps'} to\nsame loss",
        ]
        for number in numbers:
            table.add_column(number, justify="right", no_wrap=True)
        table.add_column(f"within\n{self.margin * 100:g} %?", no_wrap=True)
        for side in self.sides():
            table.add_row(*self._row(side))
        return table

    def _row(self, side: Side) -> list[str]:
        difference, verdict = "–", "–"
        if side is not self.baseline:
            judged = self.judge(side)
            estimate = judged.estimate
            difference = f"{estimate.mean * 100:+.2f}\n{estimate.lower * 100:+.2f}…{estimate.upper * 100:+.2f}"
            verdict = f"[{_COLOURS[judged.verdict]}]{textwrap.fill(str(judged), _VERDICT_WIDTH)}[/]"
        speed = f"{side.steps_per_s:.2f}" if self._timed(side) else "–"
        return [
            escape(side.name) + (" (control)" if side is self.control else ""),
            f"{side.held_out_loss:.4f}",
            escape(difference),
            f"{side.bytes_per_step / 1e3:.1f}",
            *(["–" if side.alpha is None else f"{side.alpha:.3f}"] if self._measured else []),
            *([speed] if self.shaped or not self._measured else []),
            self._reached(side),
            verdict,
        ]

    @property
    def _measured(self) -> bool:
        return any(side.alpha is not None for side in self.sides())

    def _timed(self, side: Side) -> bool:
        # The control runs on an unshaped link: it is there for its loss.
        return not (self.shaped and side is self.control)

    def _reached(self, side: Side) -> str:
        if side is self.control:
            return "–"
        times = self.to_same_loss(side)
        reached = [time for time in times if time is not None]
        if not reached:
            return "never"
        mean = math.fsum(reached) / len(reached)
        text = f"{mean:.1f} s" if self.shaped else f"{mean:.0f}"
        return text if len(reached) == len(times) else f"{text}\n{len(reached)} of {len(times)} seeds"

    def remarks(self) -> Iterator[str]:
        """How to read the table, and whether it means anything."""
        yield (
            f"Difference of held-out loss to the same seed's {BASELINE}: mean over {len(self.seeds)} seeds, "
            f"and bounds, each of which the true one keeps with {CONFIDENCE:.0%} (paired t-test)."
        )
        yield (
            f"Within {self.margin:.2%}: yes where the upper bound is, no where even the lower bound is not. "
            f"The same loss: at most {self.margin:.2%} above that which {BASELINE} ends with."
        )
        if self._measured:
            yield "Alpha: error of the mean that arrived, as a share of the exact mean, averaged over measured steps."
        if self.control is None:
            yield "[yellow]No control was run: whether this training shows damage at all is not known.[/]"
            return
        judged = self.judge(self.control)
        name, mean = escape(self.control.name), f"{judged.estimate.mean:+.2%}"
        if judged.verdict is Verdict.WITHIN:
            yield (
                f"[bold red]Insensitive: the control, {name}, must fail and is within the margin ({mean}).[/] No "
                "verdict above means anything: train for longer, at another size, or give a more damaging control."
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
            add = _Adder(results, name)
            add("held_out_loss", side.held_out_loss, "", by_seed=_known(side.losses))
            add("learning_rate", side.learning_rate, "")
            add("bytes_per_step", side.bytes_per_step, "B", formula=side.runs[0].formula_bytes)
            add("wire_bytes_per_step", side.wire_bytes_per_step, "B")
            add("alpha", side.alpha, "", by_seed=[_series(run.alpha) for run in side.runs])
            accuracies = [run.accuracy for run in side.runs if run.accuracy is not None]
            add("accuracy", math.fsum(accuracies) / len(accuracies) if accuracies else None, "", by_seed=accuracies)
            adapted = {"plans": [run.plans for run in side.runs], "adapt_s": [run.adapt_s for run in side.runs]}
            add("plan_gain", side.plan_gain, "x", **adapted)
            if self._timed(side):
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
                self._record_judgement(side, add)
        if self.each_tuned:
            self.each_tuned.record(results, f"each_tuned/{prefix}")

    def _record_judgement(self, side: Side, add: _Adder) -> None:
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


class _Adder:
    """Adds figures of one variant, where they exist, under its name."""

    def __init__(self, results: Results, name: str) -> None:
        self._results, self._name = results, name

    def __call__(self, label: str, value: float | None, unit: str, **more: Any) -> None:
        if value is not None and math.isfinite(value):
            self._results.add(f"{label}/{self._name}", value, unit, **more)


def _series(alpha: Sequence[tuple[int, float]]) -> dict[str, list[Any]]:
    return {"steps": [step for step, _ in alpha], "alpha": _known([value for _, value in alpha])}


def _known(values: Sequence[float]) -> list[float | None]:
    """``values`` as JSON can hold them: None for what is not finite."""
    return [value if math.isfinite(value) else None for value in values]
