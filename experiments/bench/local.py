"""``python -m experiments bench local``: local updates over slow links, beside a network that costs nothing."""

from __future__ import annotations

from dataclasses import asdict, replace

from rich.console import Console
from rich.table import Table

from thinwire.bench.ranks import network_here
from thinwire.compare.demo import Demo
from thinwire.compare.report import SAME_LOSS, Report
from thinwire.compare.train import LOCAL_EVERY, VARIANTS, Task
from thinwire.lab.units import format_rate, parse_rate
from thinwire.results import OutputFile, Results

_WAYS = ("fp32", "thinwire", "local", "streaming", "alone")


def local(
    *,
    rates: tuple[str, ...] = ("100mbit", "10mbit"),
    steps: int = 96,
    json: OutputFile = None,
) -> int:
    """Train the demo's GPT over slow links: fp32 and 4-bit gradients, local updates, streaming, and alone.

    Ways take turns of 8 steps. On the first link DDP in fp32 trains too, and its last loss is the one to reach. A free
    network would take fp32's steps at the speed of training alone. Takes about three minutes on two idle cores.

    Examples:
      python -m experiments bench local --json benchmarks/local.json

    Args:
        rates: of each rank's link, both ways.
        steps: training steps of each way.
        json: write the figures to this file.
    """
    console = Console(highlight=False)
    if not network_here():
        return 1
    task = Task(steps=steps)
    results = Results("python -m experiments bench local")
    results.about = {"rates": list(rates), "task": asdict(task), "every": LOCAL_EVERY}
    first: Report | None = None
    for rate in rates:
        order = _WAYS if first is None else _WAYS[1:]
        report = Demo(console, task, 2, rate, parse_rate(rate), None, order=order).run()
        if report.failures:
            console.print(f"{rate}: {report.failures[0].name} did not finish: {report.failures[0].failure}")
            return 1
        first = first or report
        _add(results, rate, report, first)
        console.print(_table(results, rate, order))
        if json is not None:
            results.write(json)
    return 0


def _add(results: Results, rate: str, report: Report, first: Report) -> None:
    target, runs = first.target, report.runs
    assert target is not None
    results.add(f"{rate}/same_loss", target, "nats/byte", times_fp32=SAME_LOSS)
    # What fp32 learns does not depend on the link, so its losses and the times of training alone are a free network's.
    free = replace(first.runs["fp32"], step_s=runs["alone"].step_s)
    seconds = {"free": free.seconds_to(target)} | {name: run.seconds_to(target) for name, run in runs.items()}
    for name, needed in seconds.items():
        if needed is not None:
            results.add(f"{rate}/seconds_to_same_loss/{name}", needed, "s")
    for name, run in runs.items():
        results.add(f"{rate}/step_s/{name}", 1 / run.steps_per_s, "s", step_s=[round(s, 4) for s in run.step_s])
        speed = report.speedup(name, "alone")
        assert speed is not None
        results.add(f"{rate}/speed_over_alone/{name}", speed.median, "x", lower=speed.lower, upper=speed.upper)
        results.add(f"{rate}/sent_bytes/{name}", run.payload_bytes[-1] / report.task.steps, "B/step")
        results.add(f"{rate}/val_loss/{name}", run.val_loss, "nats/byte")
        results.add(f"{rate}/val_loss_above_fp32/{name}", run.val_loss / first.runs["fp32"].val_loss - 1, "")


def _table(results: Results, rate: str, order: tuple[str, ...]) -> Table:
    table = Table(f"over {format_rate(parse_rate(rate))}", "ms a step", "of alone's speed", "same loss in", "vs fp32")
    for name in order:
        reached = [row["value"] for row in results.results if row["name"] == f"{rate}/seconds_to_same_loss/{name}"]
        table.add_row(
            VARIANTS[name].title,
            f"{1e3 * results.value(f'{rate}/step_s/{name}'):.0f}",
            f"{results.value(f'{rate}/speed_over_alone/{name}'):.2f}x",
            f"{reached[0]:.1f} s" if reached else "never",
            f"{results.value(f'{rate}/val_loss_above_fp32/{name}'):+.2%}",
        )
    return table
