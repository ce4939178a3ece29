"""``python -m experiments bench optimizer``: what an optimizer's step costs, beside PyTorch's fused AdamW."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.optim import AdamW

from experiments.framework.pages import show
from thinwire import kernels
from thinwire.collectives.layout import SLICE
from thinwire.kernels import AdamGradient, Format, MovingAverage, Residual
from thinwire.optim import CompressedAdamW
from thinwire_tools.results import OutputFile, Results

_Turns = Iterator[None]
"""It stops before each turn, with new gradients, and is timed until it stops again."""


class _Row(NamedTuple):
    """One row of the table."""

    turns: _Turns
    touched: int
    """Values that it reads or writes for each weight, if every pass over memory is counted: 2 for a copy."""


_FUSED, _COPY = "torch.optim.AdamW(fused=True)", "copy_"
_WIDTH = 1024


def optimizer(*, size_mb: float = 64.0, threads: int = 1, turns: int = 15, json: OutputFile = None) -> int:
    """CPU seconds of `CompressedAdamW` in both orders, of its encoding, of PyTorch's AdamW, and of a copy.

    A step is what the optimizer does before and after the network: it normalizes the gradients that are to be sent and
    moves the weights by their mean. Encoding with error feedback, which any optimizer pays for compression, is a row of
    its own; so are normalizing and encoding together, all gradients before all messages or those of each message just
    before it. All rows take turns, so a noisy machine is noisy for all alike; figures are medians.

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
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with Console().status(f"{size_mb:g} MB, {threads} threads: {turns} turns ..."):
            measured = measure(count, turns)
    finally:
        torch.set_num_threads(before)
    about = {"cpu_level": kernels.cpu_level(), "threads": threads, "size_mb": size_mb, "turns": turns}
    results = Results("python -m experiments bench optimizer", about=about)
    for name, (taken, touched) in measured.items():
        over = taken / measured[_FUSED][0]
        of_copy = touched / taken / (measured[_COPY][1] / measured[_COPY][0])
        results.add(f"cpu_seconds/{name}", taken, "s", over_fused=over, touched=touched, of_copy=of_copy)
    show("optimizer", results, json)
    return 0


def measure(count: int, turns: int) -> Mapping[str, tuple[float, int]]:
    """Median CPU seconds of each row, for ``count`` matrices and vectors, and the values it touches for each weight."""
    shapes = {f"{kind}{i}": shape for i in range(count) for kind, shape in (("w", (_WIDTH, _WIDTH)), ("b", (_WIDTH,)))}
    numel = sum(math.prod(shape) for shape in shapes.values())
    rows = {_COPY: _Row(_copy(shapes), 2), _FUSED: _Row(_stepping(shapes, partial(AdamW, lr=1e-3, fused=True)), 7)}
    for order in ("pre", "update"):
        rows[f"CompressedAdamW, {order}"] = _Row(_stepping(shapes, partial(CompressedAdamW, lr=1e-3, order=order)), 9)
    for bits in (2, 4):
        rows[f"encoding in {bits} bits, with error feedback"] = _Row(_encoding(numel, Format(bits, 128)), 3)
    for how, together in (("apart", False), ("together", True)):
        rows[f"normalizing and encoding in 2 bits, {how}"] = _Row(_sending(numel, Format(2, 128), together), 7)
    taken: dict[str, list[float]] = {name: [] for name in rows}
    for turn in range(turns + 1):
        for name, row in rows.items():
            next(row.turns)
            start = time.process_time()
            next(row.turns)
            if turn:  # the first turn makes state
                taken[name].append(time.process_time() - start)
    return {name: (statistics.median(values), rows[name].touched) for name, values in taken.items()}


def _copy(shapes: Mapping[str, Sequence[int]]) -> _Turns:
    pairs = [(torch.randn(*shape), torch.empty(*shape)) for shape in shapes.values()]
    while True:
        yield
        for source, target in pairs:
            target.copy_(source)
        yield


def _stepping(shapes: Mapping[str, Sequence[int]], make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> _Turns:
    parameters: list[Tensor] = [nn.Parameter(torch.randn(*shape)) for shape in shapes.values()]
    gradients = [torch.randn_like(parameter) for parameter in parameters]
    optimizer = make(parameters)
    while True:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(gradient)
        yield
        if isinstance(optimizer, CompressedAdamW):
            optimizer.outgoing([(p, p.grad) for p in parameters if p.grad is not None], 1.0)
        optimizer.step()
        yield


def _encoding(numel: int, form: Format) -> _Turns:
    x, message = torch.randn(numel), torch.zeros(kernels.bucketed_bytes(numel, form), dtype=torch.uint8)
    residual, table = _residual(numel), _table(0, numel)
    while True:
        yield
        kernels.bucketed_encode(x, table, message, form, key=1, residual=residual)
        yield


def _sending(numel: int, form: Format, together: bool) -> _Turns:
    """Normalizing gradients, and encoding them in messages as long as the library's: ``together``, or one after the
    other."""
    gradients, x, residual = torch.randn(numel), torch.empty(numel), _residual(numel)
    before, after = torch.rand(numel), torch.empty(numel)
    slices = [slice(start, min(start + SLICE, numel)) for start in range(0, numel, SLICE)]
    tables = [_table(part.start, part.stop - part.start) for part in slices]
    message = torch.zeros(kernels.bucketed_bytes(SLICE, form), dtype=torch.uint8)
    layers = [AdamGradient(x[at], MovingAverage(before[at], after[at], 0.999), None, 1e-8, 1e-3) for at in slices]
    while True:
        x.copy_(gradients)
        yield
        if not together:
            kernels.adam_normalize(layers)
        for layer, table in zip(layers, tables, strict=True):
            if together:
                kernels.adam_normalize([layer])
            kernels.bucketed_encode(x, table, message, form, key=1, residual=residual)
        yield


def _residual(numel: int) -> Residual:
    return Residual(torch.zeros(numel), torch.zeros(numel), 1.0)


def _table(start: int, numel: int) -> kernels.Table:
    return kernels.Table(torch.tensor([[start, numel, 0, 0, kernels.site_id("bench")]]))
