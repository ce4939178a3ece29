"""Appendix C: errors of learned levels along a training (C.2, C.3), and a regression with quantized weights (C.5).

The regression's weights are quantized in every step, with random shift and without.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.framework.claims import Row
from experiments.papers.lgreco.gradients import take_step
from experiments.papers.qsdp.measurements import NUM_RANKS, QSDPScale, QSDPStudy
from experiments.papers.qsdp.methods import BUCKET, Size
from thinwire.compressors import CodecCall, Key, Levels, MinMax, Piece, Segments, State, parse
from thinwire.compressors.levels import learned_levels
from thinwire_tools import plots
from thinwire_tools.compare.statistics import relative_differences
from thinwire_tools.compare.train import learning_rate

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
    optimizer = task.optimizer(model)
    layers = {name: parameter for name, parameter in model.named_parameters() if name in LAYERS}
    for step, batch in enumerate(task.batches(seed, 0, NUM_RANKS)):
        weights = {name: parameter.detach().flatten().clone() for name, parameter in layers.items()}
        rate = learning_rate(task.learning_rate, step, task.steps)
        loss = take_step(task, model, optimizer, batch, rate)
        gradients = {name: p.grad.flatten() for name, p in layers.items() if p.grad is not None}
        yield step, {"weights": weights, "gradients": gradients}
        study.advance(1, f"{size.title}: loss {loss:.2f}")


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


_BITS, _BUCKET, BATCH = 8, 16, 64
_FEATURES, _FACTORS = 90, 30
"""YearPredictionMSD has 90 features, averages and covariances of timbre, which hang together."""
_NOISE = 1.5
_STEP = {True: 0.2, False: 0.5}
"""Learning rate of batches and of whole gradients, times the largest curvature."""
_TAIL = 0.1
_SAME = 1e-5
"""Directions of features of which less is left are rounding."""

GRADIENTS = f"qsgd(bits={_BITS}, bucket={_BUCKET})"
TITLES = {"diabetes": "diabetes", "made": f"made, {_FEATURES} features"}
"""Of the problems."""
METHODS: dict[str, tuple[str, str]] = {
    "exact": ("not quantized", "#555555"),
    "qsgd": ("QSGD", "#c0392b"),
    "shift": ("QSGD, weights with random shift", "#0a7d4f"),
    "grid": ("QSGD, weights on the same grid, rounded one by one", "#1f6fb2"),
}
_WEIGHTS = {
    "qsgd": GRADIENTS,
    "shift": f"lattice(bits={_BITS}, bucket={_BUCKET})",
    "grid": f"minmax(bits={_BITS}, bucket={_BUCKET})",
}


@dataclass(frozen=True)
class Problem:
    """``½ mean (x·w − y)²``, of ``features [rows, d]`` and ``targets [rows]``, all of variance one."""

    name: str
    title: str
    features: Tensor
    targets: Tensor

    def loss(self, weights: Tensor) -> float:
        return float((self.features @ weights - self.targets).square().mean() / 2)

    @functools.cached_property
    def least(self) -> float:
        """The loss at the optimum: of weights of the least norm, since the square of a feature of two values is that
        feature once more."""
        features, targets = self.features.double(), self.targets.double().unsqueeze(1)
        solved = torch.linalg.lstsq(features, targets, rcond=_SAME, driver="gelsd").solution
        return float((features @ solved - targets).square().mean() / 2)

    @functools.cached_property
    def curvature(self) -> float:
        """The largest: beta of the thesis's theorem 2."""
        return float(torch.linalg.eigvalsh(self.features.T @ self.features / len(self.features))[-1])


def diabetes() -> Problem:
    """scikit-learn's: 442 patients, ten measurements and their products."""
    from sklearn.datasets import load_diabetes

    patients: Any = load_diabetes()
    columns, targets = patients.data, patients.target
    first, second = np.triu_indices(columns.shape[1])
    features = np.concatenate([columns, _even(columns)[:, first] * _even(columns)[:, second]], axis=1)
    return _problem("diabetes", features, targets)


def made(rows: int) -> Problem:
    """Data made with YearPredictionMSD's number of features."""
    random = np.random.default_rng(0)
    hidden = random.standard_normal((rows, _FACTORS))
    loadings = random.standard_normal((_FACTORS, _FEATURES)) / np.sqrt(_FACTORS)
    features = hidden @ loadings + 0.5 * random.standard_normal((rows, _FEATURES))
    weights = random.standard_normal(_FEATURES) / np.sqrt(_FEATURES)
    targets = _even(features) @ weights + _NOISE * random.standard_normal(rows)
    return _problem("made", features, targets)


def _problem(name: str, features: np.ndarray, targets: np.ndarray) -> Problem:
    return Problem(
        name, TITLES[name], torch.from_numpy(_even(features)).float(), torch.from_numpy(_even(targets)).float()
    )


def _even(values: np.ndarray) -> np.ndarray:
    return (values - values.mean(0)) / values.std(0)


def descend(problem: Problem, method: str, seed: int, steps: int, *, batches: bool) -> Iterator[float]:
    """``x ← Q^w(x − η Q^g(g))`` (equation 5.2); yields the loss above the optimum after every step."""
    weights_by = parse(_WEIGHTS[method]) if method in _WEIGHTS else None
    gradients_by = parse(GRADIENTS)
    weights = torch.zeros(problem.features.shape[1])
    random = torch.Generator().manual_seed(seed)
    eta = _STEP[batches] / problem.curvature
    for step in range(steps):
        features, targets = problem.features, problem.targets
        if batches:
            rows = torch.randint(len(targets), (BATCH,), generator=random)
            features, targets = features[rows], targets[rows]
        gradient = features.T @ (features @ weights - targets) / len(targets)
        key = 2 * (seed * steps + step)
        if weights_by is None:
            weights = weights - eta * gradient
        else:
            weights = weights_by.roundtrip(weights - eta * gradients_by.roundtrip(gradient, key), key + 1)
        yield problem.loss(weights) - problem.least


def figure_c_5(study: QSDPStudy) -> list[Row]:
    """Descents with batches, as in the thesis, and with whole gradients, of which only quantization is left."""
    problems = [make() for make in _problems(study.scale)]
    descents = {(p.name, batches): _descents(study, p, batches) for p in problems for batches in (True, False)}
    _draw_descents(study, problems, descents)
    return [row_of_descents(name, batches, curves) for (name, batches), curves in descents.items()]


def row_of_descents(problem: str, batches: bool, descents: dict[str, list[list[float]]]) -> Row:
    """How much further above the optimum random shift ends than QSGD, as a share."""
    ends = {method: [tail(curve) for curve in curves] for method, curves in descents.items()}
    data = {"ends": ends, "curves": {method: thinned(mean_curve(curves)) for method, curves in descents.items()}}
    name = f"shift_over_qsgd/{problem}/{'batches' if batches else 'whole'}"
    return Row("figure C.5", name, fmean(relative_differences(ends["shift"], ends["qsgd"])), "", data)


def _problems(scale: QSDPScale) -> list[Callable[[], Problem]]:
    return [diabetes, lambda: made(scale.regression_rows)]


def _descents(study: QSDPStudy, problem: Problem, batches: bool) -> dict[str, list[list[float]]]:
    """Curves by method and seed."""
    scale, descents = study.scale, {}
    for method, (title, _) in METHODS.items():
        descents[method] = []
        for seed in range(scale.regression_seeds):
            descents[method].append(list(descend(problem, method, seed, scale.regression_steps, batches=batches)))
            study.advance(scale.regression_steps, f"{problem.title}: {title}")
    return descents


def tail(curve: Sequence[float]) -> float:
    """Mean of the last tenth."""
    return fmean(curve[-max(1, round(len(curve) * _TAIL)) :])


def mean_curve(curves: Sequence[Sequence[float]]) -> list[float]:
    return [fmean(values) for values in zip(*curves, strict=True)]


def thinned(curve: Sequence[float]) -> list[float]:
    """About 50 values, evenly spread."""
    return list(curve[:: max(1, len(curve) // 50)])


def _draw_descents(
    study: QSDPStudy, problems: Sequence[Problem], descents: dict[tuple[str, bool], dict[str, list[list[float]]]]
) -> None:
    panels = [(problem, batches) for problem in problems for batches in (True, False)]
    titles = [f"{problem.title}, {'batches' if batches else 'whole gradients'}" for problem, batches in panels]
    figure, axes_of = plots.canvas(len(panels), titles=titles, x="step", y="loss above the optimum")
    for axes, (problem, batches) in zip(axes_of, panels, strict=True):
        for method, (title, color) in METHODS.items():
            axes.plot(mean_curve(descents[problem.name, batches][method]), color=color, linewidth=1, label=title)
        axes.set_yscale("log")
    plots.save(figure, study.picture("C.5"))
