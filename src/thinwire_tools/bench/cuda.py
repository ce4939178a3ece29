"""The command ``thinwire bench cuda``: speed of a GPU's compression, compared to a copy on it, and its launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import median

import torch
from rich.console import Console
from torch import Tensor

from thinwire.collectives import (
    CollectiveCall,
    DeviceBuffers,
    DeviceLoopbackTransport,
    DeviceTransport,
    Layer,
    Layout,
    LoopbackTransport,
    device_all_reduce,
)
from thinwire.compressors import Coded, State, Summed, parse
from thinwire.runtime.executor import elapsed
from thinwire_tools.bench.kernels import ROTATED, codec_runs
from thinwire_tools.results import Results, figures_table

SPECS = (
    *("minmax(bits=4)", "ef(minmax(bits=4))", "minmax(bits=8, bucket=1024)", "maxabs(bits=4)", "qsgd(bits=4)"),
    *("lattice(bits=8)", "ef(onebit)", "natural", "topk(density=0.01)", "raw"),
)
_REDUCED = ("minmax(bits=4)", "ef(minmax(bits=4))", "topk(density=0.01)", "cast(bf16)")
"""Compressors of the gradients that several ranks reduce."""

_LAYERS = 40
"""Number of layers of the bucket, which should not show in the number of launches."""

_AT_A_TIME = 8
"""Number of calls that are timed together: a GPU is faster than a host that starts one kernel after the other."""


@dataclass(frozen=True)
class Row:
    """One operation: seconds a call, and the device's operations for it."""

    name: str
    seconds: float
    launches: int
    sent_bytes: int = 0


def show_speeds(size_mb: float, repeats: int, ranks: int) -> Results:
    """Time every row and print the table. The arguments are the options of ``thinwire bench cuda``."""
    device = torch.device("cuda", torch.cuda.current_device())
    console = Console(highlight=False)
    with console.status(f"{size_mb:g} MB on {torch.cuda.get_device_name(device)}; kernels are compiled first ..."):
        numel = max(_LAYERS * 1024, int(size_mb * 2**20 / 4))
        rows = compressors(device, numel, repeats) + reductions(device, numel, repeats, ranks)
    about = {"device": torch.cuda.get_device_name(device), "size_mb": size_mb, "repeats": repeats, "layers": _LAYERS}
    results = Results("thinwire bench cuda", about=about)
    table = figures_table("operation", ("GB/s", "x copy_", "µs", "launches", "bits an\nelement"))
    copy_s = rows[0].seconds
    for row in rows:
        rate, bits = 4 * numel / row.seconds / 1e9, 8 * row.sent_bytes / numel
        figures = {"x_copy": copy_s / row.seconds, "seconds": row.seconds, "launches": row.launches, "bits": bits}
        results.add(row.name, rate, "GB/s", **figures)
        shown = f"{bits:.2f}" if row.sent_bytes else ""
        table.add_row(
            row.name, f"{rate:.1f}", f"{copy_s / row.seconds:.2f}", f"{1e6 * row.seconds:.1f}", f"{row.launches}", shown
        )
    console.print(f"{about['device']}, {size_mb:g} MB of fp32 in {_LAYERS} layers")
    console.print(table)
    return results


def missing() -> str:
    """Return what this machine lacks to measure a GPU, and what to do; empty if nothing."""
    if not torch.cuda.is_available():
        return (
            f"this PyTorch ({torch.__version__}) sees no CUDA device, and there is nothing to measure without one. "
            "`make triton` runs the same kernels in Triton's interpreter"
        )
    if find_spec("triton") is None:
        return "Triton is not installed: pip install triton, in the version that this PyTorch wants"
    return ""


def compressors(device: torch.device, numel: int, repeats: int, specs: Sequence[str] = SPECS) -> list[Row]:
    """Return a copy, and the operations of each compressor: encode, decode, add decoded values, reduce four ranks."""
    x = [
        torch.randn(numel, generator=torch.Generator().manual_seed(i), dtype=torch.float32, device="cpu").to(device)
        for i in range(ROTATED)
    ]
    y = [torch.zeros(numel, dtype=torch.float32, device=device) for _ in range(ROTATED)]
    rows = [_row("copy_", device, repeats, lambda i: y[i].copy_(x[i]))]
    for spec in specs:
        rows += _coded(spec, x, y, device, repeats)
    return rows


def _coded(spec: str, x: list[Tensor], y: list[Tensor], device: torch.device, repeats: int) -> list[Row]:
    compressor = parse(spec)
    assert isinstance(compressor, Coded)
    runs, sent_bytes = codec_runs(compressor, x, y, _layers(x[0].numel()))
    return [_row(f"{spec}: {name}", device, repeats, run, sent_bytes) for name, run in runs.items()]


def _layers(numel: int) -> list[tuple[str, int, int]]:
    """Return name, start and size of layers of very different sizes that make up so many elements."""
    weights = [1 + i % 4 * 8 for i in range(_LAYERS)]
    edges = [sum(weights[:i]) * numel // sum(weights) for i in range(_LAYERS + 1)]
    return [(f"layer{i}", edges[i], edges[i + 1] - edges[i]) for i in range(_LAYERS)]


def _row(name: str, device: torch.device, repeats: int, run: Callable[[int], object], sent_bytes: int = 0) -> Row:
    def several() -> None:
        for i in range(_AT_A_TIME):
            run(i % ROTATED)

    several()
    seconds = median(elapsed(several, device) for _ in range(repeats)) / _AT_A_TIME
    return Row(name, seconds, launches(lambda: run(0), device), sent_bytes)


def launches(run: Callable[[], object], device: torch.device) -> int:
    """Return the number of kernels, copies and fills that the device runs for ``run``."""
    if device.type != "cuda":
        return 0
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize(device)
    return sum(str(event.device_type).endswith("CUDA") for event in profile.events() or ())


def reductions(device: torch.device, numel: int, repeats: int, ranks: int) -> list[Row]:
    """Return the seconds in which ``ranks`` threads, which share the device, take the mean of their gradients."""
    rows = []
    for spec in _REDUCED:
        seconds, sent_bytes = _reduced(spec, device, numel, repeats, ranks)
        rows.append(Row(f"{spec}: all-reduce of {ranks} ranks on one device", seconds, 0, sent_bytes))
    return rows


def _reduced(spec: str, device: torch.device, numel: int, repeats: int, ranks: int) -> tuple[float, int]:
    compressor = parse(spec)
    assert isinstance(compressor, Coded | Summed)
    layers = [Layer(name, start, (size,), compressor) for name, start, size in _layers(numel)]
    layout = Layout.build(layers, ranks, torch.float32)
    transports = DeviceLoopbackTransport.world(LoopbackTransport.world(ranks), device, timeout_s=120.0)
    sent = DeviceBuffers.allocate(layout, 0, device).sent_bytes

    def run(transport: DeviceTransport) -> float:
        with torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext():
            return median(step_seconds(layout, transport, repeats))

    with ThreadPoolExecutor(ranks) as pool:
        return max(pool.map(run, transports)), sent


def step_seconds(layout: Layout, transport: DeviceTransport, repeats: int) -> list[float]:
    """Return the seconds of one rank's all-reduces without the first, for which kernels are compiled."""
    device = transport.device
    x = torch.randn(
        layout.numel, generator=torch.Generator().manual_seed(transport.rank), dtype=torch.float32, device="cpu"
    ).to(device)
    buffers = DeviceBuffers.allocate(layout, transport.rank, device)
    shapes = {layer.name: layer.shape for layer in layout.layers}
    state = State.fresh(layout.slots, layout.numel, 1.0, shapes, device=device) if layout.slots else None

    def step(number: int) -> None:
        device_all_reduce(x, layout, transport, buffers, CollectiveCall(seed=0, step=number, state=state))

    step(0)
    return [elapsed(lambda number=number: step(number), device) for number in range(1, repeats + 1)]
