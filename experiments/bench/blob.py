"""``python -m experiments bench blob``: compressing flat buffers beneath DDP, beside compressing layers.

The thesis contrasts the two as QNCCL and CGX (sections 3.4 and 3.5.4).
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from rich.console import Console
from rich.table import Table

from thinwire_tools import lab
from thinwire_tools.bench.ranks import run_ranks
from thinwire_tools.results import OutputFile, Results

_LABELS = {
    "fp32": "stock DDP, fp32",
    "uniform": "group, uniform",
    "registered": "group, registered",
    "layerwise": "thinwire.compress",
}


def blob(
    *,
    rates: tuple[str, ...] = ("100mbit", "1gbit"),
    ranks: int = 2,
    compressor: str = "minmax(bits=4, bucket=128)",
    bucket_cap_mb: float = 5.0,
    batch: int = 4,
    rounds: int = 7,
    steps: int = 3,
    json: OutputFile = None,
) -> int:
    """Train a 4.8 M parameter GPT with DDP, its gradients compressed as flat buffers or as layers.

    Four methods take turns in one run: stock DDP; a process group of backend thinwire, which sees DDP's buckets and
    nothing else; the same with the model's layers registered, so that it finds them by their sizes and leaves biases
    and norms raw; and thinwire.compress, which knows the layers. Errors are those of the mean of one gradient, the
    same for all: of the whole, and of biases and norms alone.

    Examples:
      python -m experiments bench blob
      python -m experiments bench blob --rates 1gbit --ranks 4 --compressor 'minmax(bits=4, bucket=1024)'
      python -m experiments bench blob --rates none --rounds 3

    Args:
        rates: of each rank's link, in both directions; none measures over loopback.
        ranks: number of ranks.
        compressor: its spec; one without error feedback, for which a process group has no place.
        bucket_cap_mb: DDP's bucket size.
        batch: windows of 64 tokens that each rank takes in a step.
        rounds: turns of each method.
        steps: steps a turn.
        json: write the figures to this file.
    """
    console = Console(highlight=False)
    if any(rate != "none" for rate in rates):
        lab.need_network()
    config = {"spec": compressor, "cap_mb": bucket_cap_mb, "batch": batch, "rounds": rounds, "steps": steps}
    about: dict[str, Any] = {"compressor": compressor, "ranks": ranks, "batch": batch, "bucket_cap_mb": bucket_cap_mb}
    results = Results("python -m experiments bench blob", about=about)
    for rate in rates:
        where = "loopback" if rate == "none" else rate
        with ExitStack() as stack:
            network = stack.enter_context(lab.Network(ranks, rate=rate)) if rate != "none" else None
            about[f"link/{where}"] = network.describe() if network else {"rate": "loopback"}
            stack.enter_context(console.status(f"{ranks} ranks, {where}: {rounds} turns of each method ..."))
            answer = run_ranks("experiments.bench.blob_rank", config, ranks, network)
        _add(results, answer, where)
        console.print(f"Training steps, {ranks} ranks, {where}, {compressor}")
        console.print(_table(answer))
        less = answer["errors"]["registered"]["all"] / answer["errors"]["uniform"]["all"]
        console.print(
            f"With registered layers the mean gradient errs {less:.2f} times as much as with uniform buffers."
        )
    if json:
        results.write(json)
    return 0


def _add(results: Results, answer: dict[str, Any], where: str) -> None:
    for name in _LABELS:
        seconds = answer["seconds"][name]
        results.add(f"steps_per_s/{name}/{where}", 1.0 / seconds, "1/s", step_s=answer["all"][name])
        results.add(f"over_fp32/{name}/{where}", answer["over_fp32"][name], "x")
        results.add(f"payload_bytes_per_step/{name}/{where}", answer["bytes_per_step"][name], "B")
        results.add(f"relative_error/{name}/{where}", answer["errors"][name]["all"], "")
        results.add(f"relative_error_of_biases_and_norms/{name}/{where}", answer["errors"][name]["flat"], "")
    for name, counts in answer["buffers"].items():
        for what, count in counts.items():
            results.add(f"{what}_buffers/{name}/{where}", count, "buffers")


def _table(answer: dict[str, Any]) -> Table:
    table = Table()
    for column in ("method", "steps/s", "vs fp32", "MB/step", "error", "biases, norms"):
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for name, label in _LABELS.items():
        error = answer["errors"][name]
        table.add_row(
            label,
            f"{1.0 / answer['seconds'][name]:.2f}",
            f"{answer['over_fp32'][name]:.2f}x",
            f"{answer['bytes_per_step'][name] / 1e6:.2f}",
            f"{error['all']:.2%}",
            f"{error['flat']:.2%}",
        )
    return table
