"""Figures 1 and 3 with those of appendices H and I: loss by step, by bits, stages, precision of messages, network and
start, and what networks complete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from experiments.framework.claims import Row
from experiments.papers.aqsgd.methods import FP32, Method, aqsgd, by_recipe, direct
from experiments.papers.aqsgd.study import (
    MORE_STAGES,
    MOST_STAGES,
    NUM_STAGES,
    TITLES,
    AQSGDScale,
    AQSGDStudy,
    TaskName,
    draw_runs,
    facts,
    held_out,
)
from experiments.papers.aqsgd.trainings import Trained
from thinwire_tools import plots
from thinwire_tools.compare.statistics import relative_differences

Bits = tuple[int, int]
BITS: tuple[Bits, ...] = ((2, 4), (3, 6), (4, 8))
"""Forward and backward, as in section 4.2."""
DIRECT: dict[Bits, Method] = {bits: direct(*bits) for bits in BITS}
AQSGD: dict[Bits, Method] = {bits: aqsgd(*bits) for bits in BITS}
FAMILIES: dict[str, dict[Bits, Method]] = {"aqsgd": AQSGD, "direct": DIRECT}
USUAL: Bits = (3, 6)
METHODS = (FP32, DIRECT[USUAL], AQSGD[USUAL])
CONTROL = DIRECT[BITS[0]]
"""Must fail: where it does not, a training forgives everything."""
FIGURE_3 = (FP32, *DIRECT.values(), *AQSGD.values())
MORE: dict[TaskName, str] = {"scratch": "figure 7", "bf16": "figure 8", "large": "figure 9"}
LABEL_BITS: tuple[Bits, ...] = ((2, 4), (3, 6))
"""As in figures 3 (a) and (b)."""
LABELS = (FP32, *(family[bits] for bits in LABEL_BITS for family in (DIRECT, AQSGD)))
RECIPE = {kind: {bits: by_recipe(method) for bits, method in family.items()} for kind, family in FAMILIES.items()}
RECIPES: tuple[tuple[TaskName, int, tuple[Bits, ...]], ...] = (
    ("small", NUM_STAGES, ((2, 4), USUAL)),
    ("small", MORE_STAGES, (USUAL,)),
    ("deep", MOST_STAGES, (USUAL,)),
)
"""What is trained by the authors' recipe: task, stages, bits, the fewest first."""
KEEPING: Bits = (2, 4)
"""Of figures 9 (e, f), on `MORE_STAGES` (appendix H.5)."""
KEPT: dict[int, Method] = {bits: by_recipe(aqsgd(*KEEPING, precision=bits)) for bits in (32, 8, 4, 2)}
"""By the bits of messages that are kept."""
RECIPE_FIGURE, KEEPING_FIGURE = "figure 9 (recipe)", "figure 9 (e, f)"
RECIPE_TITLE = "the authors' recipe"
KEEPERS = (FP32, RECIPE["direct"][KEEPING], *KEPT.values())

Runs = Mapping[str, Sequence[Trained]]


def key_of(name: TaskName, num_stages: int, bits: Bits, *, recipe: bool = False) -> str:
    """Of the rows of a `pair`; ``recipe``: it was trained by the authors' recipe."""
    return f"{'recipe/' if recipe else ''}{name}/{num_stages} stages/fw{bits[0]} bw{bits[1]}"


def setting_of(name: TaskName, num_stages: int, *, recipe: bool = False) -> str:
    """The same for people."""
    return f"{RECIPE_TITLE if recipe else TITLES[name]}, {num_stages} stages"


def pair(
    scale: AQSGDScale,
    figure: str,
    name: TaskName,
    num_stages: int,
    bits: Bits,
    runs_by_method: Runs,
    control: Sequence[float],
    *,
    recipe: bool = False,
) -> list[Row]:
    """AQ-SGD and DirectQ of as many bits, each with FP32's trainings beside it. ``control``: by how much the loss of
    what must fail is higher, seed by seed."""
    task, base = scale.task(name), runs_by_method[FP32.name]
    key, setting = key_of(name, num_stages, bits, recipe=recipe), setting_of(name, num_stages, recipe=recipe)
    more: dict[str, Any] = {"num_stages": num_stages, "epochs": task.epochs, "setting": setting, "bits": bits}
    rows = []
    for kind, family in (RECIPE if recipe else FAMILIES).items():
        runs = runs_by_method[family[bits].name]
        lost = relative_differences([run.loss for run in runs], [run.loss for run in base])
        data = {**more, **facts(runs), "baseline": facts(base), "control": control}
        rows.append(Row(figure, f"{kind}/{key}", fmean(lost), "", data))
    return rows


def _beyond(runs_by_method: Runs, method: Method) -> list[float]:
    """By how much a method's loss is above FP32's."""
    ours, base = ([run.loss for run in runs_by_method[name]] for name in (method.name, FP32.name))
    return relative_differences(ours, base)


# --- figure 1


def figure_1(study: AQSGDStudy) -> list[Row]:
    """How far activations move between visits, and what fine-tuning gains over none."""
    trained = {method.name: study.train("small", method) for method in METHODS}
    epochs = [run.epochs for run in trained[AQSGD[USUAL].name]]
    visits = range(1, min(map(len, epochs)))
    activation, delta = (
        [[epoch[visit][name] for visit in visits] for epoch in epochs] for name in ("activation", "delta")
    )
    _draw_1(study, *([fmean(by_seed) for by_seed in zip(*one, strict=True)] for one in (activation, delta)))
    start = fmean(run.held_out[0] for run in trained[FP32.name])
    ends = {method.name: [held_out(run) for run in trained[method.name]] for method in METHODS}
    gain = fmean(value / start - 1 for value in ends[FP32.name])
    share = fmean(moved[-1] / whole[-1] for moved, whole in zip(delta, activation, strict=True))
    return [
        Row("figure 1", "delta_over_activation", share, "", {"activation": activation, "delta": delta}),
        Row("figure 1", "over_zero_shot", gain, "", {"zero_shot": start, "held_out": ends}),
    ]


# --- figures 3 and 7 to 9


def figure_3(study: AQSGDStudy) -> list[Row]:
    """Every method against FP32 on two stages, then what else may matter."""
    scale = study.scale
    trained = {method.name: study.train("small", method) for method in FIGURE_3}
    control = _beyond(trained, CONTROL)
    rows = []
    for bits in BITS:
        rows += pair(scale, "figure 3", "small", NUM_STAGES, bits, trained, control)
    more = {method.name: study.train("small", method, MORE_STAGES) for method in METHODS}
    rows += pair(scale, "figure 9", "small", MORE_STAGES, USUAL, more, control)
    rows.append(stages_row(trained, more))
    panels = [("2 stages", trained), (f"{MORE_STAGES} stages", more)]
    for name, figure in MORE.items():
        runs = {method.name: study.train(name, method) for method in METHODS}
        rows += pair(scale, figure, name, NUM_STAGES, USUAL, runs, control)
        panels.append((TITLES[name], runs))
    _draw_panels(study, "3-curves", panels)
    return rows


def stages_row(few: Runs, many: Runs) -> Row:
    """By how much more a loss is above FP32's with more stages, seed by seed."""
    gaps = {}
    for method in (DIRECT[USUAL], AQSGD[USUAL]):
        pairs = zip(_beyond(few, method), _beyond(many, method), strict=True)
        gaps[method.name] = [more - less for less, more in pairs]
    return Row("figure 9", "more_stages", fmean(gaps[DIRECT[USUAL].name]), "", {"gaps": gaps})


# --- quantizers of changes

EVEN_AND_NORMAL = ("maxabs", "gaussian")
QUANTIZERS = {
    bits: {name: replace(AQSGD[bits], name=name, forward=f"delta({name}(bits={bits[0]}))") for name in EVEN_AND_NORMAL}
    for bits in BITS
}
"""thinwire's own: even levels up to the largest value, and those of a normal distribution."""


def quantizers(study: AQSGDStudy) -> list[Row]:
    """Losses by both in as many bits, and by how much they are above FP32's."""
    base, rows = [run.loss for run in study.train("small", FP32)], []
    for bits, family in QUANTIZERS.items():
        runs = {name: study.train("small", method) for name, method in family.items()}
        losses = {name: [run.loss for run in some] for name, some in runs.items()}
        above = {name: relative_differences(some, base) for name, some in losses.items()}
        data = {"losses": losses, "above_fp32": above, "sent_bytes": {name: runs[name][0].sent_bytes for name in runs}}
        rows.append(Row("quantizers", f"fw{bits[0]} bw{bits[1]}", fmean(above["gaussian"]), "", data))
    return rows


# --- more networks


def labels(study: AQSGDStudy) -> list[Row]:
    """Classification: its loss, and how many of the samples that are held out are classified right."""
    trained = {method.name: study.train("labels", method) for method in LABELS}
    control = _beyond(trained, CONTROL)
    rows = []
    for bits in LABEL_BITS:
        rows += pair(study.scale, "figure 3 (a, b)", "labels", NUM_STAGES, bits, trained, control)
    right = {name: [run.right[-1] for run in runs] for name, runs in trained.items()}
    before = fmean(run.right[0] for run in trained[FP32.name])
    value = fmean(right[AQSGD[LABEL_BITS[0]].name])
    rows.append(Row("figure 3 (a, b)", "right", value, "", {"right": right, "before": before}))
    _draw_panels(study, "3ab-labels", [(TITLES["labels"], trained)])
    return rows


def deep(study: AQSGDStudy) -> list[Row]:
    """As many stages as the paper has."""
    return _network(study, "figure 9 (8 stages)", "deep", MOST_STAGES, "9-stages")


def fp16(study: AQSGDStudy) -> list[Row]:
    """The precision that the paper's GPUs compute in."""
    return _network(study, "figure 8 (fp16)", "fp16", NUM_STAGES, "8-fp16")


def _network(study: AQSGDStudy, figure: str, name: TaskName, num_stages: int, picture: str) -> list[Row]:
    trained = {method.name: study.train(name, method, num_stages) for method in METHODS}
    _draw_panels(study, picture, [(f"{TITLES[name]}, {num_stages} stages", trained)])
    return pair(study.scale, figure, name, num_stages, USUAL, trained, _beyond(trained, DIRECT[USUAL]))


# --- the authors' recipe, and messages that are kept in few bits


def recipe(study: AQSGDStudy) -> list[Row]:
    """On 2, 4 and 8 stages; what must fail is DirectQ of the fewest bits, by its loss on what is held out."""
    rows, panels = [], []
    for name, num_stages, all_bits in RECIPES:
        trained = {method.name: study.train(name, method, num_stages) for method in _by_recipe(all_bits)}
        beside = RECIPE["direct"][all_bits[0]], FP32
        worse, base = ([held_out(run) for run in trained[method.name]] for method in beside)
        control = relative_differences(worse, base)
        for bits in all_bits:
            rows += pair(study.scale, RECIPE_FIGURE, name, num_stages, bits, trained, control, recipe=True)
        panels.append((setting_of(name, num_stages, recipe=True), trained))
    _draw_panels(study, "9-recipe", panels)
    return rows


def _by_recipe(all_bits: Sequence[Bits]) -> tuple[Method, ...]:
    return (FP32, *(family[bits] for bits in all_bits for family in RECIPE.values()))


def keeping(study: AQSGDStudy) -> list[Row]:
    """AQ-SGD whose messages are kept in fewer and fewer bits, and DirectQ, which keeps none."""
    trained = {method.name: study.train("small", method, MORE_STAGES) for method in KEEPERS}
    _draw_panels(study, "9-keeping", [(setting_of("small", MORE_STAGES, recipe=True), trained)])
    ends = {name: [held_out(run) for run in runs] for name, runs in trained.items()}
    precise = KEPT[32].name
    rows = []
    for bits, method in KEPT.items():
        if method.name != precise:
            beside = (*(one.name for one in KEEPERS if one not in KEPT.values()), precise, method.name)
            data = {"ends": {name: ends[name] for name in beside}, "sent_bytes": trained[method.name][0].sent_bytes}
            lost = fmean(relative_differences(ends[method.name], ends[precise]))
            rows.append(Row(KEEPING_FIGURE, f"m{bits}", lost, "", data))
    return rows


# --- appendix I: greedy completions of the same prompts, of networks that were fine-tuned by different methods

COMPLETED = (FP32, aqsgd(4, 8), direct(4, 8))
"""As in the appendix."""


def completions(study: AQSGDStudy) -> list[Row]:
    """How much of them is FP32's by seed, and those of the first seed."""
    by_method = {method.name: study.train("small", method, completions=True) for method in COMPLETED}
    by_seed = [dict(zip(by_method, runs, strict=True)) for runs in zip(*by_method.values(), strict=True)]
    trained = by_seed[0]
    base = trained[FP32.name]
    start = base.prompted
    data = {
        "prompts": [text(row[:start]) for row in base.text],
        "gold": [text(row[start:]) for row in base.text],
        "completions": {m.title: [text(row[start:]) for row in trained[m.name].completions] for m in COMPLETED},
        "common": {name: [common(runs[FP32.name], runs[name]) for runs in by_seed] for name in trained},
    }
    return [Row("appendix I", "completions", fmean(data["common"][COMPLETED[1].name]), "", data)]


def common(base: Trained, other: Trained) -> float:
    """The share of a completion up to where it first differs, in the mean."""
    shares = []
    for one, two in zip(base.completions, other.completions, strict=True):
        differs = [a != b for a, b in zip(one[base.prompted :], two[base.prompted :], strict=True)]
        shares.append((differs.index(True) if True in differs else len(differs)) / len(differs))
    return fmean(shares)


def text(content: bytes) -> str:
    """What bytes say, where they say something that can be shown."""
    return content.decode("utf-8", errors="replace")


# --- pictures

_SHADES = ("#1f6fb2", "#0a7d4f", "#8250c4", "#c77fe0")
"""Of messages in 32, 8, 4 and 2 bits."""


def _draw_1(study: AQSGDStudy, activation: Sequence[float], delta: Sequence[float]) -> None:
    figure, (axes,) = plots.canvas(1, titles=["activations and their changes"], x="epoch", y="mean magnitude")
    epochs = range(2, 2 + len(delta))
    axes.plot(epochs, activation, color=FP32.color, marker=".", label="activation")
    axes.plot(epochs, delta, color=AQSGD[USUAL].color, marker=".", label="change since the last visit")
    axes.set_xticks(epochs)
    axes.set_ylim(bottom=0)
    plots.save(figure, study.picture("1-change"))


def _draw_panels(study: AQSGDStudy, picture: str, panels: Sequence[tuple[str, Runs]]) -> None:
    figure, all_axes = plots.canvas(len(panels), titles=[title for title, _ in panels], x="step", y="loss")
    shown = {method.name: method for method in (*FIGURE_3, *_by_recipe(BITS), *KEEPERS)}
    shown |= {m.name: replace(m, color=color) for m, color in zip(KEPT.values(), _SHADES, strict=True)}
    for axes, (_, runs) in zip(all_axes, panels, strict=True):
        for name, own in runs.items():
            draw_runs(axes, shown[name], own)
    plots.save(figure, study.picture(picture))
