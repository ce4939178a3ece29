"""The results of the demo: figures, checks with their verdicts, a table, a picture."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.table import Table

from thinwire_tools.compare.statistics import median_interval
from thinwire_tools.compare.train import VARIANTS, Task
from thinwire_tools.results import Results

SAME_LOSS = 1.01
"""Two runs have "the same loss" where one is at most this many times the other."""

_FIRST_STEPS = 5
_MEGABYTE = 1e6
_COLOURS = {
    "thinwire": "#0a7d4f",
    "powersgd": "#8250c4",
    "low-rank": "#2a6fdb",
    "bf16": "#d98a00",
    "fp32": "#c0392b",
    "local": "#00a3a3",
    "muloco": "#1b4fa0",
    "alone": "#555555",
    "control": "#b0b0b0",
}


@dataclass
class Run:
    """One variant's figures. ``failure`` says why there are none."""

    name: str
    failure: str | None = None
    step_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    """Held-out loss on the probe at the start and after each of the task's ``probe_steps``."""
    probe_steps: list[int] = field(default_factory=list)
    payload_bytes: list[float] = field(default_factory=list)
    """Sent by rank 0 until each probe, as the losses."""
    formula_bytes: float | None = None
    wire_bytes: int | None = None
    """Sent by rank 0 over its interface in all steps, headers included."""
    val_loss: float = 0.0
    replicas_identical: bool = False
    alpha: list[tuple[int, float]] = field(default_factory=list)
    """(step, relative error of the mean that arrived), where that was measured (`thinwire.Stats.alpha`)."""
    accuracy: float | None = None
    """Share of right answers on the held-out set, of tasks that count them."""
    plans: list[dict[str, Any]] = field(default_factory=list)
    """What a policy decided, in the order of steps; see `thinwire_tools.compare.compare_rank.decided`."""
    adapt_s: float = 0.0
    """Seconds of the training thread that the policy took: summing gradients and changing plans."""

    @property
    def steps_per_s(self) -> float:
        """Of the median step, without the first ones, in which DDP arranges its buckets."""
        return 1 / median(self.step_s[min(_FIRST_STEPS, len(self.step_s) // 2) :])

    @property
    def turns_s(self) -> list[float]:
        """Seconds of the median step between each probe and the next."""
        return [median(self.step_s[start:end]) for start, end in pairwise([0, *self.probe_steps])]

    @property
    def probe_s(self) -> list[float]:
        """Seconds of training until each probe, first steps included."""
        return [sum(self.step_s[:step]) for step in [0, *self.probe_steps]]

    def seconds_to(self, loss: float) -> float | None:
        """Seconds of training until the probe's loss first reaches ``loss``, between probes by a straight line."""
        if self.losses[0] <= loss:
            return 0.0
        points = list(zip(self.probe_s, self.losses, strict=True))
        for (before_s, before), (after_s, after) in pairwise(points):
            if after <= loss:
                return before_s + (before - loss) / (before - after) * (after_s - before_s)
        return None

    def payload_is_formula(self) -> bool:
        """Whether every step after the first ones sent as many bytes as the formula gives.

        The first are left out: DDP's buckets, and with them the messages' headers, change after one step.
        """
        settled = self.payload_bytes[-1] - self.payload_bytes[1]
        return settled == (self.probe_steps[-1] - self.probe_steps[0]) * (self.formula_bytes or 0.0)


class Outcome(StrEnum):
    """The verdict of a check."""

    SHOWN = "shown"
    NOT_SHOWN = "not shown on this machine now"
    """A speed or an interface's counter did not reach its limit: other work on the machine may be why."""
    WRONG = "wrong"
    """A result that no other work on the machine can explain."""
    NOT_JUDGED = "not judged"
    """Not measured, or the limit is not meant for this task or link."""


@dataclass(frozen=True)
class Check:
    """One thing that the demo is to show."""

    text: str
    value: str
    outcome: Outcome


@dataclass(frozen=True)
class Ratio:
    """How many times as fast one variant is as another: the median of the turns' ratios and its 95 % interval."""

    median: float
    lower: float
    upper: float

    def __str__(self) -> str:
        return f"{self.median:.2f}x ({self.lower:.2f} to {self.upper:.2f})"


class Report:
    """All runs of one demo. ``judged``: the link and the task are those that the limits are meant for."""

    def __init__(self, runs: list[Run], task: Task, *, judged: bool, on_interface: bool) -> None:
        self.runs = {run.name: run for run in runs if run.failure is None}
        self.failures = [run for run in runs if run.failure is not None]
        self.task = task
        self.judged = judged
        self.on_interface = on_interface

    @property
    def target(self) -> float | None:
        """The loss to reach, `SAME_LOSS` times fp32's last."""
        return self.runs["fp32"].losses[-1] * SAME_LOSS if "fp32" in self.runs else None

    def timed(self, name: str) -> bool:
        """Whether the variant's times are those of the slow link."""
        return self.on_interface and VARIANTS[name].on_link

    def seconds_to_target(self, run: Run) -> float | None:
        """Seconds of training until ``run`` reaches the target; None if it does not, or if time means nothing here."""
        return run.seconds_to(self.target) if self.timed(run.name) and self.target is not None else None

    def speedup(self, name: str, over: str) -> Ratio | None:
        """Speed of ``name`` over that of ``over``, from the ratios of each turn's median steps."""
        if name not in self.runs or over not in self.runs or not (self.timed(name) and self.timed(over)):
            return None
        ratios = [b / a for a, b in zip(self.runs[name].turns_s, self.runs[over].turns_s, strict=True)]
        return Ratio(median(ratios), *median_interval(ratios))

    def excess(self, name: str, over: str = "fp32") -> float | None:
        """Held-out loss above that of ``over``, as a share of it; negative where it is below."""
        if name not in self.runs or over not in self.runs:
            return None
        return self.runs[name].val_loss / self.runs[over].val_loss - 1

    @property
    def formula_ratio(self) -> float | None:
        """Payload of a thinwire step over that of an fp32 step, both by formula."""
        if "thinwire" not in self.runs or "fp32" not in self.runs:
            return None
        formula = self.runs["thinwire"].formula_bytes
        return formula * self.task.steps / self.runs["fp32"].payload_bytes[-1] if formula else None

    @property
    def interface_ratio(self) -> float | None:
        """The same as counted on the interface, headers and acknowledgements included."""
        if "thinwire" not in self.runs or "fp32" not in self.runs:
            return None
        ours, dense = self.runs["thinwire"].wire_bytes, self.runs["fp32"].wire_bytes
        return ours / dense if ours and dense else None

    def worse_than_alone(self) -> list[Run]:
        """Variants that end at a higher loss than ranks that send nothing at all."""
        if "alone" not in self.runs:
            return []
        return [run for run in self.ordered() if run.name != "alone" and run.val_loss > self.runs["alone"].val_loss]

    def checks(self) -> list[Check]:
        """What the demo is to show. Only bytes, replicas and losses can be wrong."""
        control, alone = self.excess("control"), self.excess("alone")
        synchronised = [run for run in self.runs.values() if VARIANTS[run.name].synchronised]
        return [
            self._loss("thinwire's held-out loss is at most 1 % above fp32's", self.excess("thinwire"), 0.01),
            self._loss("... and below that of training alone", self.excess("thinwire", "alone"), 0.0),
            self._loss(
                "a control that must fail, 1 bit without error feedback, ends at least 3 % above fp32",
                control,
                0.03,
                above=True,
            ),
            self._loss("... and so does training alone, at least 0.5 % above", alone, 0.005, above=True),
            self._loss(
                "thinwire's PowerSGD ends at most 1 % above PyTorch's", self.excess("low-rank", "powersgd"), 0.01
            ),
            self._loss("local updates end at most 1 % above fp32", self.excess("local"), 0.01),
            self._loss("... and with Muon, at most 4 % above Muon's own fp32", self.excess("muloco", "muon"), 0.04),
            self._exact(
                "every message of thinwire has the size of its format's formula",
                self.runs["thinwire"].payload_is_formula() if "thinwire" in self.runs else None,
            ),
            self._exact(
                "ranks end with the same parameters, bit for bit",
                all(run.replicas_identical for run in synchronised) if synchronised else None,
            ),
            self._interface(),
            self._speed("thinwire makes at least 3x the steps/s of DDP with fp32 gradients", "thinwire", "fp32", 3),
            self._speed("... and at least 1.5x those with bf16 gradients", "thinwire", "bf16", 1.5),
            self._speed("thinwire's PowerSGD makes 0.8x the steps/s of PyTorch's or more", "low-rank", "powersgd", 0.8),
        ]

    def _loss(self, text: str, excess: float | None, limit: float, *, above: bool = False) -> Check:
        if excess is None:
            return Check(text, "not measured", Outcome.NOT_JUDGED)
        right = excess >= limit if above else excess <= limit
        outcome = (Outcome.SHOWN if right else Outcome.WRONG) if self.judged else Outcome.NOT_JUDGED
        return Check(text, f"{excess:+.2%}", outcome)

    def _exact(self, text: str, holds: bool | None) -> Check:
        if holds is None:
            return Check(text, "not measured", Outcome.NOT_JUDGED)
        return Check(text, "yes" if holds else "no", Outcome.SHOWN if holds else Outcome.WRONG)

    def _interface(self) -> Check:
        text = "bytes on the interface, over fp32's, are within 3 % of the formula"
        formula, counted = self.formula_ratio, self.interface_ratio
        if formula is None or counted is None:
            return Check(text, "not measured", Outcome.NOT_JUDGED)
        shown = f"1/{1 / counted:.2f}, formula 1/{1 / formula:.2f}"
        return Check(text, shown, self._informative(abs(counted / formula - 1) <= 0.03))

    def _speed(self, text: str, name: str, over: str, limit: float) -> Check:
        ratio = self.speedup(name, over)
        if ratio is None:
            return Check(text, "not measured", Outcome.NOT_JUDGED)
        return Check(text, str(ratio), self._informative(ratio.lower >= limit))

    def _informative(self, shown: bool) -> Outcome:
        if not self.judged:
            return Outcome.NOT_JUDGED
        return Outcome.SHOWN if shown else Outcome.NOT_SHOWN

    def ordered(self) -> list[Run]:
        """By time to the same loss; then those that do not reach it, by their loss."""

        def place(run: Run) -> tuple[bool, float]:
            seconds = self.seconds_to_target(run)
            return seconds is None, run.val_loss if seconds is None else seconds

        return sorted(self.runs.values(), key=place)

    def table(self) -> Table:
        """A row for each variant, in 80 columns."""
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("gradients", no_wrap=True, vertical="bottom")
        for heading in ("same loss in", "ms a step", "speed -up", "wire MB", "payload MB", "held-out loss", "vs fp32"):
            first, _, rest = heading.partition(" ")
            table.add_column(f"{first}\n{rest}", justify="right", no_wrap=True)
        for run in self.ordered():
            table.add_row(*self._row(run), style="bold green" if run.name == "thinwire" else "")
        for run in self.failures:
            table.add_row(VARIANTS[run.name].title, "failed", *[""] * 6, style="red")
        return table

    def _row(self, run: Run) -> list[str]:
        seconds, speedup = self.seconds_to_target(run), self.speedup(run.name, "fp32")
        excess = self.excess(run.name)
        reached = "never" if self.timed(run.name) and self.target is not None else "–"
        return [
            VARIANTS[run.name].title,
            reached if seconds is None else f"{seconds:.1f} s",
            f"{1e3 / run.steps_per_s:.0f}" if self.timed(run.name) else "–",
            "–" if speedup is None else f"{speedup.median:.1f}x",
            "–" if run.wire_bytes is None else f"{run.wire_bytes / _MEGABYTE:.1f}",
            f"{run.payload_bytes[-1] / _MEGABYTE:.1f}",
            f"{run.val_loss:.4f}",
            "–" if excess is None or run.name == "fp32" else f"{excess:+.2%}",
        ]

    def results(self, command: str, about: dict[str, Any]) -> Results:
        """All figures, for ``--json``."""
        results = Results(command, about=about)
        for name, run in self.runs.items():
            if self.timed(name):
                steps_s = [round(seconds, 4) for seconds in run.step_s]
                results.add(f"steps_per_s/{name}", run.steps_per_s, "1/s", of="median step", step_s=steps_s)
                results.add(f"train_s/{name}", sum(run.step_s), "s")
            probes = {"steps": [0, *run.probe_steps], "seconds": run.probe_s, "losses": run.losses}
            results.add(f"val_loss/{name}", run.val_loss, "nats/byte", probes=probes)
            if run.wire_bytes is not None:
                results.add(f"wire_bytes/{name}", run.wire_bytes, "B")
            results.add(f"payload_bytes/{name}", run.payload_bytes[-1], "B")
            self._add_known(results, f"seconds_to_same_loss/{name}", self.seconds_to_target(run), "s")
            for over in ("fp32", "bf16", "alone"):
                ratio = self.speedup(name, over)
                if ratio is not None:
                    interval = {"lower": ratio.lower, "upper": ratio.upper}
                    results.add(f"speedup_over_{over}/{name}", ratio.median, "x", **interval)
            self._add_known(results, f"val_loss_above_fp32/{name}", self.excess(name), "")
        self._add_known(results, "same_loss", self.target, "nats/byte")
        self._add_known(results, "formula_ratio", self.formula_ratio, "")
        self._add_known(results, "interface_ratio", self.interface_ratio, "")
        for run in self.failures:
            results.about.setdefault("failures", {})[run.name] = run.failure
        results.about["checks"] = [vars(check) for check in self.checks()]
        return results

    @staticmethod
    def _add_known(results: Results, name: str, value: float | None, unit: str) -> None:
        if value is not None:
            results.add(name, value, unit)

    def picture(self, path: Path, title: str) -> None:
        """Held-out loss against seconds of training, as SVG. Raises ``ImportError`` without matplotlib."""
        import matplotlib
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot()
        drawn = [run for run in self.ordered() if self.timed(run.name)]
        for run in drawn:
            label = f"{VARIANTS[run.name].title} ({1e3 / run.steps_per_s:.0f} ms a step)"
            width = 2.6 if run.name == "thinwire" else 1.6
            axes.plot(run.probe_s, run.losses, color=_COLOURS[run.name], linewidth=width, label=label)
            axes.plot(run.probe_s[-1], run.losses[-1], color=_COLOURS[run.name], marker="o", markersize=4)
        if self.target is not None:
            note = f"{SAME_LOSS:g} x fp32's last loss: the same loss"
            axes.axhline(self.target, color="#888888", linewidth=1, linestyle="--", label=note)
        axes.set(xlabel="seconds of training", ylabel="held-out loss (nats per byte)", title=title)
        axes.set_xlim(left=0)
        # The fall of the first turn would leave no room for the differences.
        axes.set_ylim(top=1.05 * max(run.losses[1] for run in drawn))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        with matplotlib.rc_context({"svg.hashsalt": "thinwire"}):
            figure.savefig(path, format=path.suffix.removeprefix("."), metadata={"Date": None})
