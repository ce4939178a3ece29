"""Appendix C: errors of learned levels along a training (figures C.2 and C.3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean

import torch
from torch import Tensor

from experiments.framework.claims import Row
from experiments.papers.qsdp.measurements import NUM_RANKS, QSDPStudy
from experiments.papers.qsdp.methods import BUCKET, Size
from thinwire.compressors import CodecCall, Key, Levels, MinMax, Piece, Segments, State
from thinwire.compressors.levels import learned_levels
from thinwire_tools import plots
from thinwire_tools.compare.train import learning_rate, train

LAYERS = {"blocks.0.attention.weight": ("C.2", "an attention layer"), "embedding.weight": ("C.3", "the LM head")}
"""The head is tied to the embedding."""
BITS = {"weights": 5, "gradients": 4}


@dataclass
class Curve:
    """Relative errors of one layer's weights or gradients, by step: uniform, with levels that are learned as often as
    the thesis does, and with those that were learned once."""

    layer: str
    what: str
    steps: list[int] = field(default_factory=list)
    uniform: list[float] = field(default_factory=list)
    learned: list[float] = field(default_factory=list)
    once: list[float] = field(default_factory=list)


def with_levels(values: Tensor, levels: Tensor, bits: int) -> Tensor:
    """What arrives of ``values`` (flat) that are coded with these levels."""
    compressor = Levels(bits=bits, bucket=BUCKET, min_numel=0)
    layer = {"layer": tuple(values.shape)}
    segments = Segments.build([Piece("layer", 0, values.numel(), 0, 0, layer["layer"])])
    state = State.fresh(compressor.slots, values.numel(), 1.0, layer)
    state.layers["layer"].now["levels"].copy_(levels)
    message = torch.zeros(compressor.payload_bytes(values.numel(), values.dtype), dtype=torch.uint8)
    compressor.encode(values, message, CodecCall(segments, Key.derive(0), state=state))
    arrived = torch.empty_like(values)
    compressor.decode(message, arrived, CodecCall(segments))
    return arrived


def relative_error(values: Tensor, arrived: Tensor) -> float:
    """L2 norm of the error for that of the values."""
    return float((arrived - values).norm() / values.norm())


def figures_c_2_and_c_3(study: QSDPStudy) -> list[Row]:
    """Errors along trainings that are not compressed themselves; drawn are those of the first."""
    size = study.scale.size("medium")
    by_seed = [_measure(study, size, seed) for seed in study.seeds]
    _draw(study, size, by_seed[0])
    return [
        row_of_layer(size, layer, [[curve for curve in curves if curve.layer == layer] for curves in by_seed])
        for layer in LAYERS
    ]


def row_of_layer(size: Size, layer: str, by_seed: Sequence[Sequence[Curve]]) -> Row:
    """How many times as much uniform levels err of weights, from the first learning on, with all curves by seed."""
    first = size.learn_at[0]
    every = [curve for curves in by_seed for curve in curves if curve.what == "weights"]
    gains = [c.uniform[i] / c.learned[i] for c in every for i, at in enumerate(c.steps) if at >= first]
    kept = [
        {c.what: {"steps": c.steps, "uniform": c.uniform, "learned": c.learned, "once": c.once} for c in curves}
        for curves in by_seed
    ]
    data = {"curves": kept, "learn_at": list(size.learn_at), "size": size.title}
    return Row(f"figure {LAYERS[layer][0]}", f"gain/{layer}", fmean(gains), "x", data)


def _measure(study: QSDPStudy, size: Size, seed: int) -> list[Curve]:
    """Levels are learned anew from the present ones at the thesis's steps, of all of a layer at once."""
    curves = [Curve(layer, what) for layer in LAYERS for what in BITS]
    levels = {(c.layer, c.what): torch.linspace(0.0, 1.0, 1 << BITS[c.what]) for c in curves}
    once = dict(levels)
    every = study.scale.errors_every
    for step, tensors in _along(study, size, seed):
        for curve in curves:
            key, bits = (curve.layer, curve.what), BITS[curve.what]
            values = tensors[curve.what][curve.layer]
            if step in size.learn_at:
                levels[key] = learned_levels(values, levels[key], BUCKET)
                if step == size.learn_at[0]:
                    once[key] = levels[key]
            if step % every == 0 or step in size.learn_at:
                curve.steps.append(step)
                plain = MinMax(bits=bits, bucket=BUCKET, rounding="nearest").roundtrip(values)
                curve.uniform.append(relative_error(values, plain))
                curve.learned.append(relative_error(values, with_levels(values, levels[key], bits)))
                curve.once.append(relative_error(values, with_levels(values, once[key], bits)))
    return curves


def _along(study: QSDPStudy, size: Size, seed: int) -> Iterator[tuple[int, dict[str, dict[str, Tensor]]]]:
    """Step by step, the weights before it and rank 0's gradients of them, flat, of the layers that are looked at."""
    task = size.task
    model = task.build(seed)
    layers = {name: parameter for name, parameter in model.named_parameters() if name in LAYERS}
    rate = partial(learning_rate, task.learning_rate, steps=task.steps)
    batches = task.batches(seed, 0, NUM_RANKS)
    weights = _copied(layers)
    for step, (loss, _) in enumerate(train(task, model, task.optimizer(model), batches, rate)):
        gradients = {name: p.grad for name, p in layers.items() if p.grad is not None}
        yield step, {"weights": weights, "gradients": _copied(gradients)}
        weights = _copied(layers)
        study.advance(1, f"{size.title}: loss {loss:.2f}")


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().flatten().clone() for name, tensor in tensors.items()}


def _draw(study: QSDPStudy, size: Size, curves: Sequence[Curve]) -> None:
    titles = [f"{c.what} of {LAYERS[c.layer][1]}, {BITS[c.what]} bits" for c in curves]
    figure, panels = plots.canvas(len(curves), titles=titles, x="step", y="relative L2 error")
    for axes, curve in zip(panels, curves, strict=True):
        axes.plot(curve.steps, curve.uniform, color="#0a7d4f", label="uniform")
        axes.plot(curve.steps, curve.learned, color="#1f6fb2", label="learned")
        axes.plot(curve.steps, curve.once, "--", color="#1f6fb2", linewidth=1, label="learned once")
        for step in size.learn_at:
            axes.axvline(step, color="#888888", linewidth=1, linestyle=":")
    plots.save(figure, study.picture("C.2-C.3"))
