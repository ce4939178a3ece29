"""Bits by boundary from each link's measured rate: four stages, of which the last one's link is slow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median

from thinwire.repro import plots
from thinwire.repro.aqsgd.judged import lost
from thinwire.repro.aqsgd.rank import Asked
from thinwire.repro.aqsgd.study import MORE_STAGES, Scale, Study, Work
from thinwire.repro.aqsgd.trainings import Trained, Trainings
from thinwire.repro.aqsgd.ways import FP32, aqsgd, by_link
from thinwire.repro.cgx.judging import above
from thinwire.repro.findings import Finding

FAST, SLOW = "200mbit", "3mbit"
MANY, FEW = aqsgd(4, 8), aqsgd(2, 4)
LINKED = by_link()
WAYS = (FP32, MANY, FEW, LINKED)
_SKIP = 10
"""Steps that are not timed: links are measured in them, and the first visits of samples are whole."""
_FASTER = 1.2


def links_work(scale: Scale) -> Work:
    """A training of each over loopback for FP32's loss, and over uneven links of the others."""
    return Work(steps=len(WAYS) * scale.seeds * scale.large.steps, own=frozenset({scale.large}))


def links(study: Study) -> list[Finding]:
    """Loss and seconds of a step, by uniform bits and by bits that follow the links."""
    rates = ",".join([FAST] * (MORE_STAGES - 1) + [SLOW]) if study.emulated else None
    found: dict[str, list[Trained]] = {}
    base = study.trainings(MORE_STAGES)
    found[FP32.name] = [base.train(study.scale.large, FP32, seed, study.shower(FP32.title)) for seed in study.seeds]
    with Trainings(MORE_STAGES, study.first(), rates) as uneven:
        for way in WAYS[1:]:
            found[way.name] = []
        # Seed by seed, so that what else the machine does is shared by all ways.
        for seed in study.seeds:
            for way in WAYS[1:]:
                run = uneven.train(study.scale.large, way, seed, study.shower(way.title), Asked(held_out=False))
                found[way.name].append(run)
    _draw(study, found)
    return [*_losses(study, found), _speed(study, found), _chosen(study, found)]


def step_s(run: Trained) -> float:
    """Median seconds of a step past the first epoch."""
    timed = run.step_s[max(_SKIP, run.steps_per_epoch) :] or run.step_s
    return median(timed)


def _losses(study: Study, found: Mapping[str, Sequence[Trained]]) -> list[Finding]:
    rows = []
    for way in WAYS[1:]:
        told = lost(found[way.name], found[FP32.name], study.scale.margin)
        ours = way is LINKED
        rows.append(
            Finding(
                "links",
                f"loss/{way.name}",
                told.estimate.mean,
                "",
                f"bits by link: within {study.scale.margin:.0%} of FP32's loss" if ours else "",
                told.text,
                told.within if ours else None,
                {"losses": [run.loss for run in found[way.name]]},
                aside="" if ours else f"{way.title} at every boundary",
            )
        )
    return rows


def _speed(study: Study, found: Mapping[str, Sequence[Trained]]) -> Finding:
    seconds = {way.name: [step_s(run) for run in found[way.name]] for way in WAYS[1:]}
    over = {name: [a / b for a, b in zip(of, seconds[LINKED.name], strict=True)] for name, of in seconds.items()}
    return Finding(
        "links",
        "faster",
        median(over[MANY.name]),
        "x",
        f"where one link is slow, bits by link are at least {_FASTER:g}x as fast as {MANY.title} at every boundary",
        f"{median(over[MANY.name]):.2f}x {MANY.title}, {median(over[FEW.name]):.2f}x {FEW.title}; steps of "
        f"{1e3 * fmean(seconds[LINKED.name]):.0f} ms; three links of 200 Mbit/s and one of 3",
        study.verdict(above(over[MANY.name], _FASTER)),
        {"step_s": seconds},
    )


def _chosen(study: Study, found: Mapping[str, Sequence[Trained]]) -> Finding:
    rows = found[LINKED.name][0].links
    shown = "; ".join(
        f"boundary {at}: forward {row['forward']['compressor']} ({8e-6 * row['forward']['rate']:.1f} Mbit/s), "
        f"backward {row['backward']['compressor']}"
        for at, row in enumerate(rows)
    )
    return Finding(
        "links",
        "chosen",
        float(len(rows)),
        "boundaries",
        "",
        shown or "nothing yet",
        None,
        {"links": rows},
        aside="what was chosen",
    )


def _draw(study: Study, found: Mapping[str, Sequence[Trained]]) -> None:
    titles = [f"{MORE_STAGES} stages, the last link at {SLOW}"]
    figure, (axes,) = plots.canvas(1, titles=titles, x="seconds of training", y="loss")
    for way in WAYS[1:]:
        run = found[way.name][0]
        axes.plot(run.seconds, run.epoch_losses, color=way.colour, marker=".", label=way.title)
    plots.save(figure, study.picture("links"))
