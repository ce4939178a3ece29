"""``thinwire plan show``: which compressor each layer has, and what that saves and errs against the rules' own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from thinwire.plan import LayerRow, PlanRecord
from thinwire.policies import parse_policy
from thinwire.policies.budget import BudgetedPolicy
from thinwire_tools.compare.plan_plot import draw
from thinwire_tools.exits import ends_command
from thinwire_tools.results import OutputFile, Results

_WIDE, _MIDDLE, _NARROW = 118, 90, 64
_FP32_BYTES = 4


@dataclass(frozen=True)
class Budget:
    """What a plan errs, and what it may, in the measure that its policy sums up."""

    error: float
    allowed: float
    reference: float
    by_layer: bool
    """Whether both are sums of the layers' L2 norms, and not L2 norms of the whole gradient."""

    @property
    def used(self) -> float:
        return self.error / self.allowed if self.allowed else math.inf if self.error else 0.0


def plan_show(
    plan: tyro.conf.Positional[Path],
    *,
    svg: Annotated[Path | None, tyro.conf.arg(metavar="PATH.svg")] = None,
    json: OutputFile = None,
) -> int:
    """Show a plan: layers in the order they are sent, size, chosen compressor, bytes against the rules', error.

    The file is what wire.plan_record().write("plan.json") wrote; rank 0's has the errors. Bytes are those that a rank
    sends in a step, of fp32 gradients; errors are squared L2 norms on the gradients that the plan was chosen for. The
    picture is Figure 4.1 of Markov's thesis of 2024: bars are sizes, lines are what the rules name and what was chosen.

    Examples:
      thinwire plan show plan.json
      thinwire plan show plan.json --svg plan.svg
      thinwire plan show plan.json --json figures.json

    Args:
        plan: the plan's file.
        svg: draw it.
        json: write the figures to this file.
    """
    console = Console(highlight=False)
    with ends_command(ValueError, OSError, ImportError):
        record = PlanRecord.read(plan)
        if svg:
            draw(record, svg, headline(record))
        if json:
            _results(record).write(json)
    show(console, record)
    for path in (json, svg):
        if path:
            console.print(f"Written: {path}", soft_wrap=True, markup=False)
    return 0


def budget_of(record: PlanRecord) -> Budget | None:
    """What it errs against what it may; None where no errors were taken."""
    rows = [row for row in record.rows if row.error is not None and row.reference_error is not None]
    if not rows:
        return None
    alpha, by_layer = 1.0, True
    try:
        policy = parse_policy(record.policy)
    except ValueError:
        # The rules chose, or a policy from outside.
        policy = None
    if isinstance(policy, BudgetedPolicy):
        alpha, by_layer = policy.alpha, policy.error == "l2"
    error, reference = (
        math.fsum(math.sqrt(value) for value in values) if by_layer else math.sqrt(math.fsum(values))
        for values in ([row.error or 0.0 for row in rows], [row.reference_error or 0.0 for row in rows])
    )
    return Budget(error, alpha * reference, reference, by_layer)


def headline(record: PlanRecord) -> str:
    """What the plan gains, in a line."""
    text = f"{_fewer(record.reference_bytes, record.sent_bytes)} than the reference"
    budget = budget_of(record)
    return text if budget is None else f"{text}, at {_percent(budget.used)} of the error that it may have"


def show(console: Console, record: PlanRecord) -> None:
    """Print the plan as a table, with its totals."""
    for line in _about(record):
        console.print(line, soft_wrap=True, markup=False)
    console.print()
    console.print(_table(console, record))
    for line in _totals(record):
        console.print(line, soft_wrap=True, markup=False)


def _about(record: PlanRecord) -> list[str]:
    buckets = len({row.bucket for row in record.rows})
    chosen = f"chosen by {record.policy}" if record.policy else "the rules' own"
    ranks = f"{record.num_ranks} rank" + ("s" if record.num_ranks != 1 else "")
    lines = [f"{_count(len(record.rows), 'layer')} in {_count(buckets, 'bucket')}, {ranks}, step {record.step}"]
    lines.append(f"Plan: {chosen}")
    references = list(dict.fromkeys(row.reference for row in record.rows if row.reference != "raw()"))
    if len(references) == 1:
        lines.append(f"Reference: {references[0]}")
    if record.note:
        lines.append(f"Note: {record.note}")
    return lines


def _table(console: Console, record: PlanRecord) -> Table:
    wide, middle = console.width >= _WIDE, console.width >= _MIDDLE
    several = len({row.reference for row in record.rows if row.reference != "raw()"}) > 1
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    if middle:
        table.add_column("bucket", justify="right", no_wrap=True)
    table.add_column("layer", overflow="fold", min_width=12)
    if wide:
        table.add_column("shape", no_wrap=True)
    table.add_column("MB", justify="right", no_wrap=True)
    spec = max(len(row.compressor) for row in record.rows)
    table.add_column("compressor", overflow="fold", min_width=min(24 if console.width >= _NARROW else 12, spec))
    if several and wide:
        table.add_column("reference", overflow="fold", min_width=14)
    if middle:
        table.add_column("sent MB", justify="right", no_wrap=True)
    table.add_column("% of\nref.", justify="right", no_wrap=True)
    table.add_column("% of\nerror", justify="right", no_wrap=True)
    total = math.fsum(row.error or 0.0 for row in record.rows)
    for at, row in enumerate(record.rows):
        first = not at or record.rows[at - 1].bucket != row.bucket
        last = at + 1 == len(record.rows) or record.rows[at + 1].bucket != row.bucket
        cells = [
            *([str(row.bucket) if first else ""] if middle else []),
            escape(row.name),
            *(["x".join(map(str, row.shape)) or "1"] if wide else []),
            _megabytes(_FP32_BYTES * row.numel),
            escape(row.compressor),
            *([escape(row.reference)] if several and wide else []),
            *([_megabytes(row.sent_bytes)] if middle else []),
            _share(row.sent_bytes, row.reference_bytes),
            "" if row.error is None else _share(row.error, total),
        ]
        # What is as the rules have it stands back.
        table.add_row(*cells, style="dim" if row.compressor == row.reference else None, end_section=last and wide)
    return table


def _totals(record: PlanRecord) -> list[str]:
    sent, reference = record.sent_bytes, record.reference_bytes
    dense = _dense_bytes(record)
    lines = [
        "",
        f"A rank sends {_megabytes(sent)} MB a step; {_megabytes(reference)} MB with the reference "
        f"({_fewer(reference, sent)}), {_megabytes(dense)} MB uncompressed ({_fewer(dense, sent)}).",
    ]
    budget = budget_of(record)
    if budget is None:
        return [*lines, "No errors were taken, or not on this rank: rank 0 decides."]
    what = "sum of the layers' L2 norms" if budget.by_layer else "L2 norm"
    within = "within" if budget.used <= 1 + 1e-9 else "over"
    allowed = "the reference's" if budget.allowed == budget.reference else "what the policy allows"
    lines.append(
        f"Error ({what}) {budget.error:.4g}: {_percent(budget.used)} of {allowed} {budget.allowed:.4g}, "
        f"{within} the budget."
    )
    return lines


def _dense_bytes(record: PlanRecord) -> float:
    ranks = max(2, record.num_ranks)
    return 2 * (ranks - 1) / ranks * _FP32_BYTES * math.fsum(row.numel for row in record.rows)


def _results(record: PlanRecord) -> Results:
    about = {"policy": record.policy, "note": record.note, "step": record.step, "ranks": record.num_ranks}
    results = Results("thinwire plan show", about=about)
    sent, reference = record.sent_bytes, record.reference_bytes
    results.add("sent_bytes", sent, "B")
    results.add("reference_bytes", reference, "B")
    results.add("uncompressed_bytes", _dense_bytes(record), "B")
    if sent:
        results.add("ratio", reference / sent, "x")
    budget = budget_of(record)
    if budget is not None:
        unit = "sum of L2" if budget.by_layer else "L2"
        results.add("error", budget.error, unit)
        results.add("error_budget", budget.allowed, unit)
    for row in record.rows:
        results.add(f"layer/{row.name}/sent_bytes", row.sent_bytes, "B", **_facts(row))
    return results


def _facts(row: LayerRow) -> dict[str, object]:
    return {
        "bucket": row.bucket,
        "shape": list(row.shape),
        "compressor": row.compressor,
        "reference": row.reference,
        "reference_bytes": row.reference_bytes,
        "error": row.error,
        "reference_error": row.reference_error,
    }


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number != 1 else "")


def _megabytes(num_bytes: float) -> str:
    size = num_bytes / 1e6
    return f"{size:.0f}" if size >= 1000 else f"{size:.2f}" if size >= 0.1 else f"{size:.4f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if math.isfinite(share) else "more than 100 %"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}" if whole else ""


def _fewer(before: float, now: float) -> str:
    if before == now or not min(before, now):
        return "as many bytes" if before == now else "no bytes to compare"
    return f"{before / now:.2f}x fewer bytes" if now < before else f"{now / before:.2f}x more bytes"
