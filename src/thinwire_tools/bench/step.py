"""The command ``thinwire bench step``: a training step, compared to stock DDP and to the ceiling of sending nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from thinwire_tools.bench.tables import figures_table
from thinwire_tools.results import Results

_KINDS = ("fp32", "thinwire", "noop")


def table_of(measured: Sequence[Mapping[str, Any]]) -> Table:
    milliseconds = [f"{name}\nms" for name in ("fp32", "thinwire", "ceiling")]
    shares = [f"{name},\nof ceiling" for name in ("fp32", "thinwire")]
    table = figures_table("batch", (*milliseconds, *shares, "against\nfp32"))
    for row in measured:
        times = [f"{row['seconds'][name] * 1e3:.0f}" for name in _KINDS]
        shares = [f"{row['share'][name]:.0%}" for name in ("fp32", "thinwire")]
        table.add_row(str(row["batch"]), *times, *shares, f"{row['over_fp32']:.2f}x")
    return table


def remarks(answer: Mapping[str, Any]) -> Iterator[str]:
    """Yield the costs of compression in a step of the largest batch, and whether thinwire compressed at all."""
    last = answer["measured"][-1]
    taken, worked = (1e3 * (by["thinwire"] - by["noop"]) for by in (last["seconds"], answer["processor_s"]))
    yield (
        f"At batch {last['batch']} a step takes {taken:.0f} ms longer than the ceiling, and {worked:.0f} ms more "
        "processor time of rank 0, which cores that training leaves idle would take."
    )
    if answer["declined_layers"]:
        yield f"thinwire declined to compress {answer['declined_layers']} layers: it would not have been faster."


def results_of(answer: Mapping[str, Any], about: Mapping[str, object]) -> Results:
    results = Results("thinwire bench step", about=dict(about))
    for row in answer["measured"]:
        for name in _KINDS:
            results.add(f"step_s/{name}/batch{row['batch']}", row["seconds"][name], "s", all=row["all"][name])
    last, stats = answer["measured"][-1], answer["stats"]
    for name, seconds in answer["processor_s"].items():
        results.add(f"processor_s/{name}", seconds, "s", batch=last["batch"])
    for name in ("fp32", "thinwire"):
        results.add(f"share_of_ceiling/{name}", last["share"][name], "", batch=last["batch"])
    results.add("speedup_over_fp32", last["over_fp32"], "x", batch=last["batch"])
    results.add("declined_layers", answer["declined_layers"], "layers")
    results.add("payload_bytes_per_step", answer["bytes_per_step"], "B")
    for stage in ("encode", "wire", "reduce", "decode"):
        results.add(f"stage_s/{stage}", stats[f"{stage}_s"] / stats["steps"], "s")
    return results
