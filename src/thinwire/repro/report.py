"""What the demo found: figures, checks, a table, a picture."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.table import Table

from thinwire.repro.train import VARIANTS, Task
from thinwire.results import Results

SAME_LOSS = 1.01
"""Two runs have "the same loss" where one is at most this many times the other."""

_FIRST_STEPS = 5
_MEGABYTE = 1e6


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
    """What a policy decided, in the order of steps; see `thinwire.repro.compare_rank.decided`."""
    adapt_s: float = 0.0
    """Seconds of the training thread that the policy took: summing gradients and changing plans."""

    @property
    def steps_per_s(self) -> float:
        """Of the median step, without the first ones, in which DDP arranges its buckets."""
        return 1 / median(self.step_s[min(_FIRST_STEPS, len(self.step_s) // 2) :])

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
        """Whether every step after the first ones sent what the formula says, to the byte.

        The first are left out: DDP's buckets, and with them the messages' headers, change after one step.
        """
        settled = self.payload_bytes[-1] - self.payload_bytes[1]
        return settled == (self.probe_steps[-1] - self.probe_steps[0]) * (self.formula_bytes or 0.0)


@dataclass(frozen=True)
class Check:
    """One thing the demo must show; ``passed`` is None where it cannot be judged."""

    text: str
    found: str
    passed: bool | None


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
        """The loss to reach: fp32's own at its end, and `SAME_LOSS` times that is the same."""
        return self.runs["fp32"].losses[-1] * SAME_LOSS if "fp32" in self.runs else None

    def seconds_to_target(self, run: Run) -> float | None:
        comparable = self.on_interface and VARIANTS[run.name].exact and VARIANTS[run.name].shaped
        return run.seconds_to(self.target) if comparable and self.target is not None else None

    def speedup(self, name: str, over: str) -> float | None:
        if not self.on_interface or name not in self.runs or over not in self.runs:
            return None
        return self.runs[name].steps_per_s / self.runs[over].steps_per_s

    def excess(self, name: str) -> float | None:
        """Held-out loss above fp32's, as a share of it; negative where it is below."""
        if name not in self.runs or "fp32" not in self.runs or not VARIANTS[name].exact:
            return None
        return self.runs[name].val_loss / self.runs["fp32"].val_loss - 1

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

    def checks(self) -> list[Check]:
        return [
            self._at_least("thinwire makes at least 5x the steps/s of DDP fp32", self.speedup("thinwire", "fp32"), 5),
            self._at_least("... and at least 3x those of bf16 gradients", self.speedup("thinwire", "bf16"), 3),
            self._loss("thinwire", "its held-out loss is at most 1 % above fp32's", at_most=0.01),
            self._loss("control", "the control's, 1 bit without error feedback, at least 3 % above", at_least=0.03),
            self._ratio(),
            self._yes("every message has the size that the formula says", "thinwire", Run.payload_is_formula),
            self._yes("replicas stay bit-identical", "thinwire", lambda run: run.replicas_identical),
            # One runs after the other, and each starts from random factors of its own: that much is chance.
            self._at_least(
                "thinwire's PowerSGD makes at least 0.9x the steps/s of PyTorch's",
                self.speedup("low-rank", "powersgd"),
                0.9,
            ),
            self._no_worse("... at a loss at most 0.5 % above its", "low-rank", "powersgd", 0.005),
        ]

    def _no_worse(self, text: str, name: str, than: str, margin: float) -> Check:
        mine, theirs = self.excess(name), self.excess(than)
        if mine is None or theirs is None:
            return Check(text, "not measured", None)
        return Check(text, f"{mine:+.2%} against {theirs:+.2%}", mine <= theirs + margin if self.judged else None)

    def _at_least(self, text: str, value: float | None, limit: float) -> Check:
        if value is None:
            return Check(text, "not measured", None)
        return Check(text, f"{value:.2f}x", value >= limit if self.judged else None)

    def _loss(self, name: str, text: str, at_most: float | None = None, at_least: float | None = None) -> Check:
        excess = self.excess(name)
        if excess is None:
            return Check(text, "not measured", None)
        passed = excess <= at_most if at_most is not None else excess >= (at_least or 0.0)
        return Check(text, f"{excess:+.2%}", passed if self.judged else None)

    def _ratio(self) -> Check:
        text = "bytes on the interface, over fp32's, within 2 % of the formula"
        formula, found = self.formula_ratio, self.interface_ratio
        if formula is None or found is None:
            return Check(text, "not measured", None)
        shown = f"1/{1 / found:.2f}, formula 1/{1 / formula:.2f}: {found / formula - 1:+.2%}"
        return Check(text, shown, abs(found / formula - 1) <= 0.02 if self.judged else None)

    def _yes(self, text: str, name: str, question: Any) -> Check:
        if name not in self.runs:
            return Check(text, "not measured", None)
        answer = question(self.runs[name])
        return Check(text, "yes" if answer else "no", answer)

    def ordered(self) -> list[Run]:
        """By time to the same loss; then those that do not reach it or are no result."""

        def place(run: Run) -> tuple[int, float]:
            seconds = self.seconds_to_target(run)
            if seconds is not None:
                return 0, seconds
            variant = VARIANTS[run.name]
            return (1 if variant.exact and variant.shaped else 2 if variant.exact else 3), -run.steps_per_s

        return sorted(self.runs.values(), key=place)

    def table(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("gradients", no_wrap=True, vertical="bottom")
        for name in (
            "same\nloss in",
            "steps\n/s",
            "speed\n-up",
            "ceil-\ning",
            "wire\nMB",
            "payload\nMB",
            "held-\nout",
            "vs\nfp32",
        ):
            table.add_column(name, justify="right", no_wrap=True)
        for run in self.ordered():
            table.add_row(*self._row(run), style="bold green" if run.name == "thinwire" else "")
        for run in self.failures:
            table.add_row(VARIANTS[run.name].title, "failed", *[""] * 7, style="red")
        return table

    def _row(self, run: Run) -> list[str]:
        variant = VARIANTS[run.name]
        timed = self.on_interface and variant.shaped
        seconds, speedup = self.seconds_to_target(run), self.speedup(run.name, "fp32") if timed else None
        ceiling, excess = self.speedup(run.name, "noop") if timed else None, self.excess(run.name)
        reached = "never" if timed and variant.exact and self.target is not None else "–"
        return [
            variant.title + ("" if variant.exact else " ¹") + ("" if variant.shaped else " ²"),
            reached if seconds is None else f"{seconds:.1f} s",
            f"{run.steps_per_s:.2f}" if timed else "–",
            "–" if speedup is None else f"{speedup:.1f}x",
            "–" if ceiling is None else f"{ceiling:.0%}",
            "–" if run.wire_bytes is None else f"{run.wire_bytes / _MEGABYTE:.1f}",
            f"{run.payload_bytes[-1] / _MEGABYTE:.1f}",
            f"{run.val_loss:.4f}" if variant.exact else "–",
            "–" if excess is None else f"{excess:+.2%}",
        ]

    def results(self, command: str, about: dict[str, Any]) -> Results:
        results = Results(command, about=about)
        for name, run in self.runs.items():
            variant = VARIANTS[name]
            if self.on_interface and variant.shaped:
                steps_s = [round(seconds, 4) for seconds in run.step_s]
                results.add(f"steps_per_s/{name}", run.steps_per_s, "1/s", of="median step", step_s=steps_s)
                results.add(f"train_s/{name}", sum(run.step_s), "s")
            if variant.exact:
                probes = {"steps": [0, *run.probe_steps], "seconds": run.probe_s, "losses": run.losses}
                results.add(f"val_loss/{name}", run.val_loss, "nats/byte", probes=probes)
            if run.wire_bytes is not None:
                results.add(f"wire_bytes/{name}", run.wire_bytes, "B")
            results.add(f"payload_bytes/{name}", run.payload_bytes[-1], "B")
            self._add_known(results, f"seconds_to_same_loss/{name}", self.seconds_to_target(run), "s")
            if self.on_interface and variant.shaped:
                self._add_known(results, f"speedup_over_fp32/{name}", self.speedup(name, "fp32"), "x")
                self._add_known(results, f"share_of_ceiling/{name}", self.speedup(name, "noop"), "")
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

        colours = {
            "thinwire": "#0a7d4f",
            "powersgd": "#8250c4",
            "low-rank": "#2a6fdb",
            "bf16": "#d98a00",
            "fp32": "#c0392b",
        }
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot()
        for run in self.ordered():
            if run.name in colours:
                label = f"{VARIANTS[run.name].title} ({run.steps_per_s:.2f} steps/s)"
                line = {"color": colours[run.name], "linewidth": 2.5 if run.name == "thinwire" else 1.6}
                axes.plot(run.probe_s, run.losses, marker="o", markersize=3, label=label, **line)
        if self.target is not None:
            note = f"{SAME_LOSS:g} x fp32's last loss: the same loss"
            axes.axhline(self.target, color="#888888", linewidth=1, linestyle="--", label=note)
        axes.set(xlabel="seconds of training", ylabel="held-out loss (nats per byte)", title=title)
        axes.set_xlim(left=0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        with matplotlib.rc_context({"svg.hashsalt": "thinwire"}):
            figure.savefig(path, format="svg", metadata={"Date": None})
