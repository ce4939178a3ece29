"""Section 4.6.4 and figure B.6a: the loss-based metric beside the error of the same compressors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from experiments.framework.claims import Row
from experiments.papers.lgreco.metric import Sensitivity, checkpoint, correlation, sensitivities
from experiments.papers.lgreco.study import TITLES, LGrecoScale, LGrecoStudy
from thinwire.compressors import Compressor, Raw, parse
from thinwire.plan import Plan
from thinwire_tools import plots

_SPECS = ("powersgd(rank=1)", "powersgd(rank=4)", "powersgd(rank=16)")


def steps(scale: LGrecoScale) -> int:
    """Of the checkpoint's training and of every short run, from each seed."""
    return scale.seeds * (scale.metric_start + (1 + len(_SPECS) * scale.metric_layers) * scale.metric_steps)


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
