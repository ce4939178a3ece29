"""``thinwire bench step``: a whole training step beside stock DDP and beside the ceiling of sending nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from rich.console import Console
from rich.table import Table

from thinwire.compressors import parse
from thinwire_tools import lab
from thinwire_tools.bench.ranks import run_ranks
from thinwire_tools.bench.tables import figures_table
from thinwire_tools.exits import ends_command
from thinwire_tools.results import OutputFile, Results

_BATCHES = "2,4,6,8,12,16,24,32"
_KINDS = ("fp32", "thinwire", "noop")


def step(
    *,
    rate: str | None = "1gbit",
    ranks: int = 2,
    compressor: str = "minmax(bits=4, bucket=128)",
    bucket_cap_mb: float = 5.0,
    skip_if_slower: bool = False,
    target: float = 0.6,
    batches: str = _BATCHES,
    rounds: int = 7,
    steps: int = 3,
    json: OutputFile = None,
) -> int:
    """Time a training step of a 4.8 M parameter GPT: stock DDP, thinwire, and a hook that sends nothing.

    The batch grows until stock DDP reaches --target of the ceiling. The three take turns, so a noisy machine is
    noisy for all alike; shares are medians over rounds.

    Examples:
      thinwire bench step --rate 1gbit
      thinwire bench step --rate none --skip-if-slower --target 0

    Args:
        rate: of each rank's link, both ways; none measures over loopback.
        ranks: number of ranks.
        compressor: its spec.
        bucket_cap_mb: DDP's bucket size, for all three.
        skip_if_slower: let thinwire leave raw what would be slower compressed, as it does by default.
        target: share of the ceiling that stock DDP must reach; 0 stops after the first batch.
        batches: sizes to try, in windows of 64 tokens a rank.
        rounds: turns of each.
        steps: steps a turn.
        json: write the figures to this file.
    """
    console = Console(highlight=False)
    shaped = rate not in (None, "none")
    with ends_command():
        parse(compressor)
        sizes = [int(batch) for batch in batches.split(",")]
        if min(sizes) < 1 or rounds < 1 or steps < 1:
            raise ValueError(f"--batches {batches} --rounds {rounds} --steps {steps}: all must be above 0")
        if shaped:
            lab.Network(ranks, rate=rate).close()
    config = {
        "spec": compressor,
        "cap_mb": bucket_cap_mb,
        "skip_if_slower": skip_if_slower,
        "rounds": rounds,
        "steps": steps,
        "target": target,
        "batches": sizes,
    }
    with ExitStack() as stack:
        network = stack.enter_context(lab.Network(ranks, rate=rate)) if shaped else None
        about = network.describe() if network else {"rate": "loopback"}
        where = rate if shaped else "loopback"
        stack.enter_context(console.status(f"{ranks} ranks, {where}: {rounds} turns for each batch size ..."))
        answer = run_ranks("thinwire_tools.bench.step_rank", config, ranks, network)
    console.print(f"A training step, {ranks} ranks, {where}, {compressor}")
    console.print(_table(answer["measured"]))
    for line in _remarks(answer):
        console.print(line, soft_wrap=True)
    if json:
        about = {"link": about, "compressor": compressor, "ranks": ranks}
        _results(answer, about).write(json)
    return 0


def _table(measured: Sequence[Mapping[str, Any]]) -> Table:
    milliseconds = [f"{name}\nms" for name in ("fp32", "thinwire", "ceiling")]
    shares = [f"{name},\nof ceiling" for name in ("fp32", "thinwire")]
    table = figures_table("batch", (*milliseconds, *shares, "against\nfp32"))
    for row in measured:
        times = [f"{row['seconds'][name] * 1e3:.0f}" for name in _KINDS]
        shares = [f"{row['share'][name]:.0%}" for name in ("fp32", "thinwire")]
        table.add_row(str(row["batch"]), *times, *shares, f"{row['over_fp32']:.2f}x")
    return table


def _remarks(answer: Mapping[str, Any]) -> Iterator[str]:
    """What compressing costs in a step of the largest batch, and whether thinwire compressed at all."""
    last = answer["measured"][-1]
    taken, worked = (1e3 * (by["thinwire"] - by["noop"]) for by in (last["seconds"], answer["processor_s"]))
    yield (
        f"At batch {last['batch']} a step takes {taken:.0f} ms longer than the ceiling, and {worked:.0f} ms more "
        "processor time of rank 0, which cores that training leaves idle would take."
    )
    if answer["declined_layers"]:
        yield f"thinwire declined to compress {answer['declined_layers']} layers: it would not have been faster."


def _results(answer: Mapping[str, Any], about: Mapping[str, object]) -> Results:
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
