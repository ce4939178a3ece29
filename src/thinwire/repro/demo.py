"""``thinwire demo``: the same training over a slow wire, with gradients that travel in several ways.

Two ranks train a byte-level GPT on the standard library's own source. Everything is paired: one common start, the same
batches, the same learning rates; only the gradients travel differently.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel

from thinwire import lab
from thinwire.lab.units import format_rate, parse_rates
from thinwire.repro.conclude import conclude
from thinwire.repro.crew import Crew, Loopback, RankFailed
from thinwire.repro.data import standard_library
from thinwire.repro.gpt import GPTConfig
from thinwire.repro.progress import Screen
from thinwire.repro.report import Report, Run
from thinwire.repro.train import CONTROL_RULES, VARIANTS, Task

_ORDER = ("thinwire", "fp32", "bf16", "powersgd", "low-rank", "noop", "control")
_SMOKE = Task(
    model=GPTConfig(context=32, width=64, layers=2, heads=2),
    steps=8,
    batch=2,
    base_steps=6,
    base_batch=2,
    base_ramp_steps=3,
    bucket_cap_mb=0.1,
    held_out_windows=64,
    probe_windows=16,
    probe_every=4,
)
_JUDGED_RATE, _JUDGED_RANKS = "100mbit", 2
# Rough, for the time that is foretold: on two cores of a 2020s server.
_STEP_S, _START_S, _EVALUATION_S = 0.1, 6.0, 5.0
_RATE_REACHED = 0.93
_SENT_SHARE = {"fp32": 1.0, "bf16": 0.5, "powersgd": 0.05, "low-rank": 0.03, "thinwire": 0.14}


def demo(
    *,
    rate: str = "100mbit",
    ranks: int = 2,
    steps: int | None = None,
    smoke: bool = False,
    out: Path = Path("demo"),
    json: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None,
    seed: int = 0,
    strict: bool = False,
) -> int:
    """Train over a slow wire with gradients in fp32, bf16, PowerSGD and thinwire's 4 bits, and compare.

    A byte-level GPT learns the Python standard library's own source on ranks that a slow link joins, emulated on this
    machine. All variants start from one common state and see the same batches. Takes about six minutes on two cores.

    Examples:
      thinwire demo
      thinwire demo --rate 1gbit --ranks 4
      thinwire demo --smoke

    Args:
        rate: of each rank's link, both ways (100mbit, 1gbit ...).
        ranks: number of ranks, each in a network namespace of its own.
        steps: training steps of each variant.
        smoke: a tiny model and few steps, under a minute: the same path, no figures worth keeping.
        out: folder for the picture and the figures.
        json: write the figures to this file instead of OUT/demo.json.
        seed: of the initial weights, the batches and the rounding.
        strict: exit with 1 if a check fails.
    """
    console = Console(highlight=False)
    try:
        task = _task(smoke, steps, seed)
        rates_bps = parse_rates(rate, ranks)
        if ranks < 2:
            raise ValueError("a demo needs at least 2 ranks: with one, nothing is sent")
        standard_library()
    except (ValueError, RuntimeError) as error:
        Console(stderr=True, highlight=False).print(f"thinwire demo: {error}", style="bold red", markup=False)
        return 64
    out.mkdir(parents=True, exist_ok=True)
    missing = lab.unavailable()
    stage = Stage(console, task, ranks, rate, min(rates_bps), missing)
    try:
        report, about = stage.play()
    except RankFailed as failure:
        _tell_failure(console, "The common start", failure)
        return 1
    return conclude(console, report, about, out=out, json=json, strict=strict)


def _task(smoke: bool, steps: int | None, seed: int) -> Task:
    task = replace(_SMOKE if smoke else Task(), seed=seed)
    if steps is not None:
        if steps < 2:
            raise ValueError(f"--steps {steps}: at least 2")
        task = replace(task, steps=steps, probe_every=max(1, steps // 10))
    if not 0 <= seed < 2**62:
        raise ValueError(f"--seed {seed}: 0 to 2**62 - 1")
    return task


@dataclass
class Stage:
    """One performance: the link, the crew of ranks on it, and what they have shown so far."""

    console: Console
    task: Task
    ranks: int
    rate: str
    rate_bps: int
    missing: str | None
    """Why no network can be emulated here; None if it can."""
    runs: list[Run] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)
    _crews: int = 0

    def play(self) -> tuple[Report, dict[str, Any]]:
        """Train the common start and all variants. Raises `RankFailed` if there is no common start."""
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="thinwire-demo-")))
            network = None if self.missing else stack.enter_context(lab.Network(self.ranks))
            self.network, self.link = network, network or stack.enter_context(Loopback())
            self.folder = folder
            self._announce()
            with Screen(self.console, self._phases()) as screen:
                self.screen = screen
                self._train_all(stack)
        judged = (self.rate, self.ranks, self.task) == (
            _JUDGED_RATE,
            _JUDGED_RANKS,
            Task(seed=self.task.seed),
        )
        report = Report(self.runs, self.task, judged=judged, on_interface=network is not None)
        return report, self.about

    def _train_all(self, stack: ExitStack) -> None:
        crew = stack.enter_context(self._crew())
        self._base(crew)
        healthy: Crew | None = crew
        for name in _ORDER:
            variant = VARIANTS[name]
            try:
                self._set_link(variant.shaped)
                if variant.own_processes:
                    with self._crew() as own:
                        self.runs.append(self._variant(own, name))
                    continue
                if healthy is None:
                    healthy = stack.enter_context(self._crew())
                self.runs.append(self._variant(healthy, name))
            except RankFailed as failure:
                if not variant.own_processes and healthy is not None:
                    healthy.close()
                    healthy = None
                self.runs.append(Run(name, failure=str(failure)))
                self.screen.fail(name, str(failure))
                _tell_failure(self.screen.console, variant.title, failure)

    def _set_link(self, shaped: bool) -> None:
        if self.network is None:
            return
        if shaped:
            self.network.shape(self.rate)
            self.about["link"] = self.network.describe()
        else:
            self.network.unshape()

    def _crew(self) -> Crew:
        self._crews += 1
        return Crew(
            self.link,
            self.task,
            self.ranks,
            folder=self.folder,
            name=f"crew{self._crews}",
            timeout_s=60 + 10 * self._predicted_step_s("fp32"),
        )

    def _base(self, crew: Crew) -> None:
        self.about |= {
            "rate": self.rate,
            "ranks": self.ranks,
            "link": f"loopback, since no network can be made: {self.missing}" if self.network is None else None,
            "task": asdict(self.task),
            "text": {key: crew.about[key] for key in ("train_bytes", "held_out_bytes", "num_files", "text_digest")},
            "parameters": crew.about["parameters"],
            "control": CONTROL_RULES,
        }
        with self.screen.phase("start"):
            answers = crew.run({"do": "base"}, self._shower("start"), _nothing)
        loss = self._mean_loss([answer["held_out"] for answer in answers], self.task.held_out_windows)
        self.about["start_loss"] = loss
        self.screen.note("start", f"held-out loss {loss:.3f}")

    def _variant(self, crew: Crew, name: str) -> Run:
        counted: list[int] = []

        def count(at: str) -> None:
            if self.network is not None:
                counted.append(self.network.interface_bytes(0)[0])

        with self.screen.phase(name):
            answers = crew.run({"do": "variant", "name": name}, self._shower(name), count)
        first, windows = answers[0], self.task.probe_windows
        run = Run(
            name,
            step_s=first["step_s"],
            losses=[
                self._mean_loss([answer["probes"][i] for answer in answers], windows)
                for i in range(len(first["probes"]))
            ],
            probe_steps=self.task.probe_steps,
            payload_bytes=first["payload_bytes"],
            formula_bytes=first["formula_bytes"],
            wire_bytes=counted[-1] - counted[0] if counted else None,
            val_loss=self._mean_loss([answer["held_out"] for answer in answers], self.task.held_out_windows),
            replicas_identical=len({answer["digest"] for answer in answers}) == 1,
        )
        loss = f"loss {run.val_loss:.3f}" if VARIANTS[name].exact else "the ceiling"
        self.screen.note(name, f"{run.steps_per_s:.2f} steps/s, {loss}")
        return run

    def _mean_loss(self, sums: list[float], windows: int) -> float:
        """Mean per token from each rank's sum over its share of ``windows``."""
        return sum(sums) / (windows * self.task.model.context)

    def _shower(self, phase: str) -> Callable[[int, dict[str, Any]], None]:
        def show(rank: int, event: dict[str, Any]) -> None:
            if rank == 0 and event["event"] == "step":
                self.screen.advance(phase, event["step"], event["loss"])

        return show

    def _predicted_step_s(self, name: str) -> float:
        """Seconds of a step: compute, and what the link makes of its bytes, which hides behind half of it at best."""
        width, layers = self.task.model.width, self.task.model.layers
        num_bytes = 4 * (12 * width**2 * layers + self.task.model.vocabulary * width)
        ring = 2 * (self.ranks - 1) / self.ranks
        sent_s = 8 * num_bytes * ring * _SENT_SHARE.get(name, 0.0) / (_RATE_REACHED * self.rate_bps)
        compute_s = _STEP_S * num_bytes / 19.2e6
        return compute_s + max(0.0, sent_s - compute_s / 2)

    def _phases(self) -> dict[str, tuple[str, int, float]]:
        """Title, steps and predicted seconds of each phase, in order."""
        scale = self.task.held_out_windows / Task().held_out_windows
        base_s = self.task.base_steps * _STEP_S * self.task.base_batch / 4
        phases = {
            "start": (
                "common start",
                self.task.base_steps,
                _START_S + base_s + scale * _EVALUATION_S,
            )
        }
        for name in _ORDER:
            seconds = self.task.steps * self._predicted_step_s(name) + 2 * scale * _EVALUATION_S
            if VARIANTS[name].own_processes:
                seconds += _START_S
            phases[name] = (VARIANTS[name].title, self.task.steps, seconds)
        return phases

    def _announce(self) -> None:
        minutes = sum(seconds for _, _, seconds in self._phases().values()) / 60
        duration = f"about {minutes:.0f} minutes" if minutes >= 1.5 else "about a minute"
        if self.network is None:
            where = f"[yellow]No slow network can be made here: {escape(self.missing or '')}\n"
            where += "The ranks talk over loopback, so the comparison is about bytes and loss only, not about time.[/]"
        else:
            self._set_link(shaped=True)
            where = "Link: " + escape(lab.link_text(self.network.describe()))
            self._set_link(shaped=False)
        slow = "" if self.network is None else f" over {format_rate(self.rate_bps)}"
        self.console.print(
            Panel(
                f"{self.ranks} ranks train a byte-level GPT on Python's own standard library{slow}.\n"
                f"After {self.task.base_steps} common steps at full speed, each way of sending gradients trains\n"
                f"{self.task.steps} more from there: same batches, same learning rates.\n"
                f"This takes {duration}. Ctrl-C leaves nothing behind.\n{where}",
                title="[bold]thinwire demo[/]",
                expand=False,
            )
        )


def _nothing(*_: Any) -> None:
    """For what need not be told."""


def _tell_failure(console: Console, what: str, failure: RankFailed) -> None:
    console.print(f"{what}: {failure}", style="bold red", markup=False)
    if failure.log:
        console.print(failure.log, style="dim", markup=False)
