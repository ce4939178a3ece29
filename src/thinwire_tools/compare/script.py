"""The command ``thinwire compare -- train.py``: the user's own training, unchanged and compressed, in paired runs."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from thinwire_tools import lab
from thinwire_tools.compare.comparison import Comparison, Run, Side
from thinwire_tools.compare.losses import NoLosses, compiled, final, loss_in, read_log
from thinwire_tools.compare.variants import BASELINE, Variant
from thinwire_tools.ranks import RankFailedError
from thinwire_tools.results import Results
from thinwire_tools.run.attachment import Attachment, UsageError
from thinwire_tools.run.command import run_script

_LOG_LINES, _GRACE_S = 15, 10.0
AS_IT_IS = "as it is"


@dataclass(frozen=True)
class Setup:
    """Instructions for a rank.

    Args:
        script: arguments for python.
        seed: seed of the global generators, for scripts that do not set them themselves.
        variant: text for `Variant.parse`; None for the script as it is.
        stats: file that rank 0 writes the bytes sent to, where there is a variant.
    """

    script: tuple[str, ...]
    seed: int
    variant: str | None
    stats: str

    def argv(self) -> list[str]:
        """Return the command of such a rank."""
        program = "import sys; from thinwire_tools.compare.script import train; sys.exit(train(sys.argv[1]))"
        return [sys.executable, "-u", "-c", program, json.dumps(asdict(self))]


class Runs:
    """Trainings of the script on ranks of this machine; a context manager."""

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
        """Bytes that rank 0 sends in a step without compression, once a compressed run has reported them."""

    def __enter__(self) -> Runs:
        if self._rate is not None:
            self._network = self._stack.enter_context(lab.Network(self._num_ranks, rate=self._rate))
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="thinwire-compare-")))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def train(self, variant: str | None, seed: int) -> Run:
        """Train once.

        Raises:
            RankFailedError: a rank failed or took too long.
            NoLosses: the run left no losses.
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
            told = json.loads(stats.read_text())
            steps, sent = max(1, told["steps"]), told["sent"]
            self.dense_bytes = told["dense"] / steps
        # The run counts as one step, from start to end, the start of Python included.
        return Run(
            variant or BASELINE,
            step_s=[seconds],
            losses=losses,
            probe_steps=[steps],
            payload_bytes=[sent],
            val_loss=final(losses),
        )

    def _run(self, argv: Sequence[str], out: Path) -> str:
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
                raise RankFailedError(failed, f"ended with exit code {codes[failed]}", _tail(out, failed))
            if None not in codes:
                return
            if time.monotonic() > until:
                raise RankFailedError(codes.index(None), f"did not end within {self._timeout_s:g} s", _tail(out, 0))
            time.sleep(0.05)


class ScriptComparison(Comparison):
    """Trainings of a script, which reports its own losses."""

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


def check_seeds(runs: Sequence[Run]) -> None:
    """Raise ``ValueError`` if seeds change nothing in ``runs``: an interval over equal runs would mean nothing."""
    if len(runs) > 1 and all(run.losses == runs[0].losses for run in runs):
        raise ValueError(
            "every seed trained alike: the script sets its own seed, so give it ours, as in "
            "thinwire compare -- train.py --seed {seed}"
        )


def _seconds(side: Side) -> float:
    return fmean(sum(run.step_s) for run in side.runs)


def read_losses(printed: str, out: Path, *, pattern: str, log: str | None, key: str) -> list[float]:
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


# --- on a rank


def train(text: str) -> int:
    """Run one rank of the script: seeded, with compression or as it is."""
    setup = Setup(**json.loads(text))
    random.seed(setup.seed)
    np.random.seed(setup.seed % 2**32)
    torch.manual_seed(setup.seed)
    if setup.variant is None:
        run_script(setup.script)
        return 0
    variant = Variant.parse(setup.variant)
    options = {"seed": setup.seed, "skip_if_slower": False}
    if variant.policy is not None:
        options["adapt"] = variant.policy
    attached = Attachment(variant.spec, options, None, 1)
    try:
        with attached:
            run_script(setup.script)
    except UsageError as error:
        sys.stderr.write(f"{error}\n")
        return 64
    finally:
        if attached.wire is not None and attached.wire.rank == 0:
            stats = attached.wire.stats
            counts = {"sent": stats.payload_sent_bytes, "dense": stats.dense_bytes, "steps": stats.steps}
            Path(setup.stats).write_text(json.dumps(counts))
    return 0
