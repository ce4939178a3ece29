"""Table 3.4: reduction schemes under 4-bit min-max, and what each does to the gradient (section 3.5.1)."""

from __future__ import annotations

from statistics import fmean

from thinwire.repro import plots
from thinwire.repro.cgx.contest import Times
from thinwire.repro.cgx.judging import above, all_hold
from thinwire.repro.cgx.models import Model
from thinwire.repro.cgx.study import Scale, Study
from thinwire.repro.cgx.throughput import items_per_s, throughput
from thinwire.repro.cgx.ways import NOTHING, Way
from thinwire.repro.findings import Finding

SRA = Way("sra", "SRA", "#0a7d4f")
RING = Way("ring", "ring", "#c0392b", topology="ring")
TREE = Way("tree", "tree", "#d98a00", topology="tree")
OTHERS = (
    Way("allgather", "all-gather", "#8250c4", topology="allgather"),
    Way("parameter_server", "parameter server", "#1f6fb2", topology="parameter_server"),
    Way("hierarchical", "hierarchical", "#888888", topology="hierarchical(inside=same)", ranks_per_node=2),
)
"""That the thesis has no figures of. The hierarchy takes two ranks for a node, whose link is as slow as the others."""
_SCHEMES = (SRA, RING, TREE, *OTHERS)
_THESIS = {
    "gpt": {"sra": 260_000.0, "ring": 236_000.0, "tree": 202_000.0},
    "cnn": {"sra": 2900.0, "ring": 2830.0, "tree": 2770.0},
}


def ways(scale: Scale) -> list[Way]:
    return [*_SCHEMES, NOTHING]


def table_3_4(study: Study) -> list[Finding]:
    """Throughput of every scheme, and its error."""
    models = study.scale.models
    found = {model.name: study.times(model, ways(study.scale)) for model in models}
    rows = [row for model in models for row in _rows(study, model, found[model.name])]
    errors = study.errors(models[0], (SRA, RING, TREE))
    _draw(study, found, errors)
    return [*rows, _error_row(models[0], errors)]


def _rows(study: Study, model: Model, times: Times) -> list[Finding]:
    thesis, where = _THESIS[model.name], study.where(model)
    first = all_hold([above(times.over(SRA.name, RING.name)), above(times.over(SRA.name, TREE.name))])
    against = {way.name: times.times_faster(SRA.name, way.name) for way in (RING, TREE)}
    return [
        Finding(
            "3.4",
            f"sra_fastest/{model.name}",
            min(against.values()),
            "x",
            f"{model.title}: SRA is faster than ring ({thesis['sra'] / thesis['ring']:.2f}x) and tree "
            f"({thesis['sra'] / thesis['tree']:.2f}x; {model.thesis})",
            f"{against['ring']:.2f}x ring's throughput, {against['tree']:.2f}x tree's, {where}",
            study.verdict(first),
        ),
        Finding(
            "3.4",
            f"ring_over_tree/{model.name}",
            times.times_faster(RING.name, TREE.name),
            "x",
            f"{model.title}: ring is faster than tree ({thesis['ring'] / thesis['tree']:.2f}x, {model.thesis})",
            f"{times.times_faster(RING.name, TREE.name):.2f}x",
            study.verdict(above(times.over(RING.name, TREE.name))),
        ),
        *throughput("3.4", model, times, ways(study.scale), reference=SRA, thesis=thesis, where=where),
    ]


def _error_row(model: Model, errors: dict[str, list[float]]) -> Finding:
    mean = {name: fmean(values) for name, values in errors.items()}
    less = [
        above([other / own for own, other in zip(errors[SRA.name], errors[way.name], strict=True)])
        for way in (RING, TREE)
    ]
    return Finding(
        "3.4",
        f"error/{model.name}",
        mean[SRA.name],
        "",
        "SRA has the lowest compression error, for it compresses the fewest times (section 3.5.1)",
        "relative error of the mean that arrives: " + ", ".join(f"{name} {value:.3f}" for name, value in mean.items()),
        all_hold(less),
        {"by_step": errors, "mean": mean},
    )


def _draw(study: Study, found: dict[str, Times], errors: dict[str, list[float]]) -> None:
    models = study.scale.models
    titles = [*(f"{model.title} {study.where(model)}" for model in models), "error of the mean that arrives"]
    labels = [*(model.unit for model in models), f"relative error ({models[0].title})"]
    figure, panels = plots.canvas(len(titles), titles=titles, x="", y=labels)
    for axes, model in zip(panels, models, strict=False):
        shown = [(way.title, way.colour, items_per_s(model, found[model.name], way)) for way in ways(study.scale)]
        plots.bars(axes, shown)
    plots.bars(panels[-1], [(way.title, way.colour, fmean(errors[way.name])) for way in (SRA, RING, TREE)])
    plots.save(figure, study.picture("3.4"))
