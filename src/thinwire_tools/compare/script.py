"""``thinwire compare -- train.py``: the user's own training, as it is and compressed, in paired runs."""

from __future__ import annotations

import json as json_module
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import tyro
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from thinwire_tools import lab, plots
from thinwire_tools.compare import statistics
from thinwire_tools.compare.compare import share_of
from thinwire_tools.compare.comparison import BASELINE
from thinwire_tools.compare.losses import PATTERN, NoLosses, compiled, final, loss_in, read_log
from thinwire_tools.compare.paired import CONTROL
from thinwire_tools.compare.rank_processes import RankFailed
from thinwire_tools.compare.script_rank import Setup
from thinwire_tools.compare.statistics import CONFIDENCE, Verdict
from thinwire_tools.compare.variants import ALONE, Variant
from thinwire_tools.exits import check_script, ends_command, without_python
from thinwire_tools.results import OutputFile, Results

_LOG_LINES, _GRACE_S = 15, 10.0
_COLOURS = {Verdict.WITHIN: "green", Verdict.BEYOND: "red", Verdict.UNDECIDED: "yellow"}
_AS_IT_IS = "as it is"


@dataclass(frozen=True)
class ScriptRun:
    """One training of the script."""

    losses: tuple[float, ...]
    seconds: float
    """From start to end, the start of Python included."""
    sent_bytes: float | None
    """By rank 0 in a step; None for the script as it is."""
    dense_bytes: float | None
    """The same without compression."""

    @property
    def loss(self) -> float:
        return final(list(self.losses))


@dataclass(frozen=True)
class Source:
    """Where the losses of a training are read."""

    pattern: str = PATTERN
    log: str | None = None
    key: str = "loss"


def compare_script(
    script: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    variants: tyro.conf.Positional[tuple[str, ...]] = ("minmax(bits=4, bucket=128)",),
    *,
    seeds: int = 3,
    within: str = "1%",
    control: str | None = CONTROL,
    ranks: int = 2,
    rate: str | None = None,
    pattern: str = PATTERN,
    log: str | None = None,
    key: str = "loss",
    timeout: float = 3600.0,
    plot: OutputFile = None,
    json: OutputFile = None,
) -> int:
    """Compare the loss that your own script ends at with compressed communication to that without.

    The script runs once as it is and once with each compressor for every seed, on ranks of this machine, without a
    change to it. The differences are paired by seed and judged by a t-test; a control must fail, so that "within 1 %"
    means something: exits with 1 if it does not.

    In the script's command {seed} stands for the seed and {out} for a folder of each run's own. The seed is also given
    to the generators of Python, NumPy and PyTorch before the script starts. The loss is the mean of the last tenth of
    the losses that rank 0 prints, or that a log has.

    Examples:
      thinwire compare -- train.py --steps 200 --seed {seed}
      thinwire compare 4bit powersgd --seeds 5 --rate 100mbit --plot curves.svg -- train.py
      thinwire compare 8bit --pattern "val ([0-9.]+)" -- train.py
      thinwire compare 4bit --log {out}/trainer_state.json --key eval_loss -- train.py --output_dir {out}

    Args:
        script: What python would run, after two dashes.
        variants: Compressors: presets or specs; "SPEC with POLICY" has a policy choose each layer's own.
        seeds: Number of seeds, each one paired run of every variant; a verdict takes at least 2.
        within: How much higher a loss may be and still be the same: 1% or 0.01.
        control: A spec that must fail; None for none.
        ranks: Number of ranks.
        rate: Of each rank's link (100mbit, 1gbit ...), emulated; without it loopback.
        pattern: Regular expression with one group, which finds the loss in a line that rank 0 prints.
        log: Read losses from this JSON or JSON Lines file, or folder of TensorBoard's, instead.
        key: Name of the loss in the log.
        timeout: Seconds after which a run has failed.
        plot: Write the curves to this file, as SVG.
        json: Write the figures to this file.
    """
    console = Console(highlight=False)
    with ends_command(ValueError, ImportError):
        if seeds < 1 or ranks < 2 or not script:
            raise ValueError("needs a script, at least one seed and 2 ranks: thinwire compare --seeds 3 -- train.py")
        if plot is not None:
            plots.need_matplotlib()
        statistics.need_scipy()
        specs = [str(Variant.parse(text)) for text in dict.fromkeys(variants)]
        if ALONE in specs:
            raise ValueError("ranks of a script always communicate: leave --, and alone is compared on the small GPT")
        compiled(pattern)
        comparison = ScriptComparison(specs, None if control is None else str(Variant.parse(control)), share_of(within))
        check_script(without_python(script))
        with Runs(script, ranks, rate, Source(pattern, log, key), timeout) as runs:
            for seed in range(seeds):
                for name in comparison.names:
                    run = runs.train(None if name == BASELINE else name, seed)
                    comparison.runs.setdefault(name, []).append(run)
                    text = f"seed {seed}, {comparison.title(name)}: loss {run.loss:.4f} in {run.seconds:.1f} s"
                    console.print(text, style="dim", markup=False, soft_wrap=True)
        comparison.check_seeds()
        console.print()
        console.print(comparison.table())
        for line in comparison.remarks():
            console.print(line, soft_wrap=True, markup=False)
    if plot is not None:
        comparison.picture(plot)
        console.print(f"Curves: {plot}", soft_wrap=True, markup=False)
    if json is not None:
        comparison.record(script).write(json)
        console.print(f"Figures: {json}", soft_wrap=True, markup=False)
    return 0 if comparison.sensitive else 1


class Runs:
    """Trains the script on ranks of this machine; a context manager."""

    def __init__(
        self, script: Sequence[str], num_ranks: int, rate: str | None, source: Source, timeout_s: float
    ) -> None:
        self._script, self._num_ranks, self._rate = script, num_ranks, rate
        self._source, self._timeout_s = source, timeout_s
        self._stack = ExitStack()
        self._network: lab.Network | None = None

    def __enter__(self) -> Runs:
        if self._rate is not None:
            self._network = self._stack.enter_context(lab.Network(self._num_ranks, rate=self._rate))
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="thinwire-compare-")))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def train(self, variant: str | None, seed: int) -> ScriptRun:
        """One run.

        Raises:
            RankFailed: a rank failed or took too long.
            NoLosses: it left none.
        """
        out = Path(tempfile.mkdtemp(dir=self._folder))
        filled = tuple(word.replace("{seed}", str(seed)).replace("{out}", str(out)) for word in self._script)
        setup = Setup(filled, seed, variant, str(out / "thinwire-stats.json"))
        started = time.monotonic()
        printed = self._run(setup.argv(), out)
        seconds = time.monotonic() - started
        stats = Path(setup.stats)
        if variant is not None and not stats.exists():
            raise NoLosses(
                "the script trained no DistributedDataParallel or FSDP2 model in its own process, so there is nothing "
                "to compress: wrap it, model = DistributedDataParallel(model), and let thinwire compare start the "
                "ranks, in place of torch.multiprocessing.spawn"
            )
        sent = json_module.loads(stats.read_text()) if variant is not None else None
        steps = max(1, sent["steps"]) if sent else 1
        return ScriptRun(
            tuple(self._losses(printed, out)),
            seconds,
            sent["sent"] / steps if sent else None,
            sent["dense"] / steps if sent else None,
        )

    def _losses(self, printed: str, out: Path) -> list[float]:
        source = self._source
        if source.log is not None:
            return read_log(Path(source.log.replace("{out}", str(out))), source.key)
        pattern = compiled(source.pattern)
        losses = [loss for line in printed.splitlines() if (loss := loss_in(line, pattern)) is not None]
        if not losses:
            shown = "\n".join(printed.splitlines()[-5:]) or "(nothing)"
            raise NoLosses(
                "no loss in what rank 0 printed: give a --pattern with one group around the number, or a --log; "
                f"its last lines are\n{shown}"
            )
        return losses

    def _run(self, argv: Sequence[str], out: Path) -> str:
        """What rank 0 printed."""
        link = self._network or lab.Loopback(self._num_ranks)
        with ExitStack() as stack:
            logs = [stack.enter_context(open(out / f"rank{rank}.log", "w+b")) for rank in range(self._num_ranks)]
            ranks: list[subprocess.Popen[Any]] = []
            stack.callback(_end, ranks)
            for rank, log in enumerate(logs):
                pipes: dict[str, Any] = {"stdout": subprocess.PIPE if rank == 0 else log, "stderr": log}
                ranks.append(link.popen(rank, argv, **pipes))
            printed: list[bytes] = []
            stdout = ranks[0].stdout
            assert stdout is not None
            reader = threading.Thread(target=lambda: printed.append(stdout.read()), daemon=True)
            reader.start()
            self._wait(ranks, out)
            reader.join(_GRACE_S)
        return b"".join(printed).decode(errors="replace")

    def _wait(self, ranks: Sequence[subprocess.Popen[Any]], out: Path) -> None:
        until = time.monotonic() + self._timeout_s
        while True:
            codes = [process.poll() for process in ranks]
            failed = next((rank for rank, code in enumerate(codes) if code), None)
            if failed is not None:
                raise RankFailed(failed, f"ended with exit code {codes[failed]}", _tail(out, failed))
            if None not in codes:
                return
            if time.monotonic() > until:
                raise RankFailed(codes.index(None), f"did not end within {self._timeout_s:g} s", _tail(out, 0))
            time.sleep(0.05)


class ScriptComparison:
    """All runs, and what follows from them. ``margin``: a loss higher by that share is still the same."""

    def __init__(self, specs: Sequence[str], control: str | None, margin: float) -> None:
        self.specs, self.control, self.margin = list(specs), control, margin
        self.runs: dict[str, list[ScriptRun]] = {}

    @property
    def names(self) -> list[str]:
        """The baseline, the variants, the control."""
        return [BASELINE, *self.specs, *([self.control] if self.control and self.control not in self.specs else [])]

    def title(self, name: str) -> str:
        if name == BASELINE:
            return _AS_IT_IS
        return f"{name} (control)" if name == self.control else name

    def losses(self, name: str) -> list[float]:
        return [run.loss for run in self.runs[name]]

    def judged(self, name: str) -> tuple[statistics.Estimate, Verdict]:
        differences = statistics.relative_differences(self.losses(name), self.losses(BASELINE))
        estimate = statistics.estimate(differences)
        return estimate, statistics.judge(estimate, self.margin)

    @property
    def sensitive(self) -> bool:
        """Whether the control, which must fail, is not within the margin."""
        return self.control is None or self.judged(self.control)[1] is not Verdict.WITHIN

    def check_seeds(self) -> None:
        """Raise ``ValueError`` if the seeds change nothing: an interval over equal runs would mean nothing."""
        curves = [run.losses for run in self.runs[BASELINE]]
        if len(curves) > 1 and len(set(curves)) == 1:
            raise ValueError(
                "every seed trained alike: the script sets its own seed, so give it ours, as in "
                "thinwire compare -- train.py --seed {seed}"
            )

    def table(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("compression", overflow="fold", min_width=16)
        for heading in ("loss", "difference\n%", "between", "kB a\nstep", "s a\nrun"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column(f"within\n{self.margin:.3g}?" if self.margin < 1e-3 else f"within\n{self.margin * 100:g} %?")
        dense = next((run.dense_bytes for name in self.specs for run in self.runs[name]), None)
        for name in self.names:
            runs = self.runs[name]
            sent = runs[0].sent_bytes if name != BASELINE else dense
            cells = [escape(self.title(name)), f"{fmean(self.losses(name)):.4f}", "", ""]
            verdict = ""
            if name != BASELINE:
                estimate, judgement = self.judged(name)
                cells[2:] = [f"{estimate.mean * 100:+.2f}", f"{estimate.lower * 100:+.2f}…{estimate.upper * 100:+.2f}"]
                verdict = f"[{_COLOURS[judgement]}]{judgement}[/]"
            seconds = fmean(run.seconds for run in runs)
            table.add_row(*cells, "–" if sent is None else f"{sent / 1e3:.1f}", f"{seconds:.1f}", verdict)
        return table

    def remarks(self) -> list[str]:
        """How to read the table, and whether it means anything."""
        seeds = len(self.runs[BASELINE])
        lines = [
            f"Difference: of the loss at the end (mean of the last tenth) to the same seed's as it is, over {seeds} "
            f"seeds; the true one keeps each bound with {CONFIDENCE:.0%} (paired t-test)."
        ]
        if seeds == 1:
            lines.append("One seed decides nothing: --seeds 3 or more.")
        if not self.sensitive:
            lines.append("The control, which must be worse, is not: these runs are too short to show damage.")
        return lines

    def picture(self, path: Path) -> None:
        """Curves of all runs: a colour for each compression, a line for each seed."""
        figure, (axes,) = plots.canvas(1, titles=["your training"], x="losses read", y="loss")
        for at, name in enumerate(self.names):
            for seed, run in enumerate(self.runs[name]):
                label = self.title(name) if seed == 0 else None
                style = "--" if name == self.control else "-"
                axes.plot(
                    range(1, len(run.losses) + 1), run.losses, f"C{at}", linestyle=style, linewidth=1, label=label
                )
        plots.save(figure, path)

    def record(self, script: Sequence[str]) -> Results:
        """All figures, for ``--json``."""
        results = Results(
            "thinwire compare", about={"script": list(script), "control": self.control, "margin": self.margin}
        )
        for name in self.names:
            runs = self.runs[name]
            curves = [list(run.losses) for run in runs]
            results.add(f"loss/{name}", fmean(self.losses(name)), "", by_seed=self.losses(name), curves=curves)
            results.add(f"seconds/{name}", fmean(run.seconds for run in runs), "s")
            if name != BASELINE:
                estimate, verdict = self.judged(name)
                bounds = {"lower": estimate.lower, "upper": estimate.upper} if len(runs) > 1 else {}
                results.add(f"difference/{name}", estimate.mean, "", verdict=str(verdict), **bounds)
                if runs[0].sent_bytes is not None:
                    results.add(f"bytes_per_step/{name}", runs[0].sent_bytes, "B")
        return results


def _tail(out: Path, rank: int) -> str:
    return "\n".join((out / f"rank{rank}.log").read_text(errors="replace").splitlines()[-_LOG_LINES:])


def _end(ranks: Sequence[subprocess.Popen[Any]]) -> None:
    for process in ranks:
        if process.poll() is None:
            process.kill()
        process.wait(_GRACE_S)
        if process.stdout is not None:
            process.stdout.close()
