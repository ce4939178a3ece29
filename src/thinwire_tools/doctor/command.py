"""The command ``thinwire doctor``: is this training bound by communication, and what would help?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from thinwire_tools.exits import check_script, ends_command, without_python
from thinwire_tools.lab.units import parse_rate
from thinwire_tools.plots import need_matplotlib
from thinwire_tools.results import OutputFile, write_record

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
        script: arguments for python, after two dashes: train.py and its arguments, or -m and a module.
        ranks: how many ranks to start; under torchrun there are as many as it started.
        ranks_per_node: how many of them share a node of the emulated network, and its link.
        rate: rate of each node's link, each way, of an emulated network: 100mbit, 1gbit.
        rtt: round-trip time to add to it, as 10ms.
        steps: training steps to watch, half of them without overlap.
        keep_running: let the script train on to its end afterwards.
        compressors: specs to predict in addition to the usual ones, as "minmax(bits=3)".
        line_rate: rate that the line is made for, as 10gbit, where the system does not know.
        price_per_hour: price of all ranks together: shows the cost of a million samples or tokens with each setting.
        samples_per_step: samples that all ranks together process in a step, for the price.
        tokens_per_step: tokens that all ranks together process in a step.
        timeout: seconds after which ranks that doctor started are ended.
        json: write all figures to this file.
        html: write the report to this file, as a page with pictures.
    """
    from thinwire_tools.doctor import page
    from thinwire_tools.doctor.examine import Examination, Request
    from thinwire_tools.doctor.observer import LEAST_STEPS
    from thinwire_tools.doctor.settings import settings_with
    from thinwire_tools.doctor.started import examine_here

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
            record = examine_here(request, ranks, ranks_per_node, rate, rtt, timeout)
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


def _tell(console: Console, record: dict[str, Any], figures: Path | None, html: Path | None) -> None:
    from thinwire_tools.doctor import page, report

    report.show(console, record)
    if figures is not None:
        write_record(record, figures)
    if html is not None:
        page.write(html, record)
        console.print(f"Report: {html}", soft_wrap=True, markup=False)
