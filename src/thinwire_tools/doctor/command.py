"""``thinwire doctor``: is this training bound by communication, and what would help?"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from thinwire_tools import lab
from thinwire_tools.doctor import page, report
from thinwire_tools.doctor.examine import LOOPBACK, Examination, Request, argv
from thinwire_tools.doctor.observer import LEAST_STEPS
from thinwire_tools.doctor.settings import settings_with
from thinwire_tools.doctor.watched import DoctorError
from thinwire_tools.exits import check_script, ends_command, without_python
from thinwire_tools.lab.units import parse_rate, parse_rates
from thinwire_tools.plots import need_matplotlib
from thinwire_tools.results import OutputFile

_STDERR, _LAST_WORDS_S, _POLL_S = 2, 2.0, 0.05
_OURS = ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")


def doctor(
    script: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    *,
    ranks: int = 2,
    ranks_per_node: int = 1,
    rate: Annotated[str | None, tyro.conf.arg(metavar="RATE")] = None,
    rtt: Annotated[str | None, tyro.conf.arg(metavar="TIME")] = None,
    steps: int = 20,
    keep_running: bool = False,
    compressors: tuple[str, ...] = (),
    line_rate: Annotated[str | None, tyro.conf.arg(metavar="RATE")] = None,
    price_per_hour: Annotated[float | None, tyro.conf.arg(metavar="PRICE")] = None,
    samples_per_step: Annotated[float | None, tyro.conf.arg(metavar="NUMBER")] = None,
    tokens_per_step: Annotated[float | None, tyro.conf.arg(metavar="NUMBER")] = None,
    timeout: float = 600.0,
    json: OutputFile = None,
    html: OutputFile = None,
) -> int:
    """Is this training bound by communication, and what would help?

    Under torchrun, on every rank: watches the DistributedDataParallel or FSDP2 model that a script trains, or a small
    GPT where no script is given, measures links and processors, and predicts the step time for each compressor of
    gradients. The script's numbers stay as they are; it is ended once enough was seen. Without torchrun it starts the
    ranks itself, on this machine: over loopback, or over the slow network that --rate asks for.

    Examples:
      torchrun --nproc-per-node 2 -m thinwire doctor -- train.py --batch 32
      thinwire doctor --ranks 2 --rate 100mbit --rtt 10ms -- train.py
      thinwire doctor --rate 1gbit --html doctor.html
      thinwire doctor --ranks 4 --ranks-per-node 2 --rate 100mbit -- train.py

    Args:
        script: What python would run, after two dashes: train.py and its arguments, or -m and a module.
        ranks: How many ranks to start; under torchrun there are as many as it started.
        ranks_per_node: How many of them share a node of the emulated network, and its link.
        rate: Rate of each node's link, each way, of an emulated network: 100mbit, 1gbit.
        rtt: Round-trip time to add to it, as 10ms.
        steps: Training steps to watch, half of them without overlap.
        keep_running: Let the script train on to its end afterwards.
        compressors: Specs to predict beside the usual ones, as "minmax(bits=3)".
        line_rate: Rate that the line is made for, as 10gbit, where the system does not know.
        price_per_hour: Of all ranks together: shows what a million samples or tokens cost with each setting.
        samples_per_step: That all ranks together take in a step, for the price.
        tokens_per_step: The same in tokens.
        timeout: Seconds after which ranks that doctor started are ended.
        json: Write all figures to this file.
        html: Write the report to this file, as a page with pictures.
    """
    console = Console(highlight=False)
    inside = all(name in os.environ for name in _OURS)
    with ends_command(ValueError, ImportError):
        if html is not None:
            need_matplotlib()
            page.need_jinja2()
        _check_price(price_per_hour, samples_per_step, tokens_per_step)
        if steps < LEAST_STEPS:
            raise ValueError(f"--steps {steps}: at least {LEAST_STEPS}, half of them without overlap")
        settings_with(compressors)
        if script:
            check_script(without_python(script))
        request = Request(
            steps=steps,
            keep_running=keep_running,
            compressors=compressors,
            line_rate=None if line_rate is None else parse_rate(line_rate) / 8,
            price_per_hour=price_per_hour,
            samples_per_step=samples_per_step if tokens_per_step is None else tokens_per_step,
            unit="samples" if tokens_per_step is None else "tokens",
            script=script,
        )
        if inside:
            if rate is not None or rtt is not None:
                raise ValueError(
                    "under torchrun the network is what it is: --rate and --rtt are for ranks started here"
                )
            if ranks_per_node != 1:
                raise ValueError("under torchrun nodes are what they are: --ranks-per-node is for ranks started here")
            answer = Examination(request).run()
            record = None if answer is None else answer.to_dict()
        else:
            record = _examine_here(request, ranks, ranks_per_node, rate, rtt, timeout)
    if record is not None:
        _tell(console, record, json, html)
    return 0


def _check_price(per_hour: float | None, samples: float | None, tokens: float | None) -> None:
    if samples is not None and tokens is not None:
        raise ValueError("--samples-per-step and --tokens-per-step say the same: give one of them")
    counted = samples if tokens is None else tokens
    if (per_hour is None) != (counted is None):
        raise ValueError("a price needs both: --price-per-hour, and --tokens-per-step or --samples-per-step")
    if per_hour is not None and counted is not None and not (per_hour > 0 and counted > 0):
        raise ValueError("--price-per-hour and what a step takes must be above 0")


def _examine_here(
    request: Request, ranks: int, ranks_per_node: int, rate: str | None, rtt: str | None, timeout: float
) -> dict[str, Any]:
    """Start the ranks on this machine, and read what rank 0 wrote."""
    if ranks < 2:
        raise ValueError(f"--ranks {ranks}: at least 2, or nothing is sent")
    if ranks_per_node < 1:
        raise ValueError(f"--ranks-per-node {ranks_per_node}: at least 1")
    if ranks_per_node != 1 and rate is None and rtt is None:
        raise ValueError("--ranks-per-node is for an emulated network: give --rate or --rtt, too")
    request = replace(request, progress=True)
    sys.stderr.write(f"thinwire doctor: starting {ranks} ranks on this machine\n")
    with tempfile.TemporaryDirectory(prefix="thinwire-doctor-") as folder:
        path = Path(folder) / "answer.json"
        if rate is None and rtt is None:
            code = _on_loopback(replace(request, link=LOOPBACK), ranks, path, timeout)
        else:
            line = min(parse_rates(rate, max(1, ranks // ranks_per_node))) / 8 if rate is not None else None
            asked = replace(request, line_rate=request.line_rate or line, link=f"{rate or 'unshaped'}, +{rtt or '0ms'}")
            shape: dict[str, Any] = {"ranks_per_node": ranks_per_node, "rate": rate, "rtt": rtt}
            code = lab.launch(argv(asked, path), num_ranks=ranks, timeout=timeout, **shape).exit_code
        if code == 128 + signal.SIGINT:
            raise KeyboardInterrupt
        if not path.exists():
            raise DoctorError(f"the ranks ended with exit code {code} and without an answer: see what they said above")
        return json.loads(path.read_text())


def _on_loopback(request: Request, ranks: int, path: Path, timeout: float) -> int:
    """The exit code of the first rank that failed, 124 after the timeout, otherwise 0."""
    with lab.Loopback(ranks) as loopback:
        # What the script prints goes where messages go: standard output is for the report.
        started = [loopback.popen(rank, argv(request, path), stdout=_STDERR) for rank in range(ranks)]
        return _wait(started, time.monotonic() + timeout)


def _wait(ranks: Sequence[subprocess.Popen[bytes]], until: float) -> int:
    failed = 0
    while time.monotonic() < until:
        codes = [process.poll() for process in ranks]
        if failed or None not in codes:
            return failed or next(filter(None, codes), 0)
        failed = next(filter(None, codes), 0)
        # Another rank may have the whole error, and is about to say it.
        time.sleep(_LAST_WORDS_S if failed else _POLL_S)
    return lab.TIMED_OUT


def _tell(console: Console, record: dict[str, Any], figures: Path | None, html: Path | None) -> None:
    report.show(console, record)
    if figures is not None:
        figures.write_text(json.dumps(record, indent=1) + "\n")
    if html is not None:
        page.write(html, record)
        console.print(f"Report: {html}", soft_wrap=True, markup=False)
