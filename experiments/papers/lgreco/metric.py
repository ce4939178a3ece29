"""Section 4.6.4 and figure B.6a: the loss-based metric of section 4.4, beside the error of the same compressors.

The metric is what compressing one layer alone does to the loss.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import nn

from experiments.framework.claims import Row
from experiments.papers.lgreco.gradients import first_batches, take_step
from experiments.papers.lgreco.study import TITLES, LGrecoStudy
from thinwire.compressors import Compressor, Raw, parse, unwrap
from thinwire.plan import Plan
from thinwire_tools import plots
from thinwire_tools.compare.statistics import need_scipy


@dataclass(frozen=True)
class Sensitivity:
    """One layer, one compressor: the two metrics."""

    layer: str
    spec: str
    loss_difference: float
    """Loss after the steps, with this layer alone compressed, less that without any compression."""
    error: float
    """Squared L2 error of what that compressor makes of the layer's gradients, summed over the same steps of the
    uncompressed run."""


@dataclass(frozen=True)
class Correlation:
    """Of the two metrics over all layers and compressors: of the values, and of their order."""

    pearson: float
    spearman: float
    count: int


@dataclass(frozen=True)
class Checkpoint:
    """A model and its optimizer after some steps of training, at the learning rate that holds then."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: int
    learning_rate: float


def checkpoint(task: Any, steps: int, *, seed: int = 0, on_step: Callable[[], None] | None = None) -> Checkpoint:
    """Train uncompressed for ``steps`` steps in this process, at the task's highest rate after a warm-up."""
    model = task.build(seed)
    optimizer = task.optimizer(model)
    for step, batch in enumerate(first_batches(task, steps, seed=seed), 1):
        take_step(task, model, optimizer, batch, task.learning_rate * min(1.0, step / max(1, steps // 2)))
        if on_step is not None:
            on_step()
    return Checkpoint(model, optimizer, steps, task.learning_rate)


def sensitivities(
    task: Any,
    start: Checkpoint,
    candidates: Mapping[str, Sequence[Compressor]],
    *,
    steps: int,
    seed: int = 0,
    on_step: Callable[[], None] | None = None,
) -> list[Sensitivity]:
    """Both metrics of every layer of ``candidates`` with each of its compressors.

    Every run starts from ``start`` and sees the same ``steps`` batches; in each but one, one layer's gradient is what a
    receiver would see of it, without error feedback (thesis, section 4.4). The loss is that over the batches
    themselves, at the end; errors are of the same compressors, which draw the same at the same step.

    Args:
        task: what is trained (`thinwire_tools.compare.tasks.Task`), on one rank's batches.
        start: where all runs begin; it is left as it is.
        candidates: by parameter name, compressors that take a layer of this shape.
        steps: of every run; the thesis takes 50.
        seed: of the batches.
        on_step: called after every step.

    Raises:
        ValueError: a name is none of the model's.
    """
    known = {name for name, _ in start.model.named_parameters()}
    if not known.issuperset(candidates):
        raise ValueError(f"the model has no parameter {sorted(set(candidates) - known)[0]!r}")
    batches = first_batches(task, steps, after=start.step, seed=seed)
    run = _Run(task, start, batches, on_step or _nothing)
    cells = [(name, compressor) for name, compressors in candidates.items() for compressor in compressors]
    errors = dict.fromkeys(cells, 0.0)

    def look(model: nn.Module, step: int) -> None:
        for name, compressor in cells:
            gradient = model.get_parameter(name).grad
            if gradient is not None:
                lost = gradient - unwrap(compressor).roundtrip(gradient, step)
                errors[name, compressor] += float(lost.square().sum(dtype=torch.float64))

    plain = run(look)
    return [
        Sensitivity(name, str(compressor), run(_compressing(name, compressor)) - plain, error)
        for (name, compressor), error in errors.items()
    ]


def correlation(rows: Sequence[Sensitivity]) -> Correlation:
    """Pearson's and Spearman's coefficients of the two metrics.

    Raises:
        ValueError: fewer than three rows.
        ImportError: scipy is missing.
    """
    if len(rows) < 3:
        raise ValueError(f"{len(rows)} values have no correlation: give more layers or compressors")
    stats = need_scipy()
    losses, errors = [row.loss_difference for row in rows], [row.error for row in rows]
    # A metric that is the same for all has none, which scipy warns of.
    if len(set(losses)) == 1 or len(set(errors)) == 1:
        return Correlation(float("nan"), float("nan"), len(rows))
    pearson = float(stats.pearsonr(losses, errors).statistic)
    return Correlation(pearson, float(stats.spearmanr(losses, errors).statistic), len(rows))


class _Run:
    """Short trainings from one checkpoint."""

    def __init__(self, task: Any, start: Checkpoint, batches: Sequence[Any], on_step: Callable[[], None]) -> None:
        self._task, self._start, self._batches, self._on_step = task, start, batches, on_step

    def __call__(self, change: Callable[[nn.Module, int], None]) -> float:
        """Train with gradients changed by ``change``; the mean loss over the batches after that."""
        model = copy.deepcopy(self._start.model)
        optimizer = self._task.optimizer(model)
        optimizer.load_state_dict(copy.deepcopy(self._start.optimizer.state_dict()))
        for step, batch in enumerate(self._batches):
            rate = self._start.learning_rate

            def now(model: nn.Module, step: int = step) -> None:
                change(model, step)

            take_step(self._task, model, optimizer, batch, rate, now)
            self._on_step()
        with torch.no_grad():
            return sum(float(self._task.loss(model, batch)) for batch in self._batches) / len(self._batches)


def _compressing(name: str, compressor: Compressor) -> Callable[[nn.Module, int], None]:
    inner = unwrap(compressor)

    def change(model: nn.Module, step: int) -> None:
        parameter = model.get_parameter(name)
        if parameter.grad is not None:
            parameter.grad.copy_(inner.roundtrip(parameter.grad, step))

    return change


def _nothing() -> None:
    """For who does not watch."""


_SPECS = ("powersgd(rank=1)", "powersgd(rank=4)", "powersgd(rank=16)")


def metric(study: LGrecoStudy) -> list[Row]:
    """Short trainings from a checkpoint of each seed, one layer compressed in each."""
    scale = study.scale

    def on_step() -> None:
        study.advance(1, "short trainings, one layer compressed in each")

    measured: list[list[Sensitivity]] = []
    for seed in study.seeds:
        start = checkpoint(scale.gpt, scale.metric_start, seed=seed, on_step=on_step)
        chosen = candidates(dict(start.model.named_parameters()), scale.metric_layers)
        of_seed = sensitivities(scale.gpt, start, chosen, steps=scale.metric_steps, seed=seed, on_step=on_step)
        measured.append(of_seed)
    correlations = [correlation(of_seed) for of_seed in measured]
    spearman = fmean(one.spearman for one in correlations)
    _draw(study, measured, spearman)
    data = {
        "correlations": [vars(one) for one in correlations],
        "steps": scale.metric_steps,
        "rows": [[vars(row) for row in of_seed] for of_seed in measured],
    }
    return [Row("figure B.6a", "correlation", spearman, "", data)]


def candidates(parameters: Mapping[str, object], count: int) -> dict[str, list[Compressor]]:
    """The ``count`` largest layers that low ranks fit, with each of the ranks."""
    shapes = {name: tuple(getattr(parameter, "shape", ())) for name, parameter in parameters.items()}
    kept = [name for name, c in Plan.build(shapes, _SPECS[0]).layers.items() if not isinstance(c, Raw)]
    largest = sorted(kept, key=lambda name: -math.prod(shapes[name]))[:count]
    return {name: [parse(spec) for spec in _SPECS] for name in largest}


def _draw(study: LGrecoStudy, measured: Sequence[Sequence[Sensitivity]], spearman: float) -> None:
    title = f"{TITLES['gpt']}, PowerSGD: Spearman's {spearman:.2f}"
    figure, (axes,) = plots.canvas(1, titles=[title], x="squared L2 error", y="loss beyond uncompressed (nats)")
    colors = dict(zip(_SPECS, ("#c0392b", "#d98a00", "#0a7d4f"), strict=True))
    for spec, color in colors.items():
        mine = [row for of_seed in measured for row in of_seed if row.spec == spec]
        axes.scatter([row.error for row in mine], [row.loss_difference for row in mine], color=color, label=spec)
    axes.set_xscale("log")
    plots.save(figure, study.picture("B.6a"))
