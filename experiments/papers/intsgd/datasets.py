"""Binary classification: what scikit-learn ships, data made with the shapes of four LibSVM sets, and LibSVM files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from experiments.papers.intsgd.logistic import Data
from experiments.papers.intsgd.world import Array

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
    """One of `NAMES`."""
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


def _maker(name: str) -> Callable[[], Data]:
    return lambda: made(name, SHAPES[name])


_MAKERS: dict[str, Callable[[], Data]] = {
    "breast_cancer": _breast_cancer,
    "digits": _digits,
    **{name: _maker(name) for name in SHAPES},
}

NAMES = tuple(_MAKERS)


def size(name: str) -> int:
    """Entries of a set that is made; 0 of others."""
    return round(SHAPES[name].rows * SHAPES[name].entries) if name in SHAPES else 0
