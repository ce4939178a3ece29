"""Parts (b) and (c): tables 2 and 3 and figures 2 to 5, quality and times of every method of sending gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from experiments.framework.claims import Row
from experiments.framework.methods import Method
from experiments.framework.timing import SeparateRuns, Times
from experiments.framework.training import Trained, curves
from experiments.papers.rates import by_rate
from experiments.tasks.images import Model
from thinwire.compressors import parse
from thinwire_tools import plots
from thinwire_tools.compare.train import gradient_bytes, ring_factor

Network = Literal["pictures", "words"]
"""What is trained: a ResNet on images, or an LSTM on words."""
NETWORKS: dict[Network, str] = {"pictures": "ResNet", "words": "LSTM"}


def _method(name: str, title: str, color: str, spec: str, algorithm: str = "sra") -> Method:
    return Method(name, title, color, spec=spec, algorithm=algorithm, transport="auto")


SGD = Method("sgd", "SGD, all-reduce", "#555555", kind="all-reduce", spec="")
SGD_GATHERED = Method("sgd all-gather", "SGD, all-gather", "#aaaaaa", kind="all-gather", spec="")
QSGD = _method("qsgd", "QSGD", "#d98a00", "qsgd(levels=64, bucket=layer)", "allgather")
NATSGD = _method("natsgd", "NatSGD", "#8250c4", "natural()", "allgather")
POWERSGD = _method("powersgd", "PowerSGD (EF)", "#3b6fb6", "powersgd(rank=2)")
DETERM = _method("intsgd determ", "IntSGD (determ.)", "#7fb800", "intsgd(bits=8, rounding=determ)")
RANDOM = _method("intsgd", "IntSGD (random)", "#0a7d4f", "intsgd(bits=8)")
RANDOM_32 = _method("intsgd 32", "IntSGD, int32", "#00b3a4", "intsgd(bits=32)")
_PUBLISHED = "block=buffer, exponent=floor"
HEURISTIC = _method("heuristic", "Heuristic IntSGD, int8", "#c0392b", f"heuristic_intsgd(bits=8, {_PUBLISHED})")
HEURISTIC_32 = _method("heuristic 32", "Heuristic IntSGD, int32", "#e58a80", f"heuristic_intsgd(bits=32, {_PUBLISHED})")

ONE_SCALE = _method(
    "intsgd global", "IntSGD (random), Algorithm 1's scale", "#111111", "intsgd(bits=8, scale=params, block=global)"
)
"""The paper's own form: one scale for the model, from the steps of its optimizer. Under momentum these are longer than
the gradients, and the scale is coarser than that of `RANDOM`, thinwire's default."""

TABLE = (SGD_GATHERED, QSGD, NATSGD, SGD, POWERSGD, DETERM, RANDOM)
"""Of tables 2 and 3, in their order."""
METHODS = (*TABLE, RANDOM_32, HEURISTIC, HEURISTIC_32)
TRAINED = (*(method for method in METHODS if method is not SGD_GATHERED), ONE_SCALE)
"""An all-gather of fp32 has the mean of an all-reduce: it is only timed. `ONE_SCALE` takes the time of `RANDOM`."""


def on(network: Network, method: Method) -> Method:
    """``method`` as the paper has it on ``network``: PowerSGD takes rank 4 on words."""
    return replace(method, spec="powersgd(rank=4)") if network == "words" and method is POWERSGD else method


def sensitive(beta: float, eps: float) -> Method:
    """IntSGD with other constants than its default ones (C.4)."""
    constants = f"beta={beta:g}, eps={eps:g}"
    return replace(RANDOM, title=f"IntSGD, {constants}", spec=f"intsgd(bits=8, {constants})")


if TYPE_CHECKING:
    from experiments.papers.intsgd.paper import IntSGDStudy

TABLES: dict[Network, str] = {"pictures": "2", "words": "3"}
UNITS: dict[Network, str] = {"pictures": "", "words": "nats"}
_CURVES: dict[Network, str] = {"pictures": "3", "words": "4"}
DEFAULT = (0.9, 1e-8)
"""Beta and eps."""
_STABLE: dict[Network, float] = {"pictures": 0.01, "words": 0.02}
"""A point of accuracy; two per cent of the default's loss."""

Runs = Mapping[str, Sequence[Trained]]


def table_2(study: IntSGDStudy) -> list[Row]:
    """The ResNet by every method, and by SGD at other rates."""
    return [*_table(study, "pictures"), Row("2", *by_rate(study, study.scale.pictures, SGD, study.scale.num_ranks))]


def table_3(study: IntSGDStudy) -> list[Row]:
    """The LSTM by every method."""
    return _table(study, "words")


def _table(study: IntSGDStudy, network: Network) -> list[Row]:
    """Train with every method from the same seeds, and draw."""
    trained = {m.name: [study.train(network, on(network, m), seed) for seed in study.seeds] for m in TRAINED}
    _draw_training(study, network, trained)
    return quality(network, trained)


_THEIR_RANKS = 16


def sent(study: IntSGDStudy) -> list[Row]:
    """Bytes that a rank sends on the paper's 16 ranks by an all-gather of compressed gradients, over those of fp32's
    all-reduce."""
    rows = []
    for network in NETWORKS:
        model = (study.scale.pictures if network == "pictures" else study.scale.words).build(0)
        shapes = [tuple(parameter.shape) for parameter in model.parameters()]
        reduced = ring_factor(_THEIR_RANKS) * gradient_bytes(model)
        for method in (QSGD, NATSGD):
            gathered = (_THEIR_RANKS - 1) * sum(parse(method.spec).wire_bytes(shape) for shape in shapes)
            data = {"num_ranks": _THEIR_RANKS, "gathered_bytes": gathered, "reduced_bytes": reduced}
            rows.append(Row(TABLES[network], f"sent/{method.name}", gathered / reduced, "x", data))
    return rows


def measure(network: Network, run: Trained) -> float:
    """What is compared: accuracy of images, mean loss of words."""
    return run.final_accuracy if network == "pictures" else run.final_loss


def lost(network: Network, baseline: float, value: float) -> float:
    """By how much ``value`` is worse: in accuracy, or in nats."""
    return baseline - value if network == "pictures" else value - baseline


def quality(network: Network, runs: Runs) -> list[Row]:
    """Each method's quality, and by how much each seed's run is worse than SGD's."""
    base = [measure(network, run) for run in runs[SGD.name]]
    rows = []
    for method in TRAINED:
        own = [measure(network, run) for run in runs[method.name]]
        data: dict[str, Any] = {**curves(runs[method.name])}
        if method is not SGD:
            differences = [lost(network, b, value) for b, value in zip(base, own, strict=True)]
            data |= {"spec": on(network, method).spec, "lost": differences}
        rows.append(Row(TABLES[network], f"quality/{method.name}", fmean(own), UNITS[network], data))
    return rows


# --- times


def times(study: IntSGDStudy) -> list[Row]:
    """Steps of every method, in turns over slow links, and what they are made of."""
    scale = study.scale
    runs = SeparateRuns("links", study.emulated, scale.num_ranks, scale.runs)
    turns: dict[str, Any] = {"rounds": scale.rounds, "steps": scale.turn_steps, "rates": (study.rate,)}
    by_network: dict[Network, Times] = {}
    for network in NETWORKS:
        task: Any = scale.timed_pictures if network == "pictures" else scale.timed_words
        model = Model(network, NETWORKS[network], "", task, task.batch, "items/s", 0)
        methods = [on(network, method) for method in METHODS]
        (by_network[network],) = runs.times(model, methods, on_turn=study.advance, **turns)
    _draw_times(study, by_network)
    return [row for network in NETWORKS for row in speed(network, by_network[network])]


def parts_of_step(times: Times, name: str) -> dict[str, tuple[float, ...]]:
    """Seconds of a step by run: in all, of communication, and of what compression adds to computing. Whoever is ready
    waits for the others: parts are those of the rank that they take the least."""
    stages = times.least_stages[name]
    communication = stages["wire_s"]
    coding = [seconds for stage, seconds in stages.items() if stage != "wire_s"]
    overhead = tuple(map(sum, zip(*coding, strict=True))) if coding else (0.0,) * len(communication)
    return {"total": times.rounds[name], "communication": communication, "overhead": overhead}


def speed(network: Network, times: Times) -> list[Row]:
    """Each method's times: medians over runs, and all of them."""
    parts_by_method = {method.name: parts_of_step(times, method.name) for method in METHODS}
    rows = []
    for method in METHODS:
        medians = {part: median(seconds) for part, seconds in parts_by_method[method.name].items()}
        data = {f"{part}_s": medians[part] for part in ("communication", "overhead")}
        data |= {"by_run": parts_by_method[method.name]}
        rows.append(Row(TABLES[network], f"step_s/{method.name}", medians["total"], "s", data))
    return rows


# --- part (c)


def part_c(study: IntSGDStudy) -> list[Row]:
    """Figure 5: train with one constant changed at a time; the curves are of the first seed."""
    scale = study.scale
    methods = {title(*DEFAULT): RANDOM}
    for beta, eps in [*((b, DEFAULT[1]) for b in scale.betas), *((DEFAULT[0], e) for e in scale.epss)]:
        methods[title(beta, eps)] = sensitive(beta, eps)
    trained: dict[Network, dict[str, list[Trained]]] = {
        network: {
            name: [study.train(network, method, seed) for seed in study.seeds] for name, method in methods.items()
        }
        for network in NETWORKS
    }
    panels = ["ResNet: held-out accuracy", "LSTM: held-out loss"]
    figure, axes = plots.canvas(2, titles=panels, x="step", y=["", "nats"])
    for (network, runs), panel in zip(trained.items(), axes, strict=True):
        for name, (run, *_) in runs.items():
            values = run.accuracy if network == "pictures" else run.held_out_loss
            panel.plot(run.probe_steps, values[1:], label=name)
    plots.save(figure, study.picture("5"))
    return [stability(network, runs) for network, runs in trained.items()]


def title(beta: float, eps: float) -> str:
    return f"beta={beta:g}, eps={eps:g}"


def stability(network: Network, trained: Mapping[str, Sequence[Trained]]) -> Row:
    """By how much the worst choice of constants is worse than the default; ``margin`` is allowed."""
    values = {name: [measure(network, run) for run in runs] for name, runs in trained.items()}
    default = values[title(*DEFAULT)]
    worse = {
        name: [lost(network, base, value) for base, value in zip(default, own, strict=True)]
        for name, own in values.items()
    }
    # Unlike max(), a NaN comes out on top, so that a run that diverged does not hold.
    most = float(np.max([fmean(by_seed) for by_seed in worse.values()]))
    margin = _STABLE[network] * (1.0 if network == "pictures" else fmean(default))
    data = {"margin": margin, "values": values, "lost": worse}
    data["curves"] = {name: curves(runs[:1]) for name, runs in trained.items()}
    return Row("5", f"sensitivity/{network}", most, UNITS[network], data)


# --- pictures


def _draw_training(study: IntSGDStudy, network: Network, runs: Runs) -> None:
    held_out = "accuracy" if network == "pictures" else "held_out_loss"
    titles = [f"{NETWORKS[network]}: training loss", f"held-out {held_out.replace('held_out_', '')}"]
    drawn, panels = plots.canvas(2, titles=titles, x="step", y=["nats", UNITS[network]])
    for method in TRAINED:
        own = runs[method.name]
        edges = [0, *own[0].probe_steps]
        values = [[fmean(run.train_loss[low:high]) for low, high in pairwise(edges)] for run in own]
        panels[0].plot(edges[1:], np.mean(values, axis=0), color=method.color, label=method.title)
        _plot(panels[1], method, own, held_out)
    if network == "pictures":
        panels[0].set_yscale("log")
    plots.save(drawn, study.picture(_CURVES[network]))


def _plot(axes: Any, method: Method, runs: Sequence[Trained], what: str) -> None:
    # What has been learned at all is learned before the first look.
    steps, values = runs[0].probe_steps, np.array([getattr(run, what) for run in runs])[:, 1:]
    axes.plot(steps, values.mean(0), color=method.color, label=method.title)
    axes.fill_between(steps, values.min(0), values.max(0), color=method.color, alpha=0.15, linewidth=0)


def _draw_times(study: IntSGDStudy, times: Mapping[Network, Times]) -> None:
    """What a step is made of, one bar a method."""
    titles = [f"{name}, a step {study.over}" for name in NETWORKS.values()]
    drawn, panels = plots.canvas(2, titles=titles, x="ms", y="")
    for network, axes in zip(NETWORKS, panels, strict=True):
        medians = [{k: median(v) for k, v in parts_of_step(times[network], m.name).items()} for m in METHODS]
        widths = {
            ("communication", "#c0392b"): [m["communication"] for m in medians],
            ("encoding and decoding", "#d98a00"): [m["overhead"] for m in medians],
            ("computation, waiting", "#bbbbbb"): [m["total"] - m["communication"] - m["overhead"] for m in medians],
        }
        left = np.zeros(len(METHODS))
        for (label, color), seconds in widths.items():
            width = 1e3 * np.maximum(0.0, np.array(seconds))
            axes.barh(range(len(METHODS)), width, left=left, color=color, label=label)
            left += width
        axes.set_yticks(range(len(METHODS)), [method.title for method in METHODS])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
    # Of both: in the second panel it would hide bars.
    panels[0].legend(frameon=False, fontsize="small")
    plots.save(drawn, study.picture("2"), legends=False)
