"""``python -m experiments bench optimizer``: what an optimizer's step costs, beside PyTorch's fused AdamW."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from thinwire import kernels
from thinwire.kernels import Format, Residual
from thinwire.optim import CompressedAdamW
from thinwire.results import OutputFile, Results

_Row = Iterator[None]
"""One row of the table: it stops before each turn, with new gradients, and is timed until it stops again."""

_FUSED, _COPY = "torch.optim.AdamW(fused=True)", "copy_"
_WIDTH = 1024


def optimizer(*, size_mb: float = 64.0, threads: int = 1, turns: int = 15, json: OutputFile = None) -> int:
    """CPU seconds of `CompressedAdamW` in both orders, of its encoding, of PyTorch's AdamW, and of a copy.

    A step is what the optimizer does before and after the network: it normalises the gradients that are to be sent and
    moves the weights by their mean. Encoding with error feedback, which any optimizer pays for compression, is a row of
    its own. All rows take turns, so a noisy machine is noisy for all alike; figures are medians.

    Examples:
      python -m experiments bench optimizer
      python -m experiments bench optimizer --size-mb 256 --threads 4

    Args:
        size_mb: fp32 megabytes (2^20 bytes) of the weights: matrices of 1024 x 1024, and as many vectors.
        threads: CPU threads.
        turns: measurements of each row.
        json: write the figures to this file.
    """
    count = round(size_mb * 2**20 / (4 * _WIDTH**2))
    if count < 1 or threads < 1 or turns < 1:
        raise ValueError("size_mb must be at least 4, one matrix; threads and turns at least 1")
    console = Console(highlight=False)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with console.status(f"{size_mb:g} MB, {threads} threads: {turns} turns ..."):
            seconds = measure(count, turns)
    finally:
        torch.set_num_threads(before)
    about = {"cpu_level": kernels.cpu_level(), "threads": threads, "size_mb": size_mb, "turns": turns}
    results = Results("python -m experiments bench optimizer", about=about)
    table = Table()
    for column in ("", "ms", "of fused AdamW"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for name, taken in seconds.items():
        over = taken / seconds[_FUSED]
        results.add(f"cpu_seconds/{name}", taken, "s", over_fused=over)
        table.add_row(name, f"{1e3 * taken:.2f}", f"{over:.2f}x")
    console.print(f"CPU seconds of a step, {size_mb:g} MB of fp32 weights, {threads} threads")
    console.print(table)
    if json:
        results.write(json)
    return 0


def measure(count: int, turns: int) -> Mapping[str, float]:
    """Median CPU seconds of each row, for ``count`` matrices and vectors."""
    shapes = {f"{kind}{i}": shape for i in range(count) for kind, shape in (("w", (_WIDTH, _WIDTH)), ("b", (_WIDTH,)))}
    rows: dict[str, _Row] = {_COPY: _copy(shapes), _FUSED: _fused(shapes)}
    for order in ("pre", "update"):
        rows |= {f"CompressedAdamW, {order}": _compressed(shapes, order)}
    for bits in (2, 4):
        rows[f"encoding in {bits} bits, with error feedback"] = _encoding(shapes, Format(bits, 128))
    taken: dict[str, list[float]] = {name: [] for name in rows}
    for turn in range(turns + 1):
        for name, row in rows.items():
            next(row)
            start = time.process_time()
            next(row)
            if turn:  # the first turn makes state
                taken[name].append(time.process_time() - start)
    return {name: statistics.median(values) for name, values in taken.items()}


def _copy(shapes: Mapping[str, Sequence[int]]) -> _Row:
    pairs = [(torch.randn(*shape), torch.empty(*shape)) for shape in shapes.values()]
    while True:
        yield
        for source, target in pairs:
            target.copy_(source)
        yield


def _parameters(shapes: Mapping[str, Sequence[int]]) -> list[Tensor]:
    return [nn.Parameter(torch.randn(*shape)) for shape in shapes.values()]


def _renew_gradients(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(gradient)


def _fused(shapes: Mapping[str, Sequence[int]]) -> _Row:
    parameters = _parameters(shapes)
    gradients = [torch.randn_like(parameter) for parameter in parameters]
    torch_adamw = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    while True:
        _renew_gradients(parameters, gradients)
        yield
        torch_adamw.step()
        yield


def _compressed(shapes: Mapping[str, Sequence[int]], order: Literal["pre", "update"]) -> _Row:
    parameters = _parameters(shapes)
    gradients = [torch.randn_like(parameter) for parameter in parameters]
    ours = CompressedAdamW(parameters, lr=1e-3, order=order)
    while True:
        _renew_gradients(parameters, gradients)
        yield
        for parameter in parameters:
            assert parameter.grad is not None
            ours.outgoing(parameter, parameter.grad.view(-1), 1.0)
        ours.step()
        yield


def _encoding(shapes: Mapping[str, Sequence[int]], form: Format) -> _Row:
    numel = sum(math.prod(shape) for shape in shapes.values())
    x, table = torch.randn(numel), kernels.Table(torch.tensor([[0, numel, 0, 0, kernels.site_id("bench")]]))
    message = torch.zeros(kernels.bucketed_bytes(numel, form), dtype=torch.uint8)
    residual = Residual(torch.zeros(numel), torch.zeros(numel), 1.0)
    while True:
        yield
        kernels.bucketed_encode(x, table, message, form, key=1, residual=residual)
        yield
