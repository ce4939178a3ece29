"""``thinwire demo``: the same training over a slow link, with gradients exchanged by several methods.

Two ranks train a byte-level GPT on the standard library's own source. All runs are paired: they start from the same
weights and see the same batches at the same learning rates. The variants take turns of some steps each, forwards and
backwards, so that whatever else this machine does slows all of them alike; a paired ratio compares two variants within
one turn.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel

from thinwire_tools import lab
from thinwire_tools.compare.conclude import conclude
from thinwire_tools.compare.data import standard_library
from thinwire_tools.compare.gpt import GPTConfig
from thinwire_tools.compare.rank_processes import RankFailed, RankProcesses
from thinwire_tools.compare.report import Report, Run
from thinwire_tools.compare.scoreboard import Scoreboard
from thinwire_tools.compare.train import CONTROL_RULES, VARIANTS, Task
from thinwire_tools.exits import ends_command
from thinwire_tools.lab.units import format_rate, parse_rates
from thinwire_tools.results import OutputFile

# The first two turns show the most: what users have, and what they would have.
ORDER = ("fp32", "thinwire", "bf16", "powersgd", "low-rank", "local", "muloco", "muon", "alone", "control")
SMOKE = Task(
    model=GPTConfig(context=32, width=64, layers=2, heads=2),
    steps=8,
    batch=2,
    bucket_cap_mb=0.1,
    held_out_windows=64,
    probe_windows=16,
    probe_every=4,
)
_JUDGED_RATE, _JUDGED_RANKS = "100mbit", 2
# Rough, for the predicted duration: on two cores of a 2020s server.
_STEP_S, _START_S, _EVALUATION_S = 0.035, 1.5, 0.7
_RATE_REACHED = 0.93
_SENT_SHARE = {
    "fp32": 1.0,
    "bf16": 0.5,
    "powersgd": 0.12,
    "low-rank": 0.12,
    "thinwire": 0.15,
    "local": 0.01,
    "muloco": 0.01,
    "control": 0.04,
}


def demo(
    *,
    rate: str = "100mbit",
    ranks: int = 2,
    steps: int | None = None,
    smoke: bool = False,
    out: Path = Path("demo"),
    json: OutputFile = None,
    seed: int = 0,
) -> int:
    """Train over a slow link with gradients in fp32, bf16, PowerSGD and thinwire's 4 bits, and by local updates.

    A byte-level GPT learns the Python standard library's own source on ranks that a slow link joins, emulated on this
    machine. All variants start from the same weights, see the same batches, and take turns. Takes a few minutes on
    two cores. Exits with 1 if a result is wrong: bytes that are not the format's, replicas that differ, a loss that is
    worse than its margin, or a control that is not worse. A speed that this busy machine does not show is no error.

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
    """
    console = Console(highlight=False)
    with ends_command(ValueError, RuntimeError):
        task = _task(smoke, steps, seed)
        rates_bps = parse_rates(rate, ranks)
        if ranks < 2:
            raise ValueError("a demo needs at least 2 ranks: with one, nothing is sent")
        standard_library()
    out.mkdir(parents=True, exist_ok=True)
    performance = Demo(console, task, ranks, rate, min(rates_bps), lab.unavailable())
    report = performance.run()
    return conclude(console, report, performance.about, out=out, json=json)


def _task(smoke: bool, steps: int | None, seed: int) -> Task:
    task = replace(SMOKE if smoke else Task(), seed=seed)
    if steps is not None:
        if steps < 2:
            raise ValueError(f"--steps {steps}: at least 2")
        task = replace(task, steps=steps, probe_every=max(1, steps // 10))
    if not 0 <= seed < 2**62:
        raise ValueError(f"--seed {seed}: 0 to 2**62 - 1")
    return task


@dataclass
class Demo:
    """The link, the rank processes of each variant, and the runs so far."""

    console: Console
    task: Task
    ranks: int
    rate: str
    rate_bps: int
    missing: str | None
    """Why no network can be emulated here; None if it can."""
    order: Sequence[str] = ORDER
    """The variants, in the order of the first turn."""
    runs: dict[str, Run] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

    def run(self) -> Report:
        """Train all variants, turn by turn."""
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="thinwire-demo-")))
            self.network = None if self.missing else stack.enter_context(lab.Network(self.ranks, rate=self.rate))
            self._announce()
            titles = {name: VARIANTS[name].title for name in self.order}
            with Scoreboard(self.console, titles, self.task.steps, self._predicted_s()) as self.scoreboard:
                self._train_all(stack, folder)
        judged = (self.rate, self.ranks, self.task) == (_JUDGED_RATE, _JUDGED_RANKS, Task(seed=self.task.seed))
        return Report(list(self.runs.values()), self.task, judged=judged, on_interface=self.network is not None)

    def _train_all(self, stack: ExitStack, folder: Path) -> None:
        # A process each: a variant that brings its processes down leaves the others alone.
        processes: dict[str, RankProcesses] = {}
        for turn, until in enumerate(self.task.probe_steps):
            for name in self.order if turn % 2 == 0 else reversed(self.order):
                if name in self.runs and self.runs[name].failure:
                    continue
                self.scoreboard.begin(name)
                try:
                    if name not in processes:
                        processes[name] = stack.enter_context(self._launch(folder, name))
                        self._begin(processes[name], name)
                    self._turn(processes[name], name, until)
                    if until == self.task.steps:
                        self._finish(processes[name], name)
                except RankFailed as failure:
                    self._fail(name, failure)

    def _launch(self, folder: Path, name: str) -> RankProcesses:
        link: lab.Link = self.network if self.network and VARIANTS[name].on_link else lab.Loopback(self.ranks)
        return RankProcesses(
            link, self.task, self.ranks, folder=folder, name=name, timeout_s=60 + 10 * self._predicted_step_s("fp32")
        )

    def _begin(self, processes: RankProcesses, name: str) -> None:
        if not self.about:
            described = processes.about
            self.about |= {
                "rate": self.rate,
                "ranks": self.ranks,
                "link": self.network.describe() if self.network else f"loopback: {self.missing}",
                "task": asdict(self.task),
                "text": {key: described[key] for key in ("train_bytes", "held_out_bytes", "num_files", "text_digest")},
                "parameters": described["parameters"],
                "control": CONTROL_RULES,
            }
        answers = processes.run({"do": "begin", "name": name}, _ignore, _ignore)
        probe = self._mean_loss([answer["probe"] for answer in answers], self.task.probe_windows)
        self.runs[name] = Run(name, losses=[probe], payload_bytes=[0.0])

    def _turn(self, processes: RankProcesses, name: str, until: int) -> None:
        run, counters = self.runs[name], []

        def count(at: str) -> None:
            if self.network is not None and VARIANTS[name].on_link:
                counters.append(self.network.interface_bytes(0)[0])

        def show(rank: int, event: dict[str, Any]) -> None:
            if rank == 0 and event["event"] == "step":
                self.scoreboard.advance(name, event["step"])

        answers = processes.run({"do": "train", "until": until}, show, count)
        run.step_s += answers[0]["step_s"]
        run.probe_steps.append(until)
        run.payload_bytes.append(answers[0]["payload_bytes"])
        run.losses.append(self._mean_loss([answer["probe"] for answer in answers], self.task.probe_windows))
        if counters:
            run.wire_bytes = (run.wire_bytes or 0) + counters[1] - counters[0]
        self.scoreboard.record(name, median(answers[0]["step_s"]), run.losses[-1])

    def _finish(self, processes: RankProcesses, name: str) -> None:
        answers = processes.run({"do": "finish"}, _ignore, _ignore)
        run = self.runs[name]
        run.val_loss = self._mean_loss([answer["held_out"] for answer in answers], self.task.held_out_windows)
        run.formula_bytes = answers[0]["formula_bytes"]
        run.replicas_identical = len({answer["digest"] for answer in answers}) == 1

    def _fail(self, name: str, failure: RankFailed) -> None:
        self.runs[name] = Run(name, failure=str(failure))
        self.scoreboard.fail(name, str(failure))
        if failure.log:
            self.console.print(failure.log, style="dim", markup=False)

    def _mean_loss(self, sums: list[float], windows: int) -> float:
        """Mean loss of a token, from each rank's sum over its share of ``windows``."""
        return sum(sums) / (windows * self.task.model.context)

    def _predicted_step_s(self, name: str) -> float:
        """Seconds of a step: compute, and the transfer of its bytes, of which compute hides half at best."""
        width, layers = self.task.model.width, self.task.model.layers
        num_bytes = 4 * (12 * width**2 * layers + self.task.model.vocabulary * width)
        ring = 2 * (self.ranks - 1) / self.ranks
        sent_s = 8 * num_bytes * ring * _SENT_SHARE.get(name, 0.0) / (_RATE_REACHED * self.rate_bps)
        compute_s = _STEP_S * num_bytes / 4.85e6
        return compute_s + max(0.0, sent_s - compute_s / 2)

    def _predicted_s(self) -> float:
        """Seconds of the whole demo."""
        scale = self.task.held_out_windows / Task().held_out_windows
        evaluations = 1 + len(self.task.probe_steps) * self.task.probe_windows / self.task.held_out_windows
        steps_s = self.task.steps * sum(self._predicted_step_s(name) for name in self.order)
        return steps_s + len(self.order) * (_START_S + scale * evaluations * _EVALUATION_S)

    def _announce(self) -> None:
        minutes = self._predicted_s() / 60
        duration = f"about {minutes:.0f} minutes" if minutes >= 1.5 else "about a minute"
        if self.network is None:
            where = f"[yellow]No slow network can be made here: {escape(self.missing or '')}\n"
            where += "The ranks talk over loopback, so the comparison is about bytes and loss only, not about time.[/]"
        else:
            where = "Link: " + escape(lab.link_text(self.network.describe()))
        slow = "" if self.network is None else f" over {format_rate(self.rate_bps)}"
        self.console.print(
            Panel(
                f"{self.ranks} ranks train a byte-level GPT on Python's standard library{slow}.\n"
                f"It compares {len(self.order)} methods: same start, same batches, {self.task.steps} steps.\n"
                f"This takes {duration} on an idle machine. Ctrl-C leaves nothing behind.\n{where}",
                title="[bold]thinwire demo[/]",
                expand=False,
            )
        )


def _ignore(*_: Any) -> None:
    """For events and holds that need no action."""
