"""``python -m experiments bench first-epoch``: a pipeline's only epoch, in which no sample comes twice."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, stdev
from typing import Literal

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from experiments.bench.changes import Cut
from experiments.bench.formats import rotated
from experiments.papers.aqsgd import tasks
from experiments.papers.aqsgd.stages import Part, build
from thinwire.compressors import Coded, parse
from thinwire.kernels import derive_key
from thinwire_tools.compare.gpt import next_token_loss
from thinwire_tools.results import OutputFile, Results

_TASK = replace(tasks.SCRATCH, samples=2400, steps=150)
_SMOKE_TASK = replace(tasks.SCRATCH_SMOKE, steps=2)
_STAGES = 4
_BACKWARD = "maxabs(bits=8)"
TILE = 64
"""Channels of a tile."""
_TILE_BITS = 3.5 + (2 * 16 + 1) / TILE
"""Half of the tiles in 3 bits and half in 4, two scales of 16 bits each, and a bit that says which."""

FP32, AQSGD, CONTROL = "FP32", "AQ-SGD: first visits in full", "maxabs(bits=2, rounding=stochastic)"
SPECS = (
    "maxabs(bits=4, rounding=stochastic)",
    "maxabs(bits=4, rounding=nearest)",
    "minmax(bits=3, rounding=nearest)",
    "gaussian(bits=4)",
    "gaussian(bits=3)",
    CONTROL,
)
Ranking = Literal["entropy", "range"]
_BINS = 16
"""Of equal width, for the entropy of a tile."""

Send = Callable[[Tensor, int], Tensor]
"""What arrives of activations (samples, positions, channels); the number is the key of random draws."""


@dataclass(frozen=True)
class Method:
    """How activations are sent, and the bits of one of them."""

    send: Send
    bits: float


def first_epoch(*, seeds: int = 3, smoke: bool = False, json: OutputFile = None) -> int:
    """Train a GPT of four stages for one epoch from random weights, with activations sent in few bits.

    AQ-SGD sends a sample's first visit in full, so that it is FP32 with compressed gradients here. Others compress
    activations as they are: in compressors of thinwire, and in tiles after TAH-Quant (He et al. 2025), 64 channels of
    one position in 3 or 4 bits, rounded to nearest between the tile's extremes; the half of each sample's tiles with
    the greater entropy (of 16 bins of the tile's values), or with the greater range, has 4 bits. A tile may be rotated
    by an orthonormal Hadamard matrix with random signs. Gradients have 8 bits. Losses are compared with FP32's, seed by
    seed; the control, three levels rounded at random, must be worse than all.

    Examples:
      python -m experiments bench first-epoch
      python -m experiments bench first-epoch --seeds 1 --json first-epoch.json

    Args:
        seeds: trainings of each method.
        smoke: a tiny model and two steps: the same path, no figures worth keeping.
        json: write the figures to this file.
    """
    console = Console(highlight=False)
    task, trained = _SMOKE_TASK if smoke else _TASK, {}
    chosen = _methods(task)
    with console.status("training ...") as status:
        for name, method in chosen.items():
            status.update(f"training: {name}", spinner=None)
            trained[name] = [_train(task, method.send, seed, exact=name == FP32) for seed in range(seeds)]
    about = {"seeds": seeds, "steps": task.steps, "samples": task.samples, "backward": _BACKWARD, "smoke": smoke}
    results = Results("python -m experiments bench first-epoch", about={**about, "stages": _STAGES})
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for column in ("method", "bits", "error", "loss, held out", "above FP32's", "±"):
        table.add_column(column, no_wrap=column != "method")
    for name, runs in trained.items():
        above = [run.held_out / exact.held_out - 1 for run, exact in zip(runs, trained[FP32], strict=True)]
        figures = {
            "bits": chosen[name].bits,
            "error": fmean(run.error for run in runs),
            "held_out": fmean(run.held_out for run in runs),
            "above_fp32": fmean(above),
            "deviation": stdev(above) if seeds > 1 else 0.0,
        }
        for figure, value in figures.items():
            results.add(f"{figure}/{name}", value, "bit" if figure == "bits" else "")
        bits, error, loss, gap, deviation = figures.values()
        table.add_row(name, f"{bits:.2f}", f"{error:.3f}", f"{loss:.4f}", f"{gap:+.2%}", f"{deviation:.2%}")
    console.print(table)
    if json:
        results.write(json)
        console.print(f"Figures: {json}", soft_wrap=True, markup=False)
    return 0


def _methods(task: tasks.FineTuning) -> dict[str, Method]:
    methods = {name: Method(lambda x, key: x, 32.0) for name in (FP32, AQSGD)}
    for spec in SPECS:
        coder = parse(spec)
        assert isinstance(coder, Coded)
        numel = task.model.context * task.model.width
        methods[spec] = Method(partial(_coded, coder), 8 * coder.wire_bytes((numel,)) / numel)
    rankings: tuple[Ranking, ...] = ("entropy", "range")
    for ranking in rankings:
        for rotate in (False, True):
            name = f"tiles of 3 and 4 bits, by {ranking}{', rotated' if rotate else ''}"
            methods[name] = Method(lambda x, _, by=ranking, turn=rotate: tiled(x, by, rotate=turn), _TILE_BITS)
    return methods


def _coded(coder: Coded, x: Tensor, key: int) -> Tensor:
    return coder.roundtrip(x.reshape(-1), key).view(x.shape)


def tiled(x: Tensor, by: Ranking, *, rotate: bool) -> Tensor:
    """What arrives of activations (samples, positions, channels) in tiles of 3 and 4 bits."""
    tile = min(TILE, x.shape[-1])
    values = rotated(x.flatten(), tile, seed=0) if rotate else x.flatten()
    tiles = values.view(-1, tile)
    spread = tiles.amax(1) - tiles.amin(1) if by == "range" else entropy(tiles)
    ranks = spread.view(len(x), -1).argsort(1).argsort(1)
    more = (ranks >= ranks.shape[1] // 2).view(-1, 1)
    arrived = torch.where(more, _nearest(tiles, 4), _nearest(tiles, 3)).flatten()
    return (rotated(arrived, tile, seed=0, back=True) if rotate else arrived).view(x.shape)


def _nearest(tiles: Tensor, bits: int) -> Tensor:
    """Tiles rounded to levels between their extremes, whose lowest and whose distance have 16 bits."""
    low, high = tiles.amin(1, keepdim=True).bfloat16().float(), tiles.amax(1, keepdim=True)
    unit = ((high - low) / (2**bits - 1)).bfloat16().float()
    codes = ((tiles - low) / unit.where(unit > 0, 1.0)).round().clamp(0, 2**bits - 1)
    return low + codes * unit


def entropy(tiles: Tensor) -> Tensor:
    """In bits, of the distribution of each tile's values over `_BINS` bins between its extremes."""
    low, high = tiles.amin(1, keepdim=True), tiles.amax(1, keepdim=True)
    span = (high - low).where(high > low, 1.0)
    at = ((tiles - low) / span * _BINS).long().clamp(0, _BINS - 1)
    shares = tiles.new_zeros(len(tiles), _BINS).scatter_add_(1, at, torch.ones_like(tiles)) / tiles.shape[1]
    return torch.special.entr(shares).sum(1) / math.log(2)


@dataclass(frozen=True)
class _Run:
    held_out: float
    error: float
    """The mean share of activations that was lost at a boundary."""


def _train(task: tasks.FineTuning, send: Send, seed: int, *, exact: bool) -> _Run:
    """Train for one epoch. ``exact``: gradients are not compressed."""
    gpt, gradients = build(task, None, seed), parse(_BACKWARD)
    parts = nn.ModuleList(Part(gpt, index, _STAGES, half="") for index in range(_STAGES))
    optimizer = task.optimizer(parts)
    lost: list[float] = []
    for step, ids in enumerate(task.order(seed, 0)[: task.steps]):
        for group in optimizer.param_groups:
            group["lr"] = task.rate(step)
        tokens, targets = task.tuned_on(ids)
        x = parts[0](tokens)
        for boundary, part in enumerate(list(parts)[1:]):
            key = derive_key(seed, step, boundary)

            def there(a: Tensor, key: int = key) -> Tensor:
                arrived = send(a, key)
                lost.append(float((arrived - a).norm() / a.norm()))
                return arrived

            def back(gradient: Tensor, key: int = key) -> Tensor:
                if exact:
                    return gradient
                return gradients.roundtrip(gradient.reshape(-1), key).view(gradient.shape)

            x = part(Cut.apply(x, there, back))
        optimizer.zero_grad(set_to_none=True)
        next_token_loss(x, targets).backward()
        optimizer.step()
    with torch.no_grad():
        losses = []
        for tokens, targets in task.held_out():
            x = tokens
            for part in parts:
                x = part(x)
            losses.append(float(next_token_loss(x, targets)))
    return _Run(fmean(losses), fmean(lost))
