"""One rank of an examination: watch a training, measure, predict; rank 0 has the answer."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from thinwire_tools.compare.gpt import GPT, GPTConfig, next_token_loss
from thinwire_tools.doctor.advice import verdict
from thinwire_tools.doctor.measure import Measured, over_links
from thinwire_tools.doctor.observer import WARM_UP, Observer
from thinwire_tools.doctor.record import Prices, record
from thinwire_tools.doctor.settings import Care, Prediction, Setting, local_updates
from thinwire_tools.doctor.settings_sharded import measure_for, predict_step
from thinwire_tools.doctor.watched import DoctorError
from thinwire_tools.exits import CommandError
from thinwire_tools.results import Results
from thinwire_tools.run.command import run_script

LOOPBACK = "loopback"
OTHER_RATES = (125e6, 12.5e6)
"""Rates of links, in bytes per second, that steps on loopback are predicted for, too: 1 Gbit/s and 100 Mbit/s."""
_TIMEOUT = timedelta(seconds=300)
_BATCH = 8
_CAP_MB = 5.0


@dataclass(frozen=True)
class Request:
    """A request for an examination, the same on every rank."""

    steps: int = 20
    """Number of steps to watch, half of them without overlap."""
    keep_running: bool = False
    """Whether the script trains on afterwards."""
    compressors: tuple[str, ...] = ()
    """Specs to predict, in addition to the usual ones."""
    line_rate: float | None = None
    """Rate of the line in bytes per second, where it is known."""
    price_per_hour: float | None = None
    samples_per_step: float | None = None
    unit: str = "samples"
    script: tuple[str, ...] = ()
    """Arguments for python; none for the built-in training."""
    link: str = ""
    """Description of the emulated network, or `LOOPBACK`."""
    progress: bool = False
    """Whether rank 0 reports its progress on standard error."""

    @property
    def prices(self) -> Prices | None:
        if self.price_per_hour is None or self.samples_per_step is None:
            return None
        return Prices(self.price_per_hour, self.samples_per_step, self.unit)


class StopScript(SystemExit):
    """Ends the script once enough was seen: scripts do not catch `SystemExit`."""


def train_probe() -> None:
    """Train the demo's GPT on random tokens until somebody ends it; needs the variables that torchrun sets."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=_TIMEOUT)
    torch.manual_seed(0)
    config = GPTConfig()
    model = DistributedDataParallel(GPT(config), bucket_cap_mb=_CAP_MB, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with contextlib.suppress(StopScript):
        while True:
            tokens = torch.randint(
                0, config.vocabulary, (_BATCH, config.context + 1), generator=generator, dtype=torch.int64, device="cpu"
            )
            optimizer.zero_grad(set_to_none=True)
            next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
            optimizer.step()


@dataclass
class Examination:
    """One rank's part of an examination; ``answer`` is set on rank 0 only."""

    request: Request
    answer: Results | None = None
    finished: bool = field(default=False)

    def run(self) -> Results | None:
        """Run the training until enough was seen, or to its end.

        Raises:
            DoctorError: too little was seen, or nothing that can be predicted.
        """
        request = self.request
        with Observer(request.steps, self._done, self._count) as observer:
            try:
                if request.script:
                    run_script(request.script)
                else:
                    train_probe()
            except SystemExit as end:
                # An error of the script's own is not for doctor to report.
                if not self.finished and end.code not in (None, 0):
                    raise
        if not self.finished:
            needed = f"{request.steps + WARM_UP} training steps, and one more that begins"
            raise DoctorError(
                f"the script ended before doctor had seen {needed}: let it train longer, or ask for fewer with --steps"
                if observer.model is not None
                else "the script trained no DistributedDataParallel model and none that fully_shard() has sharded in "
                "its own process, which is what doctor looks at: wrap it, model = DistributedDataParallel(model), call "
                "the wrapped model in training, and let torchrun or doctor start the ranks, in place of "
                "torch.multiprocessing.spawn"
            )
        return self.answer

    def _report(self, text: str) -> None:
        """Show the present activity on rank 0, where somebody waits for it."""
        if self.request.progress and dist.get_rank() == 0:
            sys.stderr.write(f"thinwire doctor: {text}\n")
            sys.stderr.flush()

    def _count(self, step: int, total: int) -> None:
        if step in (0, total // 2):
            self._report(f"watching training, step {step + 1} of {total}")

    def _elsewhere(self, measured: Measured, settings: Sequence[Setting]) -> list[tuple[float, list[Prediction]]]:
        """Return predictions over slower links, where this machine has no link to other machines itself."""
        if self.request.link != LOOPBACK or measured.sharded:
            return []
        asked = [s for s in settings if s.times == 1 and not s.every and s.algorithm == "sra" and s.care <= Care.KEPT]
        elsewhere = []
        for rate in OTHER_RATES:
            there = over_links(measured, rate)
            elsewhere.append((rate, [predict_step(setting, there) for setting in (*asked, local_updates(there))]))
        return elsewhere

    def _done(self, observer: Observer) -> None:
        request = self.request
        self._report("measuring links and compressors")
        measured, settings = measure_for(observer, request.compressors, request.line_rate)
        if dist.get_rank(observer.group) == 0:
            self._report("predicting steps")
            predictions = [predict_step(setting, measured) for setting in settings]
            conclusion = verdict(measured, predictions)
            elsewhere = self._elsewhere(measured, settings)
            script = list(request.script) or "a GPT of 4.8 million parameters, built in"
            about = {"script": script, "link": request.link}
            self.answer = record(
                measured, predictions, conclusion, about=about, prices=request.prices, elsewhere=elsewhere
            )
        self.finished = True
        if not request.keep_running:
            raise StopScript(0)


def main(text: str, path: str) -> int:
    """Run one of the ranks that ``thinwire doctor`` started itself: rank 0 writes the answer to ``path``."""
    asked: dict[str, Any] = json.loads(text)
    request = Request(**asked)
    request = replace(request, compressors=tuple(request.compressors), script=tuple(request.script))
    try:
        answer = Examination(request).run()
    except CommandError as error:
        sys.stderr.write(f"thinwire doctor: {error}\n")
        return 1
    if answer is not None:
        answer.write(Path(path))
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def argv(request: Request, path: Path) -> Sequence[str]:
    """Return the command of such a rank. Ctrl-C, which a terminal sends to it, too, ends it without a word."""
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
        "from thinwire_tools.doctor.examine import main; sys.exit(main(*sys.argv[1:]))"
    )
    return [sys.executable, "-c", program, json.dumps(asdict(request)), str(path)]
