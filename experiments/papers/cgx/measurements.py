"""What is measured and drawn for the thesis's chapter 3: ways to send gradients, turns over links, errors, quality."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from statistics import fmean, median
from typing import Any, Literal

from experiments.framework.claims import Row
from experiments.framework.methods import (
    ALMOST_NOTHING_GAMMA,
    CGX,
    FP32,
    GRACE,
    NORM,
    NOTHING,
    THINWIRE,
    Method,
    compressed,
)
from experiments.framework.replay import Compute
from experiments.framework.study import PartWatcher, Scale, Study, draw_bars
from experiments.framework.timing import (
    NUM_RANKS,
    RANKS_PER_NODE,
    Place,
    SeparateRuns,
    Times,
    Timing,
    shown_rate,
    where,
)
from experiments.framework.verdicts import matches
from experiments.tasks.images import TIMED, TRAINED, ImageTask, Model, load
from thinwire_tools import plots
from thinwire_tools.compare.data import standard_library
from thinwire_tools.compare.paired import CONTROL, compare_training
from thinwire_tools.compare.statistics import estimate
from thinwire_tools.compare.tasks import GPTTask
from thinwire_tools.compare.variants import CONTROL_RULES

GAMMAS = (1, 2, 4, 10, 20, 40, 100, 400)

SRA = Method("sra", "SRA", "#0a7d4f")
RING = Method("ring", "ring", "#c0392b", algorithm="ring")
TREE = Method("tree", "tree", "#d98a00", algorithm="tree(root=0)")
# The thesis has no figures of these. The hierarchy takes two ranks for a node, whose link is as slow as the others.
_OTHERS = (
    Method("allgather", "all-gather", "#8250c4", algorithm="allgather"),
    Method("parameter_server", "parameter server", "#1f6fb2", algorithm="parameter_server"),
    Method("hierarchical", "hierarchical", "#888888", algorithm="hierarchical(inside=same)", ranks_per_node=2),
)

SHARED = Method("shared", "shared memory", "#0a7d4f", transport="shared")
GROUP = Method("group", "gloo", "#c0392b", transport="group")

FLAT = Method("thinwire", "thinwire, SRA", "#0a7d4f", transport="auto")
HIERARCHICAL = Method("hierarchical", "thinwire, hierarchical", "#1f6fb2", algorithm="hierarchical", transport="auto")
_GLOO_ONLY = Method("thinwire gloo", "thinwire, SRA, gloo only", "#8250c4", transport="group")

IDEAL = Method("ideal", "almost nothing sent", "#888888", spec=f"truncate(gamma={ALMOST_NOTHING_GAMMA:g})")
GRACE_STYLE = Method("grace", "GRACE-style", "#c0392b", spec=GRACE, algorithm="allgather")

BLOB = Method("blob", "blob", "#c0392b", kind="blob")
_SPEC_1024 = "minmax(bits=4, bucket=1024)"
THINWIRE_1024 = Method("thinwire 1024", "thinwire, buckets of 1024", "#0a7d4f", spec=_SPEC_1024)
BLOB_1024 = Method("blob 1024", "blob, buckets of 1024", "#c0392b", kind="blob", spec=_SPEC_1024)
"""Of which the errors are compared: the thesis takes such buckets for CNNs, and without layers only those of 128."""


def truncated(gamma: float) -> Method:
    """The first of every ``gamma`` elements are sent."""
    return Method(f"gamma {gamma:g}", f"1/{gamma:g} sent", "#0a7d4f", spec=f"truncate(gamma={gamma:g})")


def torch_powersgd(model: Model) -> Method:
    return Method("torch powersgd", "PyTorch's PowerSGD", "#1f6fb2", kind="torch powersgd", rank=model.powersgd_rank)


def powersgd(model: Model) -> Method:
    return Method("powersgd", "thinwire's PowerSGD", "#8250c4", spec=f"powersgd(rank={model.powersgd_rank})")


@dataclass(frozen=True)
class Timed:
    """Methods that take turns to train at ``place``. ``thesis``: items per second by model and method, where it has
    them; ``errors``: methods of which the error is taken as well, for the models ``errors_of``; ``drawn``: what is."""

    figure: str
    methods: Callable[[Model, Sequence[float]], Sequence[Method]]
    """Of a model, and of the scale's gammas."""
    reference: Method
    place: Place = "links"
    num_ranks: int = NUM_RANKS
    rtt_s: float = 0.0
    """Between any two ranks."""
    thesis: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    errors: tuple[Method, ...] = ()
    errors_of: tuple[str, ...] = ()
    drawn: Literal["items", "seconds", "share", "gammas"] = "items"


def _every_model(*methods: Method) -> Callable[[Model, Sequence[float]], Sequence[Method]]:
    return lambda model, gammas: methods


FIGURE_3_1 = Timed("3.1", lambda _, gammas: (FP32, *map(truncated, gammas), NOTHING), FP32, drawn="gammas")
FIGURE_3_3 = Timed("3.3", _every_model(FP32, GROUP, SHARED, NOTHING), GROUP, "host", drawn="seconds")
TABLE_3_4 = Timed(
    "3.4",
    _every_model(SRA, RING, TREE, *_OTHERS, NOTHING),
    SRA,
    num_ranks=8,
    rtt_s=1e-3,
    thesis={
        "gpt": {"sra": 260_000.0, "ring": 236_000.0, "tree": 202_000.0},
        "cnn": {"sra": 2900.0, "ring": 2830.0, "tree": 2770.0},
    },
    errors=(SRA, RING, TREE),
    errors_of=("gpt",),
)
TABLE_3_6 = Timed(
    "3.6",
    lambda model, _: (FP32, THINWIRE, torch_powersgd(model), powersgd(model), GRACE_STYLE, NOTHING),
    FP32,
    thesis={
        "gpt": {"fp32": 170_000.0, "thinwire": 260_000.0, "torch powersgd": 220_000.0, "grace": 30_000.0},
        "cnn": {"fp32": 1900.0, "thinwire": 2900.0, "torch powersgd": 2600.0, "grace": 1000.0},
    },
)
TABLE_3_7 = Timed("3.7", _every_model(FP32, THINWIRE, IDEAL, NOTHING), NOTHING, drawn="share")
THESIS_SHARE = {"gpt": {"ideal": 0.95, "thinwire": 0.87}, "cnn": {"ideal": 0.92, "thinwire": 0.90}}
"""Table 3.7: of linear scaling."""
TABLE_3_9 = Timed(
    "3.9",
    _every_model(FP32, FLAT, HIERARCHICAL, _GLOO_ONLY, NOTHING),
    FP32,
    "nodes",
    thesis={"gpt": {"fp32": 32_000.0, "thinwire": 85_000.0}, "cnn": {"fp32": 564.0, "thinwire": 2300.0}},
)
QNCCL = Timed(
    "blob",
    _every_model(FP32, THINWIRE, BLOB, NOTHING),
    FP32,
    errors=(THINWIRE, BLOB, THINWIRE_1024, BLOB_1024),
    errors_of=("gpt", "cnn"),
)


FP32_SHARE: dict[Place, dict[str, float]] = {"links": {"gpt": 0.54, "cnn": 0.59}, "nodes": {"gpt": 0.05, "cnn": 0.09}}
"""Share of linear scaling that fp32 reaches in the thesis, of Transformer-XL and ResNet-50: links are as slow as it
takes for that. On one node: 170k of 8 · 39k tokens/s (tables 3.1 and 3.6), and 1900 of 2900 / 0.90 images/s (tables
3.6 and 3.7). On four nodes of four: 32k of 16 · 39k (table 3.9), and 564 of twice those images/s."""

MARGIN = 0.01
"""Up to such a share of the perplexity or the accuracy may be lost, and a training still ends at the same."""
QUALITY_RANKS = 2
CONTROLS = {"gpt": CONTROL, "cnn": CONTROL_RULES}
"""The CNN's is more damaging: so small a classification forgives one bit with a scale for 8192 values."""
SPECS = {"gpt": (CGX, NORM), "cnn": ("minmax(bits=4, bucket=1024)", CGX, NORM)}
"""The thesis takes buckets of 1024 for convolutional networks (section 3.7.2) and calls 128 always safe (3.5.3)."""
METRICS = {"gpt": "held-out loss", "cnn": "accuracy"}


@dataclass(frozen=True, kw_only=True)
class CGXScale(Scale):
    """``runs`` separate runs of ``rounds`` turns of ``steps_a_turn`` replayed steps of every method, and trainings of
    every quantizer.

    Without a ``rate``, links have that at which fp32 fares as in the thesis (`FP32_SHARE`).
    """

    models: tuple[Model, ...] = TIMED
    trained: tuple[GPTTask, ImageTask] = TRAINED
    gammas: tuple[float, ...] = GAMMAS
    runs: int = 5
    rounds: int = 3
    steps_a_turn: int = 2
    error_steps: int = 8

    def about(self) -> dict[str, Any]:
        load(None)
        standard_library()
        return {"num_ranks": NUM_RANKS, "margin": MARGIN, "fp32_share_of_the_thesis": FP32_SHARE}

    def turn(self, place: Place) -> int:
        """Steps of a turn: between nodes a step takes long enough by itself."""
        return 1 if place == "nodes" else self.steps_a_turn


@dataclass
class CGXStudy(Study[CGXScale]):
    links: dict[str, Any] = field(default_factory=dict)
    computes: dict[Model, Compute] = field(default_factory=dict)
    _rates: dict[tuple[Place, str], str] = field(default_factory=dict)

    def about(self) -> dict[str, Any]:
        return {
            "links": {
                name: {**link, "proportion": proportion(name, link["rate"], link["fp32_share"])}
                for name, link in self.links.items()
            },
            "computed_s": {model.title: compute.step_s for model, compute in self.computes.items()},
        }

    def where(self, model: Model, place: Place) -> str:
        """The link, for people."""
        rate = self.rate_of(model, place)
        return "on one host" if place == "host" else where(rate)

    def times(self, timed: Timed, model: Model) -> Times:
        """`SeparateRuns.times`, at the rate that is this model's."""
        place, methods = timed.place, timed.methods(model, self.scale.gammas)
        rate, steps = self.rate_of(model, place), self.scale.turn(place)
        runs = self.timing(place, timed.num_ranks, timed.rtt_s)
        (times,) = runs.times(
            model, methods, rounds=self.scale.rounds, steps=steps, rates=(rate,), on_turn=self.advance
        )
        if rate is not None and {FP32.name, NOTHING.name} <= times.rounds.keys():
            key = f"{model.title}, {'each node' if place == 'nodes' else 'each rank'} on a link"
            per_node = RANKS_PER_NODE if place == "nodes" else 1
            about = self.links.setdefault(key, {"rate": rate, "ranks_per_node": per_node, "fp32_share": []})
            about["fp32_share"].append(times.times_faster(FP32.name, NOTHING.name))
        return times

    def rate_of(self, model: Model, place: Place) -> str | None:
        """Of the links at ``place`` for ``model``; None for loopback. Measured when it is first asked for."""
        if not self.emulated or place == "host" or self.rate is not None:
            return None if place == "host" else self.rate
        key = place, model.name
        if key not in self._rates:
            share = FP32_SHARE[place][model.name]
            self._rates[key] = self.timing(place).calibrate(
                model, share, on_turn=lambda _, title: self.advance(0, f"finding the link's rate: {title}")
            )
        return self._rates[key]

    def timing(self, place: Place, num_ranks: int = NUM_RANKS, rtt_s: float = 0.0) -> SeparateRuns:
        options: dict[str, Any] = {"num_ranks": num_ranks, "runs": self.scale.runs, "computes": self.computes}
        return SeparateRuns(place, emulated=self.emulated, rtt_s=rtt_s, **options)

    def errors(self, model: Model, methods: Sequence[Method]) -> dict[str, list[float]]:
        """`Timing.errors`, of the scale's number of steps."""
        timing = self.kept("errors", lambda: Timing("links", emulated=False))
        return timing.errors(model, methods, steps=self.scale.error_steps, on_turn=self.advance)


def proportion(name: str, rate: str, shares: Sequence[float]) -> str:
    """What a link made of fp32's communication, for people."""
    share = median(shares)
    return (
        f"{name} of {shown_rate(rate)}: fp32 reaches {share:.0%} of the speed with nothing sent, so communication that "
        f"is not hidden takes {1 / share - 1:.1f} times as long as computation"
    )


# --- speed and error


def measure(timed: Timed, study: CGXStudy) -> list[Row]:
    """A row for each model and method with the seconds of every run; one for each model with its errors."""
    rows, errors = [], {}
    for model in study.scale.models:
        methods = timed.methods(model, study.scale.gammas)
        times = study.times(timed, model)
        rows += [speed_row(timed, model, method, times, study.where(model, timed.place)) for method in methods]
        if model.name in timed.errors_of:
            errors[model.name] = study.errors(model, timed.errors)
    error_rows = [error_row(timed, model, by_method) for model, by_method in errors.items()]
    _draw(timed, study, {row.name: row for row in rows}, error_rows)
    return [*rows, *error_rows]


def speed_row(timed: Timed, model: Model, method: Method, times: Times, where: str) -> Row:
    """Items per second of all ranks together, also in multiples of the reference's, here and in the thesis."""
    thesis = timed.thesis.get(model.name, {})
    theirs = thesis.get(method.name)
    sent = method.kind in ("thinwire", "blob")
    return Row(
        timed.figure,
        f"items_per_s/{model.name}/{method.name}",
        timed.num_ranks * model.items_per_batch / times.step_s(method.name),
        model.unit,
        {
            "num_ranks": timed.num_ranks,
            "rtt_s": timed.rtt_s,
            "model": model.title,
            "model_of_thesis": model.thesis,
            "method": method.title,
            "kind": method.kind,
            "spec": method.spec if sent else None,
            "algorithm": method.algorithm if sent else None,
            "transport": method.transport if method.kind == "thinwire" else None,
            "where": where,
            "reference": timed.reference.title,
            "relative": times.times_faster(method.name, timed.reference.name),
            "thesis": theirs,
            "thesis_relative": theirs / thesis[timed.reference.name] if theirs is not None else None,
            "step_s": times.rounds[method.name],
            "cpu_s": times.cpu_s[method.name],
            "payload_bytes": times.payload_bytes.get(method.name),
        },
    )


def error_row(timed: Timed, model: str, errors: Mapping[str, Sequence[float]]) -> Row:
    """Relative error of the mean that arrives, by method: the first one's."""
    mean = {name: fmean(values) for name, values in errors.items()}
    return Row(timed.figure, f"error/{model}", mean[timed.errors[0].name], "", {"by_step": errors, "mean": mean})


def _draw(timed: Timed, study: CGXStudy, rows: Mapping[str, Row], errors: Sequence[Row]) -> None:
    models = study.scale.models
    titles = [f"{model.title} {study.where(model, timed.place)}" for model in models]
    labels = {"seconds": "seconds a step", "gammas": "seconds a step", "share": "share of the speed with nothing sent"}
    y = [labels.get(timed.drawn, model.unit) for model in models] + ["relative error"] * len(errors)
    titles += [f"error of the mean that arrives, {row.name.removeprefix('error/')}" for row in errors]
    x = "compression gamma" if timed.drawn == "gammas" else ""
    figure, panels = plots.canvas(len(titles), titles=titles, x=x, y=y)
    for axes, model in zip(panels, models, strict=False):
        methods = timed.methods(model, study.scale.gammas)
        own = {method: rows[f"items_per_s/{model.name}/{method.name}"] for method in methods}
        seconds = {method: median(row.data["step_s"]) for method, row in own.items()}
        if timed.drawn == "gammas":
            _draw_gammas(axes, study.scale.gammas, seconds)
            continue
        values = {"items": {m: row.value for m, row in own.items()}, "seconds": seconds}
        shown = values.get(timed.drawn) or {m: row.data["relative"] for m, row in own.items()}
        draw_bars(axes, [(method.title, method.color, value) for method, value in shown.items()])
    for axes, row in zip(panels[len(models) :], errors, strict=True):
        draw_bars(axes, [(method.title, method.color, row.data["mean"][method.name]) for method in timed.errors])
    plots.save(figure, study.picture(timed.figure))


def _draw_gammas(axes: Any, gammas: Sequence[float], seconds: Mapping[Method, float]) -> None:
    taken = [seconds[truncated(gamma)] for gamma in gammas]
    axes.plot(gammas, taken, color="#0a7d4f", marker="o", label="the first of gamma elements sent")
    axes.axhline(seconds[FP32], color=FP32.color, linewidth=1, label=FP32.title)
    axes.axhline(seconds[NOTHING], color="#222222", linewidth=1, linestyle=":", label="ideal scaling")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)


# --- table 3.5: quality


def table_3_5(study: CGXStudy) -> list[Row]:
    """Paired trainings of a GPT and of a CNN with every quantizer, and with one that must fail."""
    (gpt, cnn), seeds = study.scale.trained, study.seeds
    watcher = PartWatcher(study)
    compared = compare_training(gpt, SPECS["gpt"], seeds=seeds, margin=MARGIN, num_ranks=QUALITY_RANKS, watcher=watcher)
    assert compared.control is not None
    sides = {side.name: side.losses for side in (*compared.variants, compared.control)}
    chosen = (None, *SPECS["cnn"], CONTROLS["cnn"])
    accuracies: dict[str | None, list[float]] = {spec: [] for spec in chosen}
    # Seed by seed, so that what slows the machine for a while slows all of them.
    for seed, spec in product(seeds, chosen):
        method = FP32 if spec is None else compressed(spec)
        accuracies[spec].append(study.train_task(cnn, method, seed, num_ranks=QUALITY_RANKS).final_accuracy)
    study.close()
    return quality_rows("gpt", {None: compared.baseline.losses, **sides}) + quality_rows("cnn", accuracies)


def quality_rows(model: str, by_spec: Mapping[str | None, Sequence[float]]) -> list[Row]:
    """What each quantizer loses against fp32, whose runs are under None, and whether the control's damage is seen."""
    rows = []
    for spec, values in by_spec.items():
        if spec is None:
            continue
        lost = estimate(lost_quality(model, values, by_spec[None]))
        data = {"spec": spec, "metric": METRICS[model], "num_ranks": QUALITY_RANKS}
        data |= {"fp32": by_spec[None], "own": values}
        if spec == CONTROLS[model]:
            rows.append(Row("3.5", f"control/{model}", float(matches(lost, MARGIN).holds is False), "", data))
        else:
            rows.append(Row("3.5", f"lost/{model}/{spec}", lost.mean, "", data))
    return rows


def lost_quality(model: str, own: Sequence[float], fp32: Sequence[float]) -> list[float]:
    """What was lost by seed, as a share of fp32's: of the GPT's perplexity, whose logarithm is its loss, or of the
    CNN's accuracy (section 3.4)."""
    if model == "gpt":
        return [math.expm1(value - base) for base, value in zip(fp32, own, strict=True)]
    return [1 - value / base for base, value in zip(fp32, own, strict=True)]
