"""Rows that the thesis's tables of throughput have in common: items per second by way, beside its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from thinwire.repro import plots
from thinwire.repro.cgx.contest import NUM_RANKS, Place, Times
from thinwire.repro.cgx.models import Model
from thinwire.repro.cgx.study import Study
from thinwire.repro.cgx.ways import Way
from thinwire.repro.findings import Finding


def throughput(
    part: str,
    model: Model,
    times: Times,
    ways: Sequence[Way],
    *,
    reference: Way,
    thesis: Mapping[str, float],
    where: str,
) -> list[Finding]:
    """A row for each of ``ways`` with its items per second, as multiples of ``reference``'s too; ``thesis`` has its
    own by name of the way, where it has one. The first row shows them all."""
    shown = [f"{way.title} {items_per_s(model, times, way):,.0f}" for way in ways]
    rows = []
    for way in ways:
        theirs = thesis.get(way.name)
        rows.append(
            Finding(
                part,
                f"items_per_s/{model.name}/{way.name}",
                items_per_s(model, times, way),
                model.unit,
                "",
                f"{model.unit} {where}: {', '.join(shown)}",
                None,
                {
                    "model": model.title,
                    "model_of_thesis": model.thesis,
                    "way": way.title,
                    "kind": way.kind,
                    "spec": way.spec if way.kind in ("thinwire", "blob") else None,
                    "topology": way.topology if way.kind in ("thinwire", "blob") else None,
                    "transport": way.transport if way.kind == "thinwire" else None,
                    "reference": reference.title,
                    "relative": times.times_faster(way.name, reference.name),
                    "thesis": theirs,
                    "thesis_relative": theirs / thesis[reference.name] if theirs is not None else None,
                    "step_s": times.rounds[way.name],
                    "payload_bytes": times.payload_bytes.get(way.name),
                },
                aside=f"{model.title}'s throughput" if not rows else "",
            )
        )
    return rows


def items_per_s(model: Model, times: Times, way: Way) -> float:
    """Of all ranks together."""
    return NUM_RANKS * model.items_per_batch / times.step_s(way.name)


def chart(
    study: Study,
    part: str,
    found: Mapping[str, Times],
    ways: Mapping[str, Sequence[Way]],
    *,
    place: Place = "links",
    seconds: bool = False,
) -> None:
    """A bar for each way by model: items per second, or ``seconds`` a step."""
    models = study.scale.models
    titles = [f"{model.title} {study.where(model, place)}" for model in models]
    labels = ["seconds a step" if seconds else model.unit for model in models]
    figure, panels = plots.canvas(len(models), titles=titles, x="", y=labels)
    for axes, model in zip(panels, models, strict=True):
        times = found[model.name]
        value = (
            (lambda way, t=times: t.step_s(way.name))
            if seconds
            else (lambda way, m=model, t=times: items_per_s(m, t, way))
        )
        plots.bars(axes, [(way.title, way.colour, value(way)) for way in ways[model.name]])
    plots.save(figure, study.picture(part))
