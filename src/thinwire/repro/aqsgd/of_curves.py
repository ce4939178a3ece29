"""Figures 1 and 3 with those of appendix H: loss by step, by bits, stages, precision of messages, size and start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from thinwire.repro import plots
from thinwire.repro.aqsgd.judged import Lost, draw_runs, facts, held_out, lost
from thinwire.repro.aqsgd.study import MORE_STAGES, NUM_STAGES, TITLES, Scale, Study, TaskName, Work, trainings
from thinwire.repro.aqsgd.trainings import Trained
from thinwire.repro.aqsgd.ways import FP32, aqsgd, direct
from thinwire.repro.findings import Finding, no_worse, points, worse

BITS = ((2, 4), (3, 6), (4, 8))
"""Forward and backward, as in section 4.2."""
DIRECT = {bits: direct(*bits) for bits in BITS}
AQSGD = {bits: aqsgd(*bits) for bits in BITS}
USUAL = (3, 6)
WAYS = (FP32, DIRECT[USUAL], AQSGD[USUAL])
M8 = aqsgd(*USUAL, precision=8)
CONTROL = DIRECT[BITS[0]]
"""Must fail: where it does not, a training forgives everything."""
_MORE: dict[TaskName, str] = {
    "scratch": "figure 7",
    "bf16": "figure 8",
    "large": "figure 9",
}
_FAR = 0.5
"""Of an activation's magnitude: what a change is well below."""

Runs = Mapping[str, Sequence[Trained]]


def change_work(scale: Scale) -> Work:
    """Trainings of figure 1."""
    return Work(trainings(scale, "small", WAYS))


def curves_work(scale: Scale) -> Work:
    """Trainings of figure 3 and of appendix H."""
    found = trainings(scale, "small", (FP32, *DIRECT.values(), *AQSGD.values(), M8))
    found |= trainings(scale, "small", WAYS, MORE_STAGES)
    for name in _MORE:
        found |= trainings(scale, name, WAYS)
    return Work(found)


def figure_1(study: Study) -> list[Finding]:
    """How far activations move between visits, and what fine-tuning gains over none."""
    found = {way.name: study.train("small", way) for way in WAYS}
    ours = found[AQSGD[USUAL].name]
    epochs = [run.epochs for run in ours]
    visits = range(1, min(map(len, epochs)))
    activation = [fmean(of[visit]["activation"] for of in epochs) for visit in visits]
    delta = [fmean(of[visit]["delta"] for of in epochs) for visit in visits]
    _draw_1(study, activation, delta)
    shares = [small / large for small, large in zip(delta, activation, strict=True)]
    shown = ", ".join(f"{100 * value:.0f} %" for value in shares)
    rows = [
        Finding(
            "figure 1",
            "delta_over_activation",
            shares[-1],
            "",
            "between two visits a sample's activations change by much less than they are, and by less and less",
            f"mean |change| as a share of mean |activation|, epoch by epoch: {shown}",
            max(shares) < _FAR and shares[-1] <= shares[0] if len(shares) > 1 else None,
            {"activation": activation, "delta": delta},
        )
    ]
    return [*rows, *_zero_shot(study, found)]


def _zero_shot(study: Study, found: Runs) -> list[Finding]:
    """By the loss on what is held out, at the start and at the end."""
    margin = study.scale.margin
    start = fmean(run.held_out[0] for run in found[FP32.name])
    ends = {way.name: [held_out(run) for run in found[way.name]] for way in WAYS}
    gain, better = no_worse([value / start - 1 for value in ends[FP32.name]], 0.0)
    told = lost(found[AQSGD[USUAL].name], found[FP32.name], margin, held_out)
    beside = lost(found[DIRECT[USUAL].name], found[FP32.name], margin, held_out)
    more = {"zero_shot": start, "held_out": ends}
    return [
        Finding(
            "figure 1",
            "over_zero_shot",
            gain.mean,
            "",
            "fine-tuning in FP32 is better than the network as it was (zero-shot)",
            f"held-out loss {fmean(ends[FP32.name]):.3f} against {start:.3f}",
            better,
            more,
        ),
        Finding(
            "figure 1",
            "held_out/aqsgd",
            told.estimate.mean,
            "",
            f"AQ-SGD at 3 bits is as good as FP32: held-out loss within {margin:.0%}",
            told.text,
            told.within,
            {"differences": told.differences},
        ),
        Finding(
            "figure 1",
            "held_out/direct",
            beside.estimate.mean,
            "",
            "",
            f"held-out {beside.text}",
            None,
            {"differences": beside.differences},
            aside=DIRECT[USUAL].title,
        ),
    ]


def figure_3(study: Study) -> list[Finding]:
    """Every way against FP32 on two stages, then what else may matter."""
    scale = study.scale
    ways = (FP32, *DIRECT.values(), *AQSGD.values(), M8)
    found = {way.name: study.train("small", way) for way in ways}
    base = found[FP32.name]
    sensitive = lost(found[CONTROL.name], base, scale.margin).beyond is True
    rows = []
    for bits in BITS:
        rows += pair(study, "figure 3", "small", NUM_STAGES, bits, found, sensitive)
    rows.append(_precision(study, found, sensitive))
    panels = [("2 stages", found)]
    more = {way.name: study.train("small", way, MORE_STAGES) for way in WAYS}
    rows += pair(study, "figure 9", "small", MORE_STAGES, USUAL, more, sensitive)
    rows.append(_stages(found, more))
    panels.append((f"{MORE_STAGES} stages", more))
    for name, figure in _MORE.items():
        runs = {way.name: study.train(name, way) for way in WAYS}
        rows += pair(study, figure, name, NUM_STAGES, USUAL, runs, sensitive)
        panels.append((TITLES[name], runs))
    rows.append(_same_messages([runs for _, runs in panels]))
    _draw_3(study, panels)
    return rows


def pair(
    study: Study, figure: str, name: TaskName, num_stages: int, bits: tuple[int, int], found: Runs, sensitive: bool
) -> list[Finding]:
    """AQ-SGD against FP32, and DirectQ of as many bits beside it."""
    margin, task = study.scale.margin, study.scale.task(name)
    ours, theirs, base = found[AQSGD[bits].name], found[DIRECT[bits].name], found[FP32.name]
    whole = task.coin_toss if task.labels else None
    told, beside = lost(ours, base, margin, whole=whole), lost(theirs, base, margin, whole=whole)
    of = "of a coin toss's loss from" if task.labels else "of"
    setting = f"{TITLES[name]}, {num_stages} stages"
    key = f"{name}/{num_stages} stages/fw{bits[0]} bw{bits[1]}"
    more = {"num_stages": num_stages, "epochs": task.epochs, "setting": setting, "bits": bits}
    unsure = "" if sensitive else "; the control did not surely fail, so that this says nothing"
    return [
        Finding(
            figure,
            f"aqsgd/{key}",
            told.estimate.mean,
            "",
            f"{setting}: AQ-SGD fw{bits[0]} bw{bits[1]} ends within {margin:.0%} {of} FP32's loss",
            f"{told.text}; held out {_held_out(ours, base, margin, whole)}{unsure}",
            told.within if sensitive else None,
            {**more, **facts(ours), "baseline": facts(base)},
        ),
        Finding(
            figure,
            f"direct/{key}",
            beside.estimate.mean,
            "",
            f"{setting}: DirectQ fw{bits[0]} bw{bits[1]} ends at a worse loss than FP32",
            f"{beside.text}; held out {_held_out(theirs, base, margin, whole)}",
            beside.beyond,
            {**more, **facts(theirs)},
        ),
    ]


def _held_out(runs: Sequence[Trained], base: Sequence[Trained], margin: float, whole: float | None) -> str:
    return lost(runs, base, margin, held_out, whole).text.rsplit(": ", 1)[-1]


def _precision(study: Study, found: Runs, sensitive: bool) -> Finding:
    margin = study.scale.margin
    told: Lost = lost(found[M8.name], found[AQSGD[USUAL].name], margin)
    return Finding(
        "figure 9",
        "messages of 8 bits",
        told.estimate.mean,
        "",
        f"keeping messages in 8 bits costs nothing: within {margin:.0%} of messages in 32",
        told.text,
        told.within if sensitive else None,
        facts(found[M8.name]),
    )


def _stages(few: Runs, many: Runs) -> Finding:
    """Whether DirectQ falls further behind FP32 with more stages, and AQ-SGD does not."""
    gaps = {}
    for way in (DIRECT[USUAL], AQSGD[USUAL]):
        here, there = (lost(runs[way.name], runs[FP32.name], 0.0).differences for runs in (few, many))
        gaps[way.name] = [more - less for less, more in zip(here, there, strict=True)]
    grown, further = worse(gaps[DIRECT[USUAL].name], 0.0)
    ours, _ = no_worse(gaps[AQSGD[USUAL].name], 0.0)
    return Finding(
        "figure 9",
        "more_stages",
        grown.mean,
        "",
        f"with more stages DirectQ falls further behind FP32 (from {NUM_STAGES} to {MORE_STAGES})",
        f"DirectQ's distance grows by {points(grown)}, AQ-SGD's by {points(ours)}",
        further,
        {"gaps": gaps},
    )


def _same_messages(panels: Sequence[Runs]) -> Finding:
    """In every training of AQ-SGD."""
    runs = [run for panel in panels for name in panel if name.startswith("aq-sgd") for run in panel[name]]
    alike = sum(run.alike for run in runs)
    return Finding(
        "section 3.2",
        "same_messages",
        float(alike),
        "",
        "both sides of a boundary keep the same messages",
        f"the same bytes at the end of {alike} of {len(runs)} trainings",
        alike == len(runs),
    )


def _draw_1(study: Study, activation: Sequence[float], delta: Sequence[float]) -> None:
    figure, (axes,) = plots.canvas(1, titles=["activations and their changes"], x="epoch", y="mean magnitude")
    epochs = range(2, 2 + len(delta))
    axes.plot(epochs, activation, color=FP32.colour, marker=".", label="activation")
    axes.plot(epochs, delta, color=AQSGD[USUAL].colour, marker=".", label="change since the last visit")
    axes.set_ylim(bottom=0)
    plots.save(figure, study.picture("1-change"))


def _draw_3(study: Study, panels: Sequence[tuple[str, Runs]]) -> None:
    titles = [title for title, _ in panels]
    figure, all_axes = plots.canvas(len(panels), titles=titles, x="step", y="loss")
    shown = {way.name: way for way in (FP32, *DIRECT.values(), *AQSGD.values(), M8)}
    for axes, (_, runs) in zip(all_axes, panels, strict=True):
        for name, of in runs.items():
            draw_runs(axes, shown[name], of)
    plots.save(figure, study.picture("3-curves"))
