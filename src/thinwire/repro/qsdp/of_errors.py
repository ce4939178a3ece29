"""Figures C.2 and C.3: the compression error of learned levels along a training, beside that of uniform ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import torch
from torch import Tensor

from thinwire.compressors import Key, Levels, MinMax, Piece, Segments, State
from thinwire.compressors.levels import learned_levels
from thinwire.repro import plots
from thinwire.repro.cgx.judging import above, all_hold
from thinwire.repro.compare_rank import learning_rate
from thinwire.repro.findings import Finding
from thinwire.repro.lgreco.gradients import take_step
from thinwire.repro.lgreco.judged import at_least
from thinwire.repro.qsdp.sizes import Size
from thinwire.repro.qsdp.study import NUM_RANKS, Scale, Study, Work
from thinwire.repro.qsdp.ways import BUCKET

LAYERS = {"blocks.0.attention.weight": ("C.2", "an attention layer"), "embedding.weight": ("C.3", "the LM head")}
"""The head is tied to the embedding."""
BITS = {"weights": 5, "gradients": 4}
_IN_SYNC = 0.05
"""How much more levels that were learned once may err in the end, and still need no second learning."""


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

    def after(self, step: int) -> list[int]:
        """Indices of the looks that were taken once levels had been learned at ``step``."""
        return [i for i, at in enumerate(self.steps) if at >= step]


def with_levels(values: Tensor, levels: Tensor, bits: int) -> Tensor:
    """What arrives of ``values`` (flat) that are coded with these levels."""
    compressor = Levels(bits=bits, bucket=BUCKET, min_numel=0)
    layer = {"layer": tuple(values.shape)}
    segments = Segments.build([Piece("layer", 0, values.numel(), 0, 0, layer["layer"])])
    state = State.fresh(compressor.slots, values.numel(), 1.0, layer)
    state.layers["layer"].now["levels"].copy_(levels)
    message = torch.zeros(compressor.payload_bytes(values.numel(), values.dtype), dtype=torch.uint8)
    compressor.encode(values, segments, message, key=Key.of(0), state=state)
    arrived = torch.empty_like(values)
    compressor.decode(message, segments, arrived)
    return arrived


def relative_error(values: Tensor, arrived: Tensor) -> float:
    """L2 norm of the error for that of the values."""
    return float((arrived - values).norm() / values.norm())


def errors_work(scale: Scale) -> Work:
    """One training, in this process."""
    return Work(steps=scale.size("medium").task.steps)


def errors(study: Study) -> list[Finding]:
    """Errors along a training that is not compressed itself."""
    size = study.scale.size("medium")
    curves = _measure(study, size)
    _draw(study, size, curves)
    return [row for layer in LAYERS for row in _rows(size, layer, [c for c in curves if c.layer == layer])]


def _measure(study: Study, size: Size) -> list[Curve]:
    """Levels are learned anew from the present ones at the thesis's steps, of all of a layer at once."""
    curves = [Curve(layer, what) for layer in LAYERS for what in BITS]
    levels = {(c.layer, c.what): torch.linspace(0.0, 1.0, 1 << BITS[c.what]) for c in curves}
    once = dict(levels)
    every = study.scale.errors_every
    for step, found in _along(study, size):
        for curve in curves:
            key, bits = (curve.layer, curve.what), BITS[curve.what]
            values = found[curve.what][curve.layer]
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


def _along(study: Study, size: Size) -> Iterator[tuple[int, dict[str, dict[str, Tensor]]]]:
    """Step by step, the weights before it and rank 0's gradients of them, flat, of the layers that are looked at."""
    task = size.task
    model = task.build(0)
    optimizer = task.optimizer(model)
    layers = {name: parameter for name, parameter in model.named_parameters() if name in LAYERS}
    for step, batch in enumerate(task.batches(0, 0, NUM_RANKS)):
        weights = {name: parameter.detach().flatten().clone() for name, parameter in layers.items()}
        rate = learning_rate(task.learning_rate, step, task.steps)
        loss = take_step(task, model, optimizer, batch, rate)
        gradients = {name: p.grad.flatten() for name, p in layers.items() if p.grad is not None}
        yield step, {"weights": weights, "gradients": gradients}
        study.advance(1, f"{size.title}: loss {loss:.2f}")


def _rows(size: Size, layer: str, curves: Sequence[Curve]) -> list[Finding]:
    number, title = LAYERS[layer]
    figure = f"figure {number}"
    first = size.learn_at[0]
    gains = {c.what: [c.uniform[i] / c.learned[i] for i in c.after(first)] for c in curves}
    aged = {c.what: [c.once[i] / c.learned[i] for i in c.after(size.learn_at[-1])] for c in curves}
    shown = "; ".join(
        f"{c.what}, {BITS[c.what]} bits: {fmean(c.learned[i] for i in c.after(first)):.4f} against "
        f"{fmean(c.uniform[i] for i in c.after(first)):.4f}"
        for c in curves
    )
    curves_of = {c.what: {"steps": c.steps, "uniform": c.uniform, "learned": c.learned, "once": c.once} for c in curves}
    return [
        Finding(
            figure,
            f"gain/{layer}",
            fmean(gains["weights"]),
            "x",
            f"{title}: the error of learned levels is constantly lower, W5G4",
            f"relative L2 error, {shown}",
            all_hold(at_least(values, 1.0) for values in gains.values()),
            {"curves": curves_of, "learn_at": list(size.learn_at), "size": size.title},
        ),
        Finding(
            figure,
            f"gain_by_bits/{layer}",
            fmean(gains["gradients"]) / fmean(gains["weights"]),
            "x",
            f"{title}: the fewer bits, the larger the gap: gradients of 4 bits gain more than weights of 5",
            f"uniform levels err {fmean(gains['gradients']):.3f} times as much of gradients, "
            f"{fmean(gains['weights']):.3f} times of weights",
            above([g / w for g, w in zip(gains["gradients"], gains["weights"], strict=True)]),
        ),
        Finding(
            figure,
            f"once/{layer}",
            max(fmean(values) for values in aged.values()),
            "x",
            f"{title}: learning once, at the start, is enough (section C.3)",
            "levels learned once err in the end "
            + ", ".join(f"{fmean(values):.3f} times as much of {what}" for what, values in aged.items())
            + " as those learned again",
            all(fmean(values) <= 1 + _IN_SYNC for values in aged.values()),
        ),
    ]


def _draw(study: Study, size: Size, curves: Sequence[Curve]) -> None:
    titles = [f"{c.what} of {LAYERS[c.layer][1]}, {BITS[c.what]} bits" for c in curves]
    figure, panels = plots.canvas(len(curves), titles=titles, x="step", y="relative L2 error")
    for axes, curve in zip(panels, curves, strict=True):
        axes.plot(curve.steps, curve.uniform, color="#0a7d4f", label="uniform")
        axes.plot(curve.steps, curve.learned, color="#1f6fb2", label="learned")
        axes.plot(curve.steps, curve.once, "--", color="#1f6fb2", linewidth=1, label="learned once")
        for step in size.learn_at:
            axes.axvline(step, color="#888888", linewidth=1, linestyle=":")
    plots.save(figure, study.picture("C.2-C.3"))
