"""Logistic regression on LIBSVM's data sets, and on others where these are not at hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.papers.intsgd.world import Array, Draw

_LEAST_ROWS = 24


@dataclass(frozen=True)
class Shape:
    """Of a LibSVM set: rows, features, entries a row, share of positive labels; ``categories``: every row has one of
    each of so many attributes' values (0: a varying number of words instead); ``weighted``: entries are not just 1."""

    rows: int
    features: int
    entries: float
    positive: float
    categories: int = 0
    weighted: bool = False


SHAPES = {
    "a5a": Shape(6414, 123, 13.9, 0.24, categories=14),
    "mushrooms": Shape(8124, 112, 21.0, 0.52, categories=21),
    "w8a": Shape(49749, 300, 11.7, 0.03),
    "real-sim": Shape(72309, 20958, 51.3, 0.31, weighted=True),
}


def load(name: str) -> Data:
    """One of `_MAKERS`."""
    return _MAKERS[name]()


def libsvm(path: Path) -> Data:
    """A LibSVM file, or one compressed by gzip or bzip2; of its two classes the lower label becomes −1.

    Raises ``ValueError`` if it has not two classes, or too few rows.
    """
    from sklearn.datasets import load_svmlight_file

    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: give a file in LibSVM's format")
    rows, labels = load_svmlight_file(str(path))
    classes = np.unique(labels)
    if len(classes) != 2:
        raise ValueError(f"{path} has {len(classes)} classes: logistic regression takes two")
    if rows.shape[0] < _LEAST_ROWS:
        raise ValueError(f"{path} has {rows.shape[0]} rows: at least {_LEAST_ROWS}, two for each of twelve workers")
    return Data(path.stem, "LibSVM file", rows.tocsr(), np.where(labels == classes[0], -1.0, 1.0))


def _breast_cancer() -> Data:
    from sklearn.datasets import load_breast_cancer

    rows, classes = load_breast_cancer(return_X_y=True)
    return _shipped("breast_cancer", rows, np.asarray(classes) == 1)


def _digits() -> Data:
    from sklearn.datasets import load_digits

    rows, classes = load_digits(return_X_y=True)
    return _shipped("digits", rows, np.asarray(classes) >= 5)


def _shipped(name: str, rows: Any, positive: Any) -> Data:
    from scipy.sparse import csr_matrix

    # To unit range, as LibSVM's sets are.
    values = np.asarray(rows, dtype=np.float64)
    low, high = values.min(0), values.max(0)
    values = (values - low) / np.where(high > low, high - low, 1.0)
    return Data(name, "ships with scikit-learn", csr_matrix(values), np.where(positive, 1.0, -1.0))


def made(name: str, shape: Shape) -> Data:
    """Data of a shape, a function of the two alone. Popularities of features follow Zipf's law, and which are popular
    drifts with the row's index, so that workers hold different data; labels are those of a planted linear model, its
    margin noisy."""
    from scipy.sparse import csr_matrix

    random = np.random.Generator(np.random.Philox(key=sum(name.encode())))
    drift = np.linspace(0.0, 1.0, shape.rows)
    draw = _categories if shape.categories else _words
    index, columns = draw(shape, drift, random)
    entries = np.ones(len(columns))
    if shape.weighted:
        entries = random.gamma(2.0, 0.5, len(columns))
    rows = csr_matrix((entries, (index, columns)), shape=(shape.rows, shape.features))
    rows.sum_duplicates()
    if shape.weighted:
        norms = np.sqrt(rows.multiply(rows).sum(1))
        rows = csr_matrix(rows.multiply(1.0 / np.maximum(norms, 1e-12)))
    else:
        rows.data[:] = 1.0
    planted = random.standard_normal(shape.features)
    margins = rows @ planted
    margins = (margins - margins.mean()) / margins.std() + 0.5 * random.standard_normal(shape.rows) + 0.5 * drift
    positive = margins > np.quantile(margins, 1.0 - shape.positive)
    return Data(name, f"made, with the shape of {name}", rows, np.where(positive, 1.0, -1.0))


def _categories(shape: Shape, drift: Array, random: np.random.Generator) -> tuple[Any, Any]:
    """One value of each attribute in every row."""
    cuts = np.sort(random.choice(np.arange(1, shape.features), shape.categories - 1, replace=False))
    bounds = [0, *cuts.tolist(), shape.features]
    columns = []
    for low, high in pairwise(bounds):
        columns.append(low + _zipf(high - low, 1.2, drift, random))
    return np.tile(np.arange(shape.rows), shape.categories), np.concatenate(columns)


def _words(shape: Shape, drift: Array, random: np.random.Generator) -> tuple[Any, Any]:
    """A number of words in every row, at least one."""
    counts = 1 + random.poisson(shape.entries - 1, shape.rows)
    index = np.repeat(np.arange(shape.rows), counts)
    return index, _zipf(shape.features, 1.0, drift[index], random)


def _zipf(size: int, power: float, drift: Array, random: np.random.Generator) -> Any:
    """A choice among ``size`` for every element of ``drift``, which is the chance of the second of two orders."""
    chances = np.arange(1, size + 1.0) ** -power
    ranks = np.minimum(np.searchsorted(np.cumsum(chances / chances.sum()), random.random(len(drift))), size - 1)
    orders = np.stack([random.permutation(size) for _ in range(2)])
    return orders[(random.random(len(drift)) < drift).astype(np.int64), ranks]


_MAKERS: dict[str, Callable[[], Data]] = {
    "breast_cancer": _breast_cancer,
    "digits": _digits,
    **{name: partial(made, name, shape) for name, shape in SHAPES.items()},
}


def size(name: str) -> int:
    """Entries of a set that is made; 0 of others."""
    return round(SHAPES[name].rows * SHAPES[name].entries) if name in SHAPES else 0


NUM_WORKERS = 12
BATCH_SHARE = 0.05
REGULARIZATION = 0.3
"""λ in 1/m: about the paper's on its four data sets."""
_MOST_ITERATIONS = 5000
_TOLERANCE = 1e-16
_DENSE_SHARE = 0.2


@dataclass(frozen=True)
class Data:
    """Rows in a scipy CSR matrix and labels −1 or 1; ``origin`` says where they are from."""

    name: str
    origin: str
    rows: Any
    labels: Array


class Logistic:
    """``f_i(x) = (1/m) Σ log(1 + exp(−b aᵀx)) + (λ/2)‖x‖²`` over worker i's m rows, ``λ = regularization / m``.

    Rows that do not divide by the number of workers are left out at the end. Points are ``[d, seeds]``, local gradients
    ``[workers, d, seeds]``.
    """

    def __init__(self, data: Data, num_workers: int = NUM_WORKERS, regularization: float = REGULARIZATION) -> None:
        self.data, self.num_workers = data, num_workers
        self.m = data.rows.shape[0] // num_workers
        if self.m < 1:
            raise ValueError(f"{data.name} has {data.rows.shape[0]} rows, fewer than {num_workers} workers")
        rows = data.rows[: self.m * num_workers].tocsr()
        labels = data.labels[: self.m * num_workers]
        self.penalty = regularization / self.m
        # b·a instead of a: labels are needed nowhere else.
        signed = rows.multiply(labels[:, None]).tocsr()
        parts = [signed[i * self.m : (i + 1) * self.m] for i in range(num_workers)]
        dense = signed.nnz > _DENSE_SHARE * np.prod(signed.shape)
        self._parts = [part.toarray() if dense else part for part in parts]
        self._turned = [np.ascontiguousarray(part.T) if dense else part.T.tocsr() for part in self._parts]
        self._columns, self._entries = _padded(signed)

    @property
    def num_coordinates(self) -> int:
        return self.data.rows.shape[1]

    @property
    def batch(self) -> int:
        """Samples of a worker's mini-batch."""
        return max(1, int(BATCH_SHARE * self.m))

    @property
    def batch_share(self) -> float:
        """Share of its data that a worker's mini-batch has."""
        return self.batch / self.m

    def smoothness(self) -> float:
        """L of f: a quarter of the largest eigenvalue of AᵀA / N, and λ. By the power method, a per mille above it."""
        vector = np.random.Generator(np.random.Philox(key=0)).standard_normal((self.num_coordinates, 1))
        value = 0.0
        for _ in range(100):
            vector /= np.linalg.norm(vector)
            vector = sum(t @ (a @ vector) for a, t in zip(self._parts, self._turned, strict=True))
            before, value = value, float(np.linalg.norm(vector))
            if abs(value - before) < 1e-4 * value:
                break
        return 1.001 * value / (4 * self.m * self.num_workers) + self.penalty

    def gradients(self, x: Array) -> tuple[Array, Array]:
        """``∇f_i(x)`` of all workers, and ``f(x)`` ``[seeds]``."""
        gradients, loss = np.empty((self.num_workers, *x.shape)), np.zeros(x.shape[1])
        for i, (part, turned) in enumerate(zip(self._parts, self._turned, strict=True)):
            margins = part @ x
            loss += np.logaddexp(0.0, -margins).sum(0)
            gradients[i] = turned @ (-_sigmoid(-margins) / self.m)
        gradients += self.penalty * x
        return gradients, loss / (self.m * self.num_workers) + 0.5 * self.penalty * (x**2).sum(0)

    def differences(self, x: Array, w: Array, uniform: Draw, step: int) -> Array:
        """``∇f_{i,B}(x) − ∇f_{i,B}(w)`` on a mini-batch B that each worker draws."""
        n, d, seeds = self.num_workers, self.num_coordinates, x.shape[1]
        # Samples with replacement: worker i's are rows i·m to (i + 1)·m.
        picked = (uniform(step, (n, self.batch)) * self.m).astype(np.int64)
        picked += self.m * np.arange(n)[:, None, None]
        columns, entries = self._columns[picked], self._entries[picked]
        at = columns * seeds + np.arange(seeds)[:, None]
        slopes = [-_sigmoid(-np.einsum("ibsk,ibsk->ibs", entries, point.ravel()[at])) for point in (x, w)]
        weights = entries * ((slopes[0] - slopes[1]) / self.batch)[..., None]
        at += d * seeds * np.arange(n)[:, None, None, None]
        summed = np.bincount(at.ravel(), weights=weights.ravel(), minlength=n * d * seeds).reshape(n, d, seeds)
        return summed + self.penalty * (x - w)


def _sigmoid(t: Array) -> Array:
    # Through tanh, which neither overflows nor warns.
    return 0.5 + 0.5 * np.tanh(0.5 * t)


def _padded(rows: Any) -> tuple[NDArray[np.int64], Array]:
    """Columns and entries of every row, ``[rows, most in a row]``, filled up with zeros in column 0."""
    counts = np.diff(rows.indptr)
    width = int(counts.max(initial=1))
    columns, entries = np.zeros((rows.shape[0], width), np.int64), np.zeros((rows.shape[0], width))
    filled = np.arange(width) < counts[:, None]
    columns[filled], entries[filled] = rows.indices, rows.data
    return columns, entries


@dataclass(frozen=True)
class Optimum:
    """The least value of f. ``descent`` is what gradient descent alone came to, in ``iterations``."""

    value: float
    descent: float
    iterations: int


def optimum(problem: Logistic, smoothness: float) -> Optimum:
    """Gradient descent to 5000 iterations or ‖∇f‖² ≤ 1e-16, and L-BFGS from where it ends: a gap to a point that is
    not the least would become negative."""
    from scipy.optimize import minimize

    x, value, iterations = np.zeros((problem.num_coordinates, 1)), 0.0, 0
    for iterations in range(_MOST_ITERATIONS + 1):
        gradients, values = problem.gradients(x)
        gradient, value = gradients.mean(0), float(values[0])
        if float((gradient**2).sum()) <= _TOLERANCE or iterations == _MOST_ITERATIONS:
            break
        x = x - gradient / smoothness

    def evaluate(point: Array) -> tuple[float, Array]:
        gradients, values = problem.gradients(point[:, None])
        return float(values[0]), gradients.mean(0)[:, 0]

    limits = {"maxiter": 2000, "maxfun": 4000, "ftol": 0.0, "gtol": 1e-13, "maxcor": 30}
    minimum = minimize(evaluate, x[:, 0], jac=True, method="L-BFGS-B", options=limits)
    return Optimum(min(value, float(minimum.fun)), value, iterations)
