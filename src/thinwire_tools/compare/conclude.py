"""The end of the demo: the table, how to read it, the checks, the files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from thinwire_tools.compare.report import SAME_LOSS, Check, Outcome, Report
from thinwire_tools.compare.train import CONTROL_RULES, LOCAL_EVERY, VARIANTS
from thinwire_tools.lab.units import format_rate, parse_rate

_MARKS = {
    Outcome.SHOWN: "[green]shown[/]     ",
    Outcome.NOT_SHOWN: "[yellow]not shown[/] ",
    Outcome.WRONG: "[bold red]WRONG[/]     ",
    Outcome.NOT_JUDGED: "[dim]–[/]         ",
}


def conclude(console: Console, report: Report, about: dict[str, Any], *, out: Path, json: Path | None) -> int:
    """Print the table, how to read it and the checks; write the files. Returns the exit code.

    It is 1 if a result is wrong or a variant did not finish, and 0 otherwise: a speed that a busy machine does not show
    is no error.
    """
    console.print()
    console.print(report.table())
    in_file = not console.is_terminal  # where lines are searched; a terminal would cut words in two
    for line in _remarks(report):
        console.print(line, soft_wrap=in_file)
    console.print()
    checks = report.checks()
    for check in checks:
        console.print(f"{_MARKS[check.outcome]} {check.text}: [bold]{check.value}[/]", soft_wrap=in_file)
    if not report.judged:
        console.print("[dim]The limits are those of `thinwire demo` without options.[/]")
    if any(check.outcome is Outcome.NOT_SHOWN for check in checks):
        console.print("[dim]Not shown on this machine now: other work on it makes steps slower. No error.[/]")
    console.print()
    path = json or out / "demo.json"
    report.results("thinwire demo", about).write(path)
    console.print(f"Figures: {path}", soft_wrap=True, markup=False)
    _draw(console, report, about, out / "loss.svg")
    console.print()
    for line in _closing(report, checks, about):
        console.print(line, soft_wrap=True)
    wrong = any(check.outcome is Outcome.WRONG for check in checks)
    return 1 if wrong or report.failures else 0


def _remarks(report: Report) -> Iterator[str]:
    """How to read the table."""
    task = report.task
    if report.on_interface and report.target is not None:
        tokens = task.probe_windows * task.model.context
        yield (
            f"The same loss: {report.target:.4f} nats/byte, {SAME_LOSS:g} times fp32's last, on {tokens:,} "
            "held-out bytes evaluated along the way; time is that of the training steps."
        )
        yield "Speed-up: the median over all turns of a step's time in fp32 over its time here."
    tokens = task.held_out_windows * task.model.context
    yield f"Held-out loss: nats/byte at the end, on {tokens:,} bytes of modules that no training step saw."
    yield (
        "Training alone: nothing is sent, so that each rank learns from its own batches only. It bounds the speed from "
        "above, and a method that ends at a higher loss is worse than sending nothing."
    )
    yield (
        f"Local, every {LOCAL_EVERY}: ranks train alone for {LOCAL_EVERY} steps, then average what they have learned, "
        "sent in 2 bits (thinwire.local.DiLoCo); a step's time is the mean of its round."
    )
    yield (
        "With Muon: thinwire.optim.Muon in place of AdamW, at the learning rate that is best for it, four times "
        "AdamW's. DDP fp32, Muon is its control, which is there for its loss: nothing is compressed, and no link is "
        "slow."
    )
    yield f"1-bit control: {CONTROL_RULES}, no error feedback. It must be worse, or equal losses mean nothing."
    worse = [VARIANTS[run.name].title for run in report.worse_than_alone() if run.name != "control"]
    if worse:
        yield f"[bold]Worse than sending nothing here: {', '.join(worse)}.[/]"
    yield from _on_powersgd(report)


def _on_powersgd(report: Report) -> Iterator[str]:
    """Where PowerSGD beats thinwire's 4 bits, and at what loss."""
    over, excess, ours = (report.speedup("powersgd", "thinwire"), report.excess("powersgd"), report.excess("thinwire"))
    if over is None or excess is None or ours is None:
        return
    theirs = report.seconds_to_target(report.runs["powersgd"])
    mine = report.seconds_to_target(report.runs["thinwire"])
    losses = f"its held-out loss is {excess:+.2%} against fp32's, thinwire's {ours:+.2%}"
    if over.median > 1:
        first = f"[bold]PowerSGD is faster here[/], {over.median:.2f}x the steps/s of thinwire"
    else:
        first = f"thinwire makes {1 / over.median:.2f}x the steps/s of PowerSGD here"
    if theirs is None:
        reached = "PowerSGD does not reach the same loss"
    elif mine is None:
        reached = f"PowerSGD reaches the same loss in {theirs:.1f} s, and thinwire does not"
    else:
        reached = f"PowerSGD reaches the same loss in {theirs:.1f} s, thinwire in {mine:.1f} s"
    yield f"{first}; {reached}; {losses}."


def _draw(console: Console, report: Report, about: dict[str, Any], path: Path) -> None:
    if not report.on_interface:
        console.print("No picture: over loopback, times mean nothing.")
        return
    try:
        report.picture(path, f"{about['ranks']} ranks, {_rates(about)}, {about['parameters'] / 1e6:.1f} M parameters")
    except ImportError:
        console.print("No picture without matplotlib: pip install matplotlib", markup=False)
        return
    console.print(f"Picture: {path}", soft_wrap=True, markup=False)


def _rates(about: dict[str, Any]) -> str:
    return ", ".join(format_rate(parse_rate(rate)) for rate in about["rate"].split(","))


def _closing(report: Report, checks: list[Check], about: dict[str, Any]) -> Iterator[str]:
    """What this shows, and what to try next."""
    wrong = sum(check.outcome is Outcome.WRONG for check in checks)
    speedup, excess = report.speedup("thinwire", "fp32"), report.excess("thinwire")
    if report.failures or wrong:
        yield (
            f"[bold red]This is not the result that it should be[/]: wrong results: {wrong}; variants that did not "
            f"finish: {len(report.failures)}."
        )
    elif excess is not None and report.judged and speedup is not None:
        yield (
            f"[bold]What this shows:[/] over {_rates(about)}, thinwire trains {speedup.median:.1f}x as fast as DDP "
            f"with fp32 gradients and ends at the same loss ({excess:+.2%}), with one line added."
        )
        over, against, own = report.speedup("muloco", "fp32"), report.excess("muloco"), report.excess("muloco", "muon")
        if over is not None and against is not None and own is not None:
            yield (
                f"Local updates with Muon train {over.median:.1f}x as fast as it and end at {against:+.2%} against its "
                f"loss, and at {own:+.2%} against that of Muon in fp32."
            )
    elif excess is not None:
        yield f"[bold]What this shows:[/] the whole path works here; thinwire's loss is {excess:+.2%} against fp32's."
    yield (
        "[bold]Next:[/] would it help your training? `torchrun --nproc-per-node 2 -m thinwire doctor -- train.py`; in "
        "your own script, after DDP(model): `wire = thinwire.compress(model)` (README)."
    )
