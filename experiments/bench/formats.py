"""``python -m experiments bench formats``: error at equal bytes of bucketed formats, rotated and with spikes kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from thinwire.compressors.gaussian import MAGNITUDES
from thinwire.kernels import derive_key
from thinwire.plan import Filter
from thinwire_tools.compare.gpt import GPT
from thinwire_tools.compare.tasks import SIZES, GPTTask
from thinwire_tools.compare.train import learning_rate
from thinwire_tools.results import OutputFile, Results

BITS = (2, 3, 4)
KINDS = ("gradients", "weights", "activations")
_STEPS, _SMOKE_STEPS = (20, 100, 199), (3,)
_SIDE_BITS = 0.5
"""Bits an element for scales and spikes, the same for all: buckets are as wide as that makes them."""
_SCALE_BITS = 32
_SPIKE_BITS = 2 * (16 + 8)
"""Of a bucket's two spikes: 16 bits for the value, 8 for its place."""

Quantiser = Callable[[Tensor, int, Tensor | float], Tensor]
"""From buckets (buckets, elements), bits, and what is added before codes are cut off, to what is decoded."""


@dataclass(frozen=True)
class Format:
    """A quantiser of buckets with ``num_scales`` scales of 32 bits each."""

    quantise: Quantiser
    num_scales: int
    stochastic: bool = False


def _minmax(rows: Tensor, bits: int, noise: Tensor | float) -> Tensor:
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    unit = (high - low) / (2**bits - 1)
    codes = ((rows - low) / unit.where(unit > 0, 1.0) + noise).floor().clamp(0, 2**bits - 1)
    return low + codes * unit


def _maxabs(rows: Tensor, bits: int, noise: Tensor | float) -> Tensor:
    levels = 2 ** (bits - 1) - 1
    unit = rows.abs().amax(1, keepdim=True) / levels
    return (rows / unit.where(unit > 0, 1.0) + noise).floor().clamp(-levels, levels) * unit


def _midrise(rows: Tensor, bits: int, noise: Tensor | float) -> Tensor:
    half = 2 ** (bits - 1)
    unit = rows.abs().amax(1, keepdim=True) / half
    codes = (rows / unit.where(unit > 0, 1.0) + noise - 0.5).floor().clamp(-half, half - 1)
    return (codes + 0.5) * unit


def _gaussian(rows: Tensor, bits: int, noise: Tensor | float) -> Tensor:
    magnitudes = torch.tensor(MAGNITUDES[bits])
    scale = rows.square().mean(1, keepdim=True).sqrt()
    scaled = rows / scale.where(scale > 0, 1.0)
    nearest = torch.bucketize(scaled.abs(), (magnitudes[1:] + magnitudes[:-1]) / 2)
    return torch.where(scaled < 0, -magnitudes[nearest], magnitudes[nearest]) * scale


FORMATS = {
    "minmax": Format(_minmax, 2),
    "minmax, stochastic": Format(_minmax, 2, stochastic=True),
    "maxabs": Format(_maxabs, 1),
    "maxabs, midrise": Format(_midrise, 1),
    "gaussian": Format(_gaussian, 1),
}
"""Rounded to nearest unless their name says otherwise."""

TREATMENTS = {
    "as it is": (0, False),
    "rotate 32": (32, False),
    "rotate 128": (128, False),
    "spikes": (0, True),
    "rotate 32, spikes": (32, True),
}
"""The block of the Hadamard transform (0: none), and whether each bucket's extremes are kept apart."""


def formats(*, smoke: bool = False, json: OutputFile = None) -> int:
    """Measure the error of bucketed formats at equal bytes, on what the demo's GPT has and sends in training.

    Gradients, weights and activations (what each block hands to the next) are recorded at three steps, layer by layer.
    Formats are those of min-max, max-abs, max-abs without a level at zero, and Lloyd-Max levels of a normal
    distribution, in 2, 3 and 4 bits. Before it, a block of elements may be rotated by an orthonormal Hadamard matrix
    with random signs; and each bucket's minimum and maximum may be sent apart, in 16 bits with their places, so that
    the others' grid is narrower (FlashCommunication V2). Half a bit an element is for scales and spikes, so that a
    bucket with more of them is wider and all messages have the same size.

    Examples:
      python -m experiments bench formats
      python -m experiments bench formats --json formats.json

    Args:
        smoke: a tiny model and few steps, in seconds: the same path, no figures worth keeping.
        json: write the figures to this file.
    """
    console = Console(highlight=False)
    steps = _SMOKE_STEPS if smoke else _STEPS
    with console.status(f"training for {steps[-1] + 1} steps ..."):
        recorded = _record(SIZES["smoke" if smoke else "demo"], steps)
    about = {
        "steps": steps,
        "side_bits": _SIDE_BITS,
        "elements": {k: sum(x.numel() for x in recorded[k]) for k in KINDS},
    }
    results = Results("python -m experiments bench formats", about={**about, "smoke": smoke})
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for column in ("format", "", *(f"{kind[0]} {bits}" for kind, bits in product(KINDS, BITS))):
        table.add_column(column, no_wrap=True)
    for (name, form), (treatment, (block, spikes)) in product(FORMATS.items(), TREATMENTS.items()):
        cells = []
        for kind, bits in product(KINDS, BITS):
            error = error_of(recorded[kind], form, bits, block=block, spikes=spikes)
            results.add(f"{kind}/{bits}/{name}/{treatment}", error, "", bucket=_bucket(form, spikes=spikes))
            cells.append(f"{error:.3f}")
        table.add_row(name, treatment, *cells)
    console.print("Relative error of gradients, weights and activations, in 2, 3 and 4 bits:")
    console.print(table)
    if json:
        results.write(json)
        console.print(f"Figures: {json}", soft_wrap=True, markup=False)
    return 0


def _record(task: GPTTask, steps: Sequence[int]) -> dict[str, list[Tensor]]:
    """What a training has at ``steps``, flat: of each weight matrix its gradient and its values, and of each block what
    it hands to the next."""
    model, keep = task.build(0), Filter()
    optimizer = task.optimizer(model)
    weights = [p for n, p in model.named_parameters() if not keep.keeps_raw(n, p.shape)]
    tensors: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
    for step, (x, y) in enumerate(islice(task.batches(0, 0, 1), steps[-1] + 1)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(task.learning_rate, step, task.steps)
        optimizer.zero_grad(set_to_none=True)
        task.loss(model, (x, y)).backward()
        if step in steps:
            tensors["gradients"] += [p.grad.detach().flatten().clone() for p in weights if p.grad is not None]
            tensors["weights"] += [p.detach().flatten().clone() for p in weights]
            tensors["activations"] += list(_activations(model, x))
        optimizer.step()
    return tensors


@torch.no_grad()
def _activations(model: GPT, tokens: Tensor) -> Iterator[Tensor]:
    x = model.embedding(tokens)
    for block in model.blocks[:-1]:
        x = block(x, model.cos, model.sin)
        yield x.flatten()


def _bucket(form: Format, *, spikes: bool) -> int:
    return round((form.num_scales * _SCALE_BITS + spikes * _SPIKE_BITS) / _SIDE_BITS)


def error_of(tensors: Sequence[Tensor], form: Format, bits: int, *, block: int, spikes: bool) -> float:
    """Root mean square over ``tensors`` of ``‖x − Q(x)‖ / ‖x‖``. A rotation changes no norm, so it is not undone."""
    squares = []
    for index, x in enumerate(tensors):
        wide = x.double()
        norm = wide.square().sum()
        if not norm:
            continue
        values = rotated(wide, block, seed=index) if block else wide
        squares.append(sum(_square_error(rows, form, bits, spikes) for rows in _rows(values, form, spikes)) / norm)
    return math.sqrt(float(sum(squares)) / len(squares))


def rotated(x: Tensor, block: int, *, seed: int, back: bool = False) -> Tensor:
    """Blocks of a flat tensor, a multiple of ``block`` long, times random signs, transformed by an orthonormal Hadamard
    matrix; ``back`` undoes that."""
    generator = torch.Generator().manual_seed(derive_key(seed) >> 1)
    signs = torch.randint(0, 2, x.shape, generator=generator) * 2 - 1
    rows, half = (x if back else x * signs).view(-1, block), 1
    while half < block:
        pairs = rows.view(-1, 2, half)
        rows = torch.cat((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), 1)
        half *= 2
    values = rows.flatten() / math.sqrt(block)
    return values * signs if back else values


def _rows(x: Tensor, form: Format, spikes: bool) -> Iterator[Tensor]:
    """The buckets of a flat tensor: those that are whole, and the last one."""
    bucket = _bucket(form, spikes=spikes)
    whole = x.numel() // bucket * bucket
    if whole:
        yield x[:whole].view(-1, bucket)
    if whole < x.numel():
        yield x[whole:].view(1, -1)


def _square_error(rows: Tensor, form: Format, bits: int, spikes: bool) -> Tensor:
    lost = rows.new_zeros(())
    if spikes:
        # Quantisers do not look at an element's place in its bucket, so that those between the extremes may be sorted.
        rows = rows.sort(1).values
        extremes = rows[:, [0, -1]]
        lost += (extremes.bfloat16() - extremes).square().sum()
        rows = rows[:, 1:-1]
    noise = torch.rand(rows.shape, generator=torch.Generator().manual_seed(0)) if form.stochastic else 0.5
    return lost + (form.quantise(rows, bits, noise) - rows).square().sum()
