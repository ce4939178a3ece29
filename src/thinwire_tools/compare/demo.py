"""The command ``thinwire demo``: a comparison of methods over a slow link, from one seed, and its checks.

Two ranks train a byte-level GPT on the standard library's own source. The methods take turns of some steps each,
forwards and backwards, so that whatever else this machine does slows all of them alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from typing import Any, Self

from rich.console import Console
from rich.markup import escape

from thinwire_tools.compare.compare import Bar, show, write_figures
from thinwire_tools.compare.comparison import Comparison, Ratio, Run, Side, add_known
from thinwire_tools.compare.gpt import GPTConfig
from thinwire_tools.compare.tasks import GPTTask
from thinwire_tools.compare.variants import ALONE, BASELINE, CONTROL_RULES, LOCAL_EVERY, VARIANTS
from thinwire_tools.lab.units import format_rate, parse_rate
from thinwire_tools.results import Results

TASK = GPTTask(
    model=GPTConfig(width=128),
    steps=80,
    batch=4,
    learning_rate=3e-3,
    held_out_windows=256,
    probe_windows=32,
    probe_every=8,
)
SMOKE = replace(
    TASK,
    model=GPTConfig(context=32, width=64, layers=2, heads=2),
    steps=8,
    batch=2,
    bucket_cap_mb=0.1,
    held_out_windows=64,
    probe_windows=16,
    probe_every=4,
)
MARGIN = 0.01
JUDGED = ("100mbit", 2, TASK)
"""Rate, number of ranks and task that the limits are meant for."""

# Checks of losses: a method's excess of held-out loss over another's, and how large it may be or must be.
_LOSSES = (
    ("thinwire's held-out loss is at most 1 % above fp32's", "thinwire", BASELINE, 0.01, False),
    ("... and below that of training alone", "thinwire", ALONE, 0.0, False),
    (
        "a control that must fail, 1 bit without error feedback, ends at least 3 % above fp32",
        "control",
        BASELINE,
        0.03,
        True,
    ),
    ("... and so does training alone, at least 0.5 % above", ALONE, BASELINE, 0.005, True),
    ("thinwire's PowerSGD ends at most 1 % above PyTorch's", "low-rank", "powersgd", 0.01, False),
    ("local updates end at most 1 % above fp32", "local", BASELINE, 0.01, False),
    ("... and with Muon, at most 4 % above Muon's own fp32", "muloco", "muon", 0.04, False),
)
_SPEEDS = (
    ("thinwire makes at least 3x the steps/s of DDP with fp32 gradients", "thinwire", BASELINE, 3.0),
    ("... and at least 1.5x those with bf16 gradients", "thinwire", "bf16", 1.5),
    ("thinwire's PowerSGD makes 0.8x the steps/s of PyTorch's or more", "low-rank", "powersgd", 0.8),
)


def demo_task(smoke: bool, steps: int | None, seed: int) -> GPTTask:
    task = SMOKE if smoke else TASK
    if steps is not None:
        if steps < 2:
            raise ValueError(f"--steps {steps}: at least 2")
        task = replace(task, steps=steps, probe_every=max(1, steps // 10))
    if not 0 <= seed < 2**62:
        raise ValueError(f"--seed {seed}: 0 to 2**62 - 1")
    return task


class Turns(Bar):
    """Progress of methods that take turns: a line for each after its first turn and its last."""

    def turn(self, run: Run) -> None:
        steps = run.probe_steps[-1]
        if len(run.probe_steps) == 1 or steps == self.steps:
            ms, loss = 1e3 * median(run.step_s), run.losses[-1]
            self.say(f"{self.title}: {steps} steps, {ms:.0f} ms a step, held-out loss {loss:.3f}")

    def end(self, run: Run) -> None:
        """Do nothing: the run's last turn was shown already."""


class Outcome(StrEnum):
    """The verdict of a check."""

    SHOWN = "shown"
    NOT_SHOWN = "not shown"
    """Verdict where a speed or an interface's counter did not reach its limit: other work on the machine may be why."""
    WRONG = "wrong"
    """Verdict of a result that no other work on the machine can explain."""


_YES = {True: "yes", False: "no"}
_STYLES = {Outcome.SHOWN: "green", Outcome.NOT_SHOWN: "yellow", Outcome.WRONG: "bold red"}


@dataclass(frozen=True)
class Check:
    """One thing that the demo shows, or not; ``otherwise`` is the outcome where it does not."""

    text: str
    value: str
    outcome: Outcome

    @classmethod
    def of(cls, text: str, value: str, right: bool, otherwise: Outcome = Outcome.WRONG) -> Self:
        return cls(text, value, Outcome.SHOWN if right else otherwise)


@dataclass(frozen=True)
class Demonstration(Comparison):
    """The runs of a demo. ``judged``: the link and the task are those that the limits are meant for."""

    judged: bool = False

    @classmethod
    def of(cls, runs: Mapping[str, Run], about: dict[str, Any], *, judged: bool, shaped: bool) -> Self:
        """Return the runs compared to fp32's, soonest at the same loss first."""
        sides = {
            name: Side(name, TASK.learning_rate, (run,), VARIANTS[name].title, VARIANTS[name].on_link)
            for name, run in runs.items()
        }
        baseline, control, seeds = sides.pop(BASELINE), sides.pop("control", None), (about["task"]["seed"],)
        found = cls(seeds, MARGIN, shaped, baseline, tuple(sides.values()), control, about, judged=judged)

        def place(side: Side) -> tuple[bool, float]:
            (taken,) = found.to_same_loss(side) if found.timed(side) else [None]
            return taken is None, side.held_out_loss if taken is None else taken

        return replace(found, variants=tuple(sorted(found.variants, key=place)))

    @cached_property
    def runs(self) -> dict[str, Run]:
        return {side.name: side.runs[0] for side in self.sides()}

    def excess(self, name: str, over: str = BASELINE) -> float | None:
        """Return the held-out loss above that of ``over``, as a share of it; negative where it is below."""
        if name not in self.runs or over not in self.runs:
            return None
        return self.runs[name].val_loss / self.runs[over].val_loss - 1

    def speedup(self, name: str, over: str = BASELINE) -> Ratio | None:
        """Return the speed of ``name`` relative to that of ``over``, where both crossed the slow link."""
        both = (name, over)
        if not (self.shaped and all(each in self.runs and VARIANTS[each].on_link for each in both)):
            return None
        return self.runs[name].speedup(self.runs[over])

    def ratios(self) -> dict[str, float]:
        """Return thinwire's bytes relative to fp32's: by the formats' formulas, and as counted on the interface."""
        ours, dense = self.runs.get("thinwire"), self.runs[BASELINE]
        if ours is None or not ours.formula_bytes:
            return {}
        ratios = {"formula_ratio": ours.formula_bytes * ours.probe_steps[-1] / dense.payload_bytes[-1]}
        if ours.wire_bytes and dense.wire_bytes:
            ratios["interface_ratio"] = ours.wire_bytes / dense.wire_bytes
        return ratios

    def checks(self) -> Iterator[Check]:
        """Yield the checks. Only bytes, replicas and losses can be wrong; limits are for the judged task."""
        for text, name, over, limit, above in _LOSSES:
            excess = self.excess(name, over)
            if self.judged and excess is not None:
                yield Check.of(text, f"{excess:+.2%}", excess >= limit if above else excess <= limit)
        if ours := self.runs.get("thinwire"):
            held = _sent_by_formula(ours)
            yield Check.of("every message of thinwire has the size of its format's formula", _YES[held], held)
        alike = all(run.replicas_identical for name, run in self.runs.items() if VARIANTS[name].synchronized)
        yield Check.of("ranks end with the same parameters, bit for bit", _YES[alike], alike)
        ratios = self.ratios()
        if self.judged and "interface_ratio" in ratios:
            formula, counted = ratios.values()
            text = "bytes on the interface, over fp32's, are within 3 % of the formula"
            value = f"1/{1 / counted:.2f}, formula 1/{1 / formula:.2f}"
            yield Check.of(text, value, abs(counted / formula - 1) <= 0.03, Outcome.NOT_SHOWN)
        for text, name, over, limit in _SPEEDS:
            ratio = self.speedup(name, over)
            if self.judged and ratio is not None:
                yield Check.of(text, str(ratio), ratio.lower >= limit, Outcome.NOT_SHOWN)

    def record(self, results: Results, prefix: str = "") -> None:
        for side in self.sides():
            run, add = side.runs[0], partial(add_known, results, prefix + side.name)
            if self.shaped and self.timed(side):
                step_s = [round(seconds, 4) for seconds in run.step_s]
                add("steps_per_s", run.steps_per_s, "1/s", of="median step", step_s=step_s)
                add("seconds_to_same_loss", self.to_same_loss(side)[0], "s")
            probes = {"steps": [0, *run.probe_steps], "seconds": run.probe_s, "losses": run.losses}
            add("val_loss", run.val_loss, "nats/byte", probes=probes)
            add("wire_bytes", run.wire_bytes, "B")
            add("payload_bytes", run.payload_bytes[-1], "B")
            add("val_loss_above_fp32", self.excess(side.name), "")
            for over in (BASELINE, "bf16", ALONE):
                if ratio := self.speedup(side.name, over):
                    add(f"speedup_over_{over}", ratio.median, "x", lower=ratio.lower, upper=ratio.upper)
        for label, ratio in self.ratios().items():
            results.add(label, ratio, "")

    def remarks(self) -> Iterator[str]:
        for name, why in self.about.get("failures", {}).items():
            yield f"[red]{VARIANTS[name].title}: failed: {escape(why)}[/]"
        yield (
            "Held-out loss: nats/byte at the end, on modules that no training step saw; the difference is to fp32's. "
            f"The same loss: at most {self.margin:.0%} above that which fp32 ends with. Speed-up: of a step, in the "
            "median over all turns. Training alone: nothing is sent, which bounds the speed from above, and a method "
            "that ends at a higher loss is worse than that."
        )
        yield (
            "2 bits in AdamW: thinwire.optim.CompressedAdamW at twice the learning rate of AdamW; fp32 in AdamW is its "
            "control."
        )
        yield (
            f"Local, every {LOCAL_EVERY}: ranks train alone for {LOCAL_EVERY} steps, then average what they have "
            "learned, sent in 2 bits (thinwire.local.DiLoCo). With Muon: thinwire.optim.Muon in place of AdamW, at "
            "four times its learning rate; DDP fp32, Muon is its control, which is there for its loss: its link is not "
            "slow."
        )
        yield f"1-bit control: {CONTROL_RULES}, no error feedback. It must be worse, or equal losses mean nothing."
        worse = [side for side in self.variants if (self.excess(side.name, ALONE) or 0.0) > 0]
        if worse:
            yield f"[bold]Worse than sending nothing here: {', '.join(side.title for side in worse)}.[/]"
        over = self.speedup("powersgd", "thinwire")
        if over and over.median > 1:
            yield (
                f"[bold]PowerSGD is faster here[/], {over.median:.2f}x the steps/s of thinwire; its held-out loss is "
                f"{self.excess('powersgd'):+.2%} against fp32's, thinwire's {self.excess('thinwire'):+.2%}."
            )


def _sent_by_formula(run: Run) -> bool:
    """Whether every step after the first turn, in which DDP's buckets change and messages' headers with them, sent as
    many bytes as the formula gives."""
    steps, settled = run.probe_steps[-1] - run.probe_steps[0], run.payload_bytes[-1] - run.payload_bytes[1]
    return settled == steps * (run.formula_bytes or 0.0)


def conclude(console: Console, shown: Demonstration, out: Path, json: Path) -> int:
    """Print the table and the checks, and write the files. Returns the exit code."""
    checks, about = list(shown.checks()), shown.about
    about["checks"] = [asdict(check) for check in checks]
    rates = ", ".join(format_rate(parse_rate(rate)) for rate in about["rate"].split(","))
    show(console, shown)
    console.print()
    for check in checks:
        mark = f"[{_STYLES[check.outcome]}]{check.outcome.value:10}[/]"
        console.print(f"{mark} {check.text}: [bold]{check.value}[/]", soft_wrap=True)
    if not shown.judged:
        console.print("[dim]Losses and speeds are judged where `thinwire demo` has no options.[/]")
    if any(check.outcome is Outcome.NOT_SHOWN for check in checks):
        console.print("[dim]Not shown on this machine now: other work on it makes steps slower. No error.[/]")
    console.print()
    write_figures(console, "thinwire demo", shown, about, json)
    if shown.shaped:
        picture, millions = out / "loss.svg", about["parameters"] / 1e6
        try:
            shown.picture(picture, f"{about['ranks']} ranks, {rates}, {millions:.1f} M parameters")
            console.print(f"Picture: {picture}", soft_wrap=True, markup=False)
        except ImportError as error:
            console.print(f"No picture: {error}", markup=False)
    console.print()
    wrong, failed = sum(check.outcome is Outcome.WRONG for check in checks), len(about.get("failures", {}))
    if wrong or failed:
        line = (
            f"[bold red]This is not the result that it should be[/]: wrong results: {wrong}; variants that did not "
            f"finish: {failed}."
        )
    elif shown.judged and (speedup := shown.speedup("thinwire")):
        line = (
            f"[bold]What this shows:[/] over {rates}, thinwire trains {speedup.median:.1f}x as fast as DDP with fp32 "
            f"gradients and ends at the same loss ({shown.excess('thinwire'):+.2%}), with one line added."
        )
    else:
        line = "[bold]What this shows:[/] the whole path works here."
    console.print(line, soft_wrap=True)
    console.print(
        "[bold]Next:[/] would it help your training? `torchrun --nproc-per-node 2 -m thinwire doctor -- train.py`; in "
        "your own script, after DDP(model): `wire = thinwire.compress(model)` (README).",
        soft_wrap=True,
    )
    return 1 if wrong or failed else 0
