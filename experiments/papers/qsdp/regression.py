"""Figure C.5: linear regression whose weights are quantized in every step, with random shift and without."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.framework.claims import Row
from experiments.papers.qsdp.measurements import QSDPScale, QSDPStudy
from thinwire.compressors import parse
from thinwire_tools import plots
from thinwire_tools.compare.statistics import relative_differences

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


def num_steps(scale: QSDPScale) -> int:
    """Of all descents."""
    return len(_problems(scale)) * 2 * len(METHODS) * scale.regression_seeds * scale.regression_steps


def figure_c_5(study: QSDPStudy) -> list[Row]:
    """Descents with batches, as in the thesis, and with whole gradients, of which only quantization is left."""
    problems = [make() for make in _problems(study.scale)]
    descents = {(p.name, batches): _descents(study, p, batches) for p in problems for batches in (True, False)}
    _draw(study, problems, descents)
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


def _draw(
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
