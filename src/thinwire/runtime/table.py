"""The layers of a Wire as rows and as a table: their compressors, or why they are raw, and the bytes sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from thinwire.compressors import Compressor, Raw
from thinwire.plan import Plan, sent_bytes

_MOST_ROWS = 40


@dataclass(frozen=True)
class LayerRow:
    """A layer of a plan, compared with what the rules name for it."""

    name: str
    shape: tuple[int, ...]
    bucket: int
    """Position of the DDP bucket in the order in which buckets leave."""
    compressor: Compressor
    reference: Compressor
    """The compressor that the rules name for the layer."""
    sent_bytes: float
    """Bytes that a rank sends for the layer in a step."""
    reference_bytes: float
    """Bytes that a rank would send for the layer with the reference."""
    error: float | None
    """Squared L2 error on the gradients that the plan was chosen for; None if it was not measured."""
    reference_error: float | None
    """Squared L2 error of the reference on these gradients."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def layer_rows(
    plan: Mapping[str, Compressor],
    reference: Mapping[str, Compressor],
    shapes: Mapping[str, Sequence[int]],
    buckets: Iterable[Iterable[str]],
    num_ranks: int,
    errors: Mapping[str, float],
    reference_errors: Mapping[str, float],
) -> list[LayerRow]:
    """Return the rows of a plan in the order of communication.

    Bytes are those of fp32 gradients, and a world of one is taken for one of two.

    Args:
        plan: the compressor of each layer.
        reference: the compressors that the rules name; a layer that is not in it has its own compressor for reference.
        shapes: shapes of the layers.
        buckets: names of the layers of each bucket, as they leave. Layers in none of them, all of them before the first
            step, come last, in a bucket of their own.
        num_ranks: number of ranks.
        errors: squared L2 errors of the plan, by layer.
        reference_errors: squared L2 errors of the reference, by layer.
    """
    places: dict[str, int] = {}
    after = 0
    for bucket, names in enumerate(buckets):
        after = bucket + 1
        places |= {name: bucket for name in names if name in plan and name not in places}
    places |= {name: after for name in plan if name not in places}
    rows = []
    for name, bucket in places.items():
        chosen, named, shape = plan[name], reference.get(name, plan[name]), tuple(shapes[name])
        sent, named_sent = (sent_bytes(compressor, shape, max(2, num_ranks)) for compressor in (chosen, named))
        errors_of = errors.get(name), reference_errors.get(name)
        rows.append(LayerRow(name, shape, bucket, chosen, named, sent, named_sent, *errors_of))
    return rows


def layer_table(
    title: str,
    plan: Plan,
    shapes: Mapping[str, Sequence[int]],
    skipped: Mapping[str, str],
    loaded: Collection[str],
    sent: Callable[[str, Compressor], float],
    *,
    unit: str = "bytes a step",
    than: str = "fp32",
) -> str:
    """Return a line for each layer: name, elements, spec or the reason why it is raw, bytes, times less than raw.

    Args:
        title: title of the table.
        plan: the present plan.
        shapes: shapes of its layers.
        skipped: layers that are raw because compressing them would be slower, and the compressor that they would have.
        loaded: those of them that are raw because they were so in the checkpoint that was loaded.
        sent: the bytes that a rank sends for a layer with a compressor, by formula.
        unit: unit of these bytes.
        than: name of the form of layers that are not compressed.
    """
    rows, total, total_raw = [], 0.0, 0.0
    for name, compressor in plan.layers.items():
        shape = shapes[name]
        now, raw = sent(name, compressor), sent(name, Raw())
        total, total_raw = total + now, total_raw + raw
        what = _why_raw(plan, name, shape, skipped, loaded) if isinstance(compressor, Raw) else str(compressor)
        rows.append((name, f"{math.prod(shape):,}", what, f"{now:,.0f}", f"{raw / now:.1f}x" if now else ""))
    compressed = sum(not isinstance(compressor, Raw) for compressor in plan.layers.values())
    left_out = len(rows) - _MOST_ROWS
    if left_out > 0:
        rows = [*rows[:_MOST_ROWS], (f"... and {left_out} more", "", "", "", "")]
    head = ("layer", "elements", "compressor", unit, "ratio")
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    ratio = f", {total_raw / total:.1f} times less than {than}" if total else ""
    ratio = ratio if compressed else ", uncompressed"
    summary = f"{title}: {compressed} of {len(plan.layers)} layers compressed, {total:,.0f} {unit}{ratio}"
    return "\n".join([summary, *(f"  {line.rstrip()}" for line in lines)])


def _why_raw(plan: Plan, name: str, shape: Sequence[int], skipped: Mapping[str, str], loaded: Collection[str]) -> str:
    if name in loaded:
        return f"raw: taken from the checkpoint, in place of {skipped[name]}"
    if name in skipped:
        return f"raw: {skipped[name]} would be slower here"
    if name in plan.unsuited:
        return f"raw: {plan.unsuited[name]}"
    if plan.keep.excludes(name):
        return "raw: excluded"
    if len(shape) < plan.keep.min_dim:
        dimensions = "1 dimension" if len(shape) == 1 else f"{len(shape)} dimensions"
        return f"raw: {dimensions}, fewer than {plan.keep.min_dim}"
    if math.prod(shape) < plan.keep.min_numel:
        return f"raw: fewer than {plan.keep.min_numel} elements"
    return "raw"
