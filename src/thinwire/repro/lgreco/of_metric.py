"""Section 4.6.4 and figure B.6a: the loss-based metric beside the error that plans are made by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from thinwire.compressors import Compressor, Raw, parse
from thinwire.plan import Plan
from thinwire.repro import plots
from thinwire.repro.findings import Finding
from thinwire.repro.lgreco.metric import Correlation, Sensitivity, checkpoint, correlation, sensitivities
from thinwire.repro.lgreco.study import TITLES, Scale, Study, Work

_SPECS = ("powersgd(rank=1)", "powersgd(rank=4)", "powersgd(rank=16)")
_HIGH = 0.7
"""Correlation that counts as high; the thesis shows it in a picture, without a bound."""


def work(scale: Scale) -> Work:
    """Steps of the checkpoint's training and of every short run."""
    return Work(steps=scale.metric_start + (1 + len(_SPECS) * scale.metric_layers) * scale.metric_steps)


def metric(study: Study) -> list[Finding]:
    """Short trainings from one checkpoint, one layer compressed in each."""
    scale = study.scale

    def on_step() -> None:
        study.advance(1, "short trainings, one layer compressed in each")

    start = checkpoint(scale.gpt, scale.metric_start, on_step=on_step)
    chosen = candidates(dict(start.model.named_parameters()), scale.metric_layers)
    rows = sensitivities(scale.gpt, start, chosen, steps=scale.metric_steps, on_step=on_step)
    found = correlation(rows)
    _draw(study, rows, found)
    return [row(rows, found, scale.metric_steps)]


def candidates(parameters: Mapping[str, object], count: int) -> dict[str, list[Compressor]]:
    """The ``count`` largest layers that low ranks fit, with each of the ranks."""
    shapes = {name: tuple(getattr(parameter, "shape", ())) for name, parameter in parameters.items()}
    kept = [name for name, c in Plan.build(shapes, _SPECS[0]).layers.items() if not isinstance(c, Raw)]
    largest = sorted(kept, key=lambda name: -_numel(shapes[name]))[:count]
    return {name: [parse(spec) for spec in _SPECS] for name in largest}


def row(rows: Sequence[Sensitivity], found: Correlation, steps: int) -> Finding:
    known = found.spearman == found.spearman
    return Finding(
        "figure B.6a",
        "correlation",
        found.spearman,
        "",
        "the loss-based metric and the error have a high correlation (section 4.6.4)",
        f"over {found.count} layers and ranks after {steps} steps: Spearman's {found.spearman:.2f}, Pearson's "
        f"{found.pearson:.2f}",
        found.spearman >= _HIGH if known else None,
        {"pearson": found.pearson, "spearman": found.spearman, "steps": steps, "rows": [vars(r) for r in rows]},
    )


def _numel(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _draw(study: Study, rows: Sequence[Sensitivity], found: Correlation) -> None:
    title = f"{TITLES['gpt']}, PowerSGD: Spearman's {found.spearman:.2f}"
    figure, (axes,) = plots.canvas(1, titles=[title], x="squared L2 error", y="loss beyond uncompressed (nats)")
    colours = dict(zip(_SPECS, ("#c0392b", "#d98a00", "#0a7d4f"), strict=True))
    for spec, colour in colours.items():
        mine = [r for r in rows if r.spec == spec]
        axes.scatter([r.error for r in mine], [r.loss_difference for r in mine], color=colour, label=spec)
    axes.set_xscale("log")
    plots.save(figure, study.picture("B.6a"))
