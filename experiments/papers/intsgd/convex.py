"""Part (a), figure 6: what its claims make of the recorded curves of logistic regression, which are means over seeds.

The regression was computed by numpy alone, without thinwire; its code is in commit 05e5ab10f667."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.framework.claims import Rows

Array = NDArray[np.float64]

_FLOOR = 1e-13
"""A gap below this is rounding error of fp64."""
_REACHED = 1e-11
"""A gap that is small enough to tell how fast a method is."""


def steps_to(steps: Array, gap: Array, target: float) -> float:
    """Steps after which ``gap [records]`` is ``target``, between two records by its logarithm; infinity if never."""
    below = np.nonzero(gap <= target)[0]
    if not len(below):
        return math.inf
    at = int(below[0])
    if at == 0 or gap[at] == gap[at - 1]:
        return float(steps[at])
    share = math.log(gap[at - 1] / target) / math.log(gap[at - 1] / gap[at])
    return float(steps[at - 1] + share * (steps[at] - steps[at - 1]))


def linearity(steps: Array, gap: Array) -> float:
    """R² of a straight line through the gap's logarithm over the second half of the way to its end, or to the floor of
    rounding error; 0 where there is too little to tell."""
    kept = np.nonzero(gap > 10 * _FLOOR)[0]
    kept = kept[len(kept) // 2 :]
    if len(kept) < 3 or np.ptp(gap[kept]) == 0:
        return 0.0
    correlation = np.corrcoef(steps[kept], np.log(gap[kept]))[0, 1]
    return float(correlation**2) if correlation < 0 else 0.0


def gone_over(rows: Rows) -> list[str]:
    """In the order in which they were gone over."""
    return list(dict.fromkeys(name.split("/")[1] for name in rows if name.startswith("gap/")))


def curve(rows: Rows, dataset: str, method: str, key: str) -> Array:
    return np.array(rows[f"gap/{dataset}/{method}"][key])


def straightness(rows: Rows, dataset: str, name: str) -> float:
    return linearity(curve(rows, dataset, name, "steps"), curve(rows, dataset, name, "gap_mean"))


def gradients_taken(rows: Rows, dataset: str) -> tuple[float, float, float]:
    """Gradient evaluations of VR-IntDIANA and of IntDIANA to the gap that the worse of them ends with; and that gap."""
    curves: dict[str, Mapping[str, Any]] = {name: rows[f"gap/{dataset}/{name}"] for name in ("vr-intdiana", "intdiana")}
    target = max(_REACHED, *(min(curve["gap_mean"]) for curve in curves.values()))
    taken = []
    for curve in curves.values():
        steps = np.array(curve["steps"])
        taken.append(float(np.interp(steps_to(steps, np.array(curve["gap_mean"]), target), steps, curve["gradients"])))
    return taken[0], taken[1], target


def growth(rows: Rows, dataset: str) -> tuple[float, float, float]:
    """The largest integer that IntGD sends at first and at last, and IntDIANA at last."""
    sent = curve(rows, dataset, "intgd", "largest_sent")
    # Up to the first record all may have been exact.
    return float(sent[1] or sent[2]), float(sent[-1]), float(curve(rows, dataset, "intdiana", "largest_sent")[-1])
