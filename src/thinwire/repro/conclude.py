"""How the demo ends: the table, what it says in words, the checks, the files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from thinwire.lab.units import format_rate, parse_rate
from thinwire.repro.report import SAME_LOSS, Check, Report
from thinwire.repro.train import CONTROL_RULES

_MARKS = {True: "[green]pass[/]", False: "[bold red]FAIL[/]", None: "[dim] –  [/]"}


def conclude(
    console: Console, report: Report, about: dict[str, Any], *, out: Path, json: Path | None, strict: bool
) -> int:
    """Print the table, what it says and the checks; write the files. Returns the exit code."""
    console.print()
    console.print(report.table())
    for line in _remarks(report, about):
        console.print(line, soft_wrap=True)
    console.print()
    checks = report.checks()
    for check in checks:
        console.print(f"{_MARKS[check.passed]}  {check.text}: [bold]{check.found}[/]", soft_wrap=True)
    if not report.judged:
        console.print("[dim]Limits of speed, loss and bytes are those of `thinwire demo` without options.[/]")
    console.print()
    path = json or out / "demo.json"
    report.results("thinwire demo", about).write(path)
    console.print(f"Figures: {path}", soft_wrap=True, markup=False)
    _draw(console, report, about, out / "loss.svg")
    console.print()
    for line in _closing(report, checks, about):
        console.print(line, soft_wrap=True)
    failed = report.failures or any(check.passed is False for check in checks)
    return 1 if strict and failed else 0


def _remarks(report: Report, about: dict[str, Any]) -> Iterator[str]:
    """How to read the table."""
    task = report.task
    if report.on_interface and report.target is not None:
        tokens = task.probe_windows * task.model.context
        yield (
            f"The same loss: {report.target:.4f} nats/byte, {SAME_LOSS:g} times fp32's last, on {tokens:,} "
            "held-out bytes evaluated along the way; time is that of training alone."
        )
    tokens = task.held_out_windows * task.model.context
    yield f"Held-out loss: nats/byte at the end, on {tokens:,} bytes of modules that no training step saw."
    yield "¹ The ceiling of speed. Ranks drift apart, so there is no one model whose loss would count."
    yield f"² Must be worse, or equal losses mean nothing: {CONTROL_RULES}, no error feedback; on an unshaped link."
    yield from _on_powersgd(report)


def _on_powersgd(report: Report) -> Iterator[str]:
    """Where PowerSGD beats thinwire, and what for."""
    over, excess, ours = (
        report.speedup("powersgd", "thinwire"),
        report.excess("powersgd"),
        report.excess("thinwire"),
    )
    if over is None or excess is None or ours is None:
        return
    theirs = report.seconds_to_target(report.runs["powersgd"])
    mine = report.seconds_to_target(report.runs["thinwire"])
    losses = f"its held-out loss is {excess:+.2%} against fp32's, thinwire's {ours:+.2%}"
    if over > 1:
        first = f"[bold]PowerSGD is faster here[/], {over:.2f}x the steps/s of thinwire"
    else:
        first = f"thinwire makes {1 / over:.2f}x the steps/s of PowerSGD here"
    if theirs is None:
        reached = "PowerSGD does not reach the same loss"
    elif mine is None:
        reached = f"PowerSGD reaches the same loss in {theirs:.1f} s, and thinwire does not"
    else:
        reached = f"PowerSGD reaches the same loss in {theirs:.1f} s, thinwire in {mine:.1f} s"
    yield f"{first}; {reached}; {losses}."


def _draw(console: Console, report: Report, about: dict[str, Any], path: Path) -> None:
    if not report.on_interface:
        console.print("No picture: over loopback, time says nothing.")
        return
    try:
        report.picture(path, f"{about['ranks']} ranks, {_rates(about)}, {about['parameters'] / 1e6:.1f} M parameters")
    except ImportError:
        console.print("No picture without matplotlib: pip install 'thinwire[plot]'", markup=False)
        return
    console.print(f"Picture: {path}", soft_wrap=True, markup=False)


def _rates(about: dict[str, Any]) -> str:
    return ", ".join(format_rate(parse_rate(rate)) for rate in about["rate"].split(","))


def _closing(report: Report, checks: list[Check], about: dict[str, Any]) -> Iterator[str]:
    """What this shows, and what to try next."""
    failed = sum(check.passed is False for check in checks)
    speedup, excess = report.speedup("thinwire", "fp32"), report.excess("thinwire")
    if report.failures or failed:
        yield (
            f"[bold red]This is not the result it should be[/]: failed checks: {failed}; variants that did not finish: "
            f"{len(report.failures)}. Other work on this machine makes steps slower: try again when it is idle."
        )
    elif excess is not None and report.judged and speedup is not None:
        yield (
            f"[bold]What this shows:[/] over {_rates(about)}, thinwire trains {speedup:.1f}x as fast as DDP with fp32 "
            f"gradients and ends at the same loss ({excess:+.2%}), with one line added."
        )
    elif excess is not None:
        yield f"[bold]What this shows:[/] the whole path works here; thinwire's loss is {excess:+.2%} against fp32's."
    yield (
        "[bold]Next:[/] `thinwire bench allreduce --rate 1gbit` for faster links; in your own training, after "
        "DDP(model): `wire = thinwire.compress(model)` (README)."
    )
