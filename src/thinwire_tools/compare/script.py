"""``thinwire compare -- train.py``: the user's own training, as it is and compressed, in paired runs."""

from __future__ import annotations

import json as json_module
import math
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import tyro
from rich.console import Console

from thinwire_tools import lab, plots
from thinwire_tools.compare import statistics
from thinwire_tools.compare.compare import share_of, show, write_figures
from thinwire_tools.compare.comparison import Comparison, Run, Side
from thinwire_tools.compare.losses import PATTERN, NoLosses, compiled, final, loss_in, read_log
from thinwire_tools.compare.paired import CONTROL, check_margin, named
from thinwire_tools.compare.rank_processes import RankFailed
from thinwire_tools.compare.script_rank import Setup
from thinwire_tools.compare.variants import ALONE, BASELINE
from thinwire_tools.exits import check_script, ends_command, without_python
from thinwire_tools.results import OutputFile, Results

_LOG_LINES, _GRACE_S = 15, 10.0
_AS_IT_IS = "as it is"


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
        specs, control = named(variants, control)
        if ALONE in specs:
            raise ValueError("ranks of a script always communicate: leave --, and alone is compared on the small GPT")
        margin = share_of(within)
        check_margin(margin)
        compiled(pattern)
        check_script(without_python(script))
        names = [BASELINE, *specs, *([control] if control else [])]
        trained: dict[str, list[Run]] = {name: [] for name in names}
        losses_of = partial(_losses, pattern=pattern, log=log, key=key)
        with Runs(script, ranks, rate, losses_of, timeout) as runs:
            for seed in range(seeds):
                for name in names:
                    run = runs.train(None if name == BASELINE else name, seed)
                    trained[name].append(run)
                    title = _AS_IT_IS if name == BASELINE else name
                    text = f"seed {seed}, {title}: loss {run.val_loss:.4f} in {sum(run.step_s):.1f} s"
                    console.print(text, style="dim", markup=False, soft_wrap=True)
            for run in trained[BASELINE]:
                run.payload_bytes = [runs.dense_bytes]
        sides = {name: Side(name, math.nan, tuple(trained[name])) for name in names}
        found = ScriptComparison(
            seeds=tuple(range(seeds)),
            margin=margin,
            shaped=rate is not None,
            baseline=replace(sides[BASELINE], title=_AS_IT_IS),
            variants=tuple(sides[spec] for spec in specs),
            control=sides[control] if control else None,
            about={"script": list(script), "control": control, "margin": margin},
        )
        found.check_seeds()
        show(console, found)
    if plot is not None:
        found.picture(plot, "your training", "losses read", "loss")
        console.print(f"Curves: {plot}", soft_wrap=True, markup=False)
    write_figures(console, "thinwire compare", found, found.about, json)
    return 0 if found.sensitive else 1


class Runs:
    """Trains the script on ranks of this machine; a context manager."""

    def __init__(
        self,
        script: Sequence[str],
        num_ranks: int,
        rate: str | None,
        losses: Callable[[str, Path], list[float]],
        timeout_s: float,
    ) -> None:
        self._script, self._num_ranks, self._rate = script, num_ranks, rate
        self._losses, self._timeout_s = losses, timeout_s
        self._stack = ExitStack()
        self._network: lab.Network | None = None
        self.dense_bytes = math.nan
        """What rank 0 sends in a step without compression, once a compressed run has told."""

    def __enter__(self) -> Runs:
        if self._rate is not None:
            self._network = self._stack.enter_context(lab.Network(self._num_ranks, rate=self._rate))
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="thinwire-compare-")))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def train(self, variant: str | None, seed: int) -> Run:
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
        losses, steps, sent = self._losses(printed, out), 1, math.nan
        if variant is not None:
            told = json_module.loads(stats.read_text())
            steps, sent = max(1, told["steps"]), told["sent"]
            self.dense_bytes = told["dense"] / steps
        # One step is all of it, from start to end, the start of Python included.
        return Run(
            variant or BASELINE,
            step_s=[seconds],
            losses=losses,
            probe_steps=[steps],
            payload_bytes=[sent],
            val_loss=final(losses),
        )

    def _run(self, argv: Sequence[str], out: Path) -> str:
        """What rank 0 printed."""
        link = self._network or lab.Loopback(self._num_ranks)
        with ExitStack() as stack:
            ranks: list[subprocess.Popen[Any]] = []
            stack.callback(_end, ranks)
            printed = stack.enter_context(open(out / "printed", "wb"))
            for rank in range(self._num_ranks):
                log = stack.enter_context(open(out / f"rank{rank}.log", "wb"))
                ranks.append(link.popen(rank, argv, stdout=log if rank else printed, stderr=log))
            self._wait(ranks, out)
        return (out / "printed").read_text(errors="replace")

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


class ScriptComparison(Comparison):
    """Trainings of a script, whose losses are those that it told."""

    def check_seeds(self) -> None:
        """Raise ``ValueError`` if the seeds change nothing: an interval over equal runs would mean nothing."""
        curves = [run.losses for run in self.baseline.runs]
        if len(curves) > 1 and all(curve == curves[0] for curve in curves):
            raise ValueError(
                "every seed trained alike: the script sets its own seed, so give it ours, as in "
                "thinwire compare -- train.py --seed {seed}"
            )

    def columns(self) -> Iterator[tuple[str, Callable[[Side], str]]]:
        columns = dict(super().columns())
        yield "loss", columns["held-out\nloss"]
        for heading in ("difference\n%", "kB a\nstep"):
            yield heading, columns[heading]
        yield "s a\nrun", lambda side: f"{_seconds(side):.1f}"

    def curve(self, run: Run) -> tuple[Sequence[float], Sequence[float]]:
        return range(1, len(run.losses) + 1), run.losses

    def record(self, results: Results, prefix: str = "") -> None:
        for side in self.sides():
            curves = [run.losses for run in side.runs]
            results.add(f"loss/{side.name}", side.held_out_loss, "", by_seed=side.losses, curves=curves)
            results.add(f"seconds/{side.name}", _seconds(side), "s")
            if side is not self.baseline:
                judged = self.judge(side)
                found = judged.estimate
                bounds = {"lower": found.lower, "upper": found.upper} if len(self.seeds) > 1 else {}
                results.add(f"difference/{side.name}", found.mean, "", verdict=str(judged.verdict), **bounds)
                results.add(f"bytes_per_step/{side.name}", side.bytes_per_step, "B")


def _seconds(side: Side) -> float:
    return fmean(sum(run.step_s) for run in side.runs)


def _losses(printed: str, out: Path, *, pattern: str, log: str | None, key: str) -> list[float]:
    if log is not None:
        return read_log(Path(log.replace("{out}", str(out))), key)
    found = compiled(pattern)
    losses = [loss for line in printed.splitlines() if (loss := loss_in(line, found)) is not None]
    if not losses:
        shown = "\n".join(printed.splitlines()[-5:]) or "(nothing)"
        raise NoLosses(
            "no loss in what rank 0 printed: give a --pattern with one group around the number, or a --log; "
            f"its last lines are\n{shown}"
        )
    return losses


def _tail(out: Path, rank: int) -> str:
    return "\n".join((out / f"rank{rank}.log").read_text(errors="replace").splitlines()[-_LOG_LINES:])


def _end(ranks: Sequence[subprocess.Popen[Any]]) -> None:
    for process in ranks:
        if process.poll() is None:
            process.kill()
        process.wait(_GRACE_S)
