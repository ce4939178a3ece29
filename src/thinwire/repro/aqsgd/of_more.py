"""Loss by step of more networks: sequence classification, eight stages, fp16."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from thinwire.repro import plots
from thinwire.repro.aqsgd.judged import draw_runs, lost
from thinwire.repro.aqsgd.of_curves import AQSGD, DIRECT, USUAL, Runs, pair
from thinwire.repro.aqsgd.of_curves import WAYS as USUAL_WAYS
from thinwire.repro.aqsgd.study import MOST_STAGES, NUM_STAGES, TITLES, Scale, Study, TaskName, Work, trainings
from thinwire.repro.aqsgd.trainings import Trained
from thinwire.repro.aqsgd.ways import FP32, Way
from thinwire.repro.findings import Finding

LABEL_BITS = ((2, 4), (3, 6))
"""As in figures 3 (a) and (b)."""
LABEL_WAYS = (FP32, *(of[bits] for bits in LABEL_BITS for of in (DIRECT, AQSGD)))


def labels_work(scale: Scale) -> Work:
    return Work(trainings(scale, "labels", LABEL_WAYS))


def stages_work(scale: Scale) -> Work:
    return Work(trainings(scale, "deep", USUAL_WAYS, MOST_STAGES))


def fp16_work(scale: Scale) -> Work:
    return Work(trainings(scale, "fp16", USUAL_WAYS))


def labels(study: Study) -> list[Finding]:
    """Classification: its loss, and how many of the samples that are held out are told right."""
    found = {way.name: study.train("labels", way) for way in LABEL_WAYS}
    toss = study.scale.labels.coin_toss
    told = lost(found[DIRECT[LABEL_BITS[0]].name], found[FP32.name], study.scale.margin, whole=toss)
    control = told.beyond is True
    rows = []
    for bits in LABEL_BITS:
        rows += pair(study, "figure 3 (a, b)", "labels", NUM_STAGES, bits, found, control)
    right = {name: fmean(run.right[-1] for run in runs) for name, runs in found.items()}
    before = fmean(run.right[0] for run in found[FP32.name])
    shown = ", ".join(f"{way.title} {right[way.name]:.1%}" for way in LABEL_WAYS)
    rows.append(
        Finding(
            "figure 3 (a, b)",
            "right",
            right[AQSGD[LABEL_BITS[0]].name],
            "",
            "",
            f"{shown}; {before:.1%} before",
            None,
            {"right": {name: [run.right[-1] for run in runs] for name, runs in found.items()}},
            aside="samples held out that are told right",
        )
    )
    _draw(study, "3ab-labels", TITLES["labels"], LABEL_WAYS, found)
    return rows


def stages(study: Study) -> list[Finding]:
    """As many stages as the paper has."""
    return _of(study, "figure 9 (8 stages)", "deep", MOST_STAGES, "9-stages")


def fp16(study: Study) -> list[Finding]:
    """The precision that the paper's GPUs compute in."""
    return _of(study, "figure 8 (fp16)", "fp16", NUM_STAGES, "8-fp16")


def _of(study: Study, figure: str, name: TaskName, num_stages: int, picture: str) -> list[Finding]:
    found: dict[str, list[Trained]] = {way.name: study.train(name, way, num_stages) for way in USUAL_WAYS}
    control = lost(found[DIRECT[USUAL].name], found[FP32.name], study.scale.margin).beyond is True
    _draw(study, picture, f"{TITLES[name]}, {num_stages} stages", USUAL_WAYS, found)
    return pair(study, figure, name, num_stages, USUAL, found, control)


def _draw(study: Study, picture: str, title: str, ways: Sequence[Way], found: Runs) -> None:
    figure, (axes,) = plots.canvas(1, titles=[title], x="step", y="loss")
    for way in ways:
        draw_runs(axes, way, found[way.name])
    plots.save(figure, study.picture(picture))
