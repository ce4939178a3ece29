"""What is measured and drawn for each figure of the FFT paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean, median
from typing import Any, Self

import numpy as np

from experiments.framework.claims import Row
from experiments.framework.methods import NOTHING, Method
from experiments.framework.study import Scale, Study, plain_log
from experiments.framework.timing import SeparateRuns
from experiments.framework.training import Gradients, Trained, added_loss, curves, lost_accuracy, record
from experiments.papers.fft import methods
from experiments.papers.fft.methods import ALL, CONTROL, FFT, FP32, LOSSY, MILD, STRONG, THETA, TOPK
from experiments.papers.fft.reconstruct import (
    Reconstruction,
    distance,
    histogram,
    join,
    largest_layer,
    quantiles,
    reconstruct,
    reconstruct_layer,
    share_with_least_error,
)
from experiments.papers.rates import by_rate
from experiments.tasks.images import ImageTask, Model
from thinwire.compressors import parse
from thinwire_tools import plots

ALPHA_THETAS = (MILD, THETA, STRONG)
"""Thetas whose alpha is sampled for figure 12."""
_SHOWN = 200
# Odd, so that zero lies within a bin.
_BINS = 81
_PAPER_RATIOS = {"fp32": 1.0, "fft": 21.3, "topk": 6.67, "qsgd": 10.6, "terngrad": 16.0}


@dataclass(frozen=True, kw_only=True)
class FFTScale(Scale):
    """The network of ``task`` learns images of the folder ``data`` (None: scikit-learn's digits). For figure 16 each of
    ``world_sizes`` has ``runs`` separate runs of ``rounds`` turns of ``scaling_steps`` replayed steps of the ``timed``
    network; alpha is measured every ``measure_every`` steps."""

    task: ImageTask
    timed: ImageTask = field(default_factory=ImageTask)
    num_ranks: int = 2
    data: str | None = None
    steps: int | None = None
    rate: str | None = "200mbit"
    measure_every: int = 10
    runs: int = 5
    rounds: int = 3
    scaling_steps: int = 8
    world_sizes: tuple[int, ...] = (1, 2, 3, 4)

    def adapted(self, **options: Any) -> Self:
        made = super().adapted(**options)
        task = replace(made.task, data=made.data)
        if made.steps is not None:
            task = replace(task, steps=made.steps, probe_every=max(1, made.steps // 16))
        return replace(made, task=task)

    def about(self) -> dict[str, Any]:
        images = self.task.images
        return {
            "images": {"name": images.name, "train": len(images.train), "held_out": len(images.held_out)},
            "parameters": sum(parameter.numel() for parameter in self.task.build(0).parameters()),
        }


@dataclass
class FFTStudy(Study[FFTScale]):
    """A run that trains the scale's task."""

    link: Any = "loopback"
    _gradients: dict[int, Gradients] = field(default_factory=dict)

    def about(self) -> dict[str, Any]:
        return {"link": self.link}

    @property
    def task(self) -> ImageTask:
        return self.scale.task

    def train(self, method: Method, seed: int, *, measure: int = 0, shaped: bool = False) -> Trained:
        """Run `Study.train_task` with the scale's task and ranks."""
        num_ranks = self.scale.num_ranks
        trained = self.train_task(self.task, method, seed, num_ranks=num_ranks, measure=measure, shaped=shaped)
        if shaped and self.emulated:
            link = self.trainings(num_ranks).link
            self.link = link if link != "loopback" else self.link
        return trained

    def gradients(self, seed: int = 0) -> Gradients:
        """Return gradients recorded ten times, evenly, along an uncompressed training."""
        if seed not in self._gradients:
            at = sorted({self.task.steps * i // 10 for i in range(10)})
            on_step = self.reporter("gradients")
            self._gradients[seed] = record(self.task, seed, self.scale.num_ranks, at, on_step)
        return self._gradients[seed]


# --- figures 5 and 15: recorded gradients as receivers see them


def figure_5(study: FFTStudy) -> list[Row]:
    """FFT and top-k at one theta, without quantization: which is nearer to the gradient?"""
    gradients = study.gradients()
    steps, middle, layer = range(len(gradients.steps)), len(gradients.steps) // 2, largest_layer(gradients)
    specs = {"fft": methods.constant(THETA).spec, "topk": TOPK.spec}
    parts_by_spec = {name: [reconstruct(gradients, i, parse(spec)) for i in steps] for name, spec in specs.items()}
    errors = {name: [part.relative_error for part in parts] for name, parts in parts_by_spec.items()}
    absolute = {
        name: float(np.mean([float(part.errors.mean()) for part in parts])) for name, parts in parts_by_spec.items()
    }
    shown = {name: reconstruct_layer(gradients, middle, layer, parse(spec)) for name, spec in specs.items()}
    exact = shown["fft"].exact
    start = max(0, min(int(exact.abs().argmax()) - _SHOWN // 2, exact.numel() - _SHOWN))
    titles = [f"{m.title}: error {shown[m.name].relative_error:.0%} of the layer's norm" for m in (FFT, TOPK)]
    figure, panels = plots.canvas(2, titles=titles, x=f"element of {gradients.names[layer]}", y="gradient")
    at = np.arange(start, min(start + _SHOWN, exact.numel()))
    for axes, method in zip(panels, (FFT, TOPK), strict=True):
        axes.ticklabel_format(axis="y", scilimits=(-2, 3))
        axes.locator_params(axis="x", nbins=5)
        axes.plot(at, exact[at].numpy(), color="#aaaaaa", linewidth=1.5, label="sent")
        axes.plot(at, shown[method.name].received[at].numpy(), color=method.color, linewidth=1, label="received")
    plots.save(figure, study.picture("5"))
    rows = []
    for name, spec in specs.items():
        data = {"steps": gradients.steps, "errors": errors[name], "mean_absolute_error": absolute[name], "spec": spec}
        rows.append(Row("5", f"relative_error/{name}", float(np.mean(errors[name])), "", data))
    return rows


def figure_15(study: FFTStudy) -> list[Row]:
    """Histograms of what is received of the largest layer by each method, and the distribution of all errors, along a
    training from every seed; drawn are those of the first."""
    trainings = [_received(study.gradients(seed)) for seed in study.seeds]
    first = trainings[0]
    _draw_15(study, first.layer, first.shown, first.errors)
    return received_rows(trainings)


@dataclass(frozen=True)
class Received:
    """What arrives of the gradients along one training, by method. ``shown``: of the largest ``layer``, in the middle
    of the training; ``distances``: of its histograms from those of what was sent, in the mean over steps; ``errors``:
    quantiles of those of all layers and steps, whose norm for that of the gradients is ``relative_errors``."""

    layer: str
    shown: Mapping[str, Reconstruction]
    distances: Mapping[str, float]
    errors: Mapping[str, np.ndarray]
    relative_errors: Mapping[str, float]


def _received(gradients: Gradients) -> Received:
    steps, layer = range(len(gradients.steps)), largest_layer(gradients)
    codecs = {method.name: parse(method.spec) for method in LOSSY}
    # One layer of one step: others have other scales, and clusters vanish among them.
    by_step = {name: [reconstruct_layer(gradients, i, layer, codec) for i in steps] for name, codec in codecs.items()}
    joined = {name: join([reconstruct(gradients, i, codec) for i in steps]) for name, codec in codecs.items()}
    return Received(
        gradients.names[layer],
        {name: parts[len(steps) // 2] for name, parts in by_step.items()},
        {name: float(np.mean([distance(p, _edges(p)) for p in parts])) for name, parts in by_step.items()},
        {name: quantiles(part.errors) for name, part in joined.items()},
        {name: part.relative_error for name, part in joined.items()},
    )


def received_rows(trainings: Sequence[Received]) -> list[Row]:
    """Means over trainings, with every training's under ``by_seed``; histograms and quantiles are of the first."""
    rows, first = [], trainings[0]
    for name, part in first.shown.items():
        by_seed = [training.distances[name] for training in trainings]
        edges = _edges(part)
        data = {"by_seed": by_seed, "edges": edges.tolist(), "histogram": histogram(part.received, edges).tolist()}
        rows.append(Row("15", f"distance/{name}", fmean(by_seed), "", data))
    for name in first.errors:
        by_seed = [share_with_least_error(training.errors, name) for training in trainings]
        others = [other for other in first.errors if other != name]
        data = {
            "by_seed": by_seed,
            "below": {
                other: fmean(share_with_least_error(training.errors, name, [other]) for training in trainings)
                for other in others
            },
            "error_quantiles": first.errors[name][:: len(first.errors[name]) // 100].tolist(),
            "relative_error": fmean(training.relative_errors[name] for training in trainings),
        }
        rows.append(Row("15", f"least_error_share/{name}", fmean(by_seed), "", data))
    return rows


def _edges(reconstruction: Reconstruction) -> np.ndarray:
    """Bins over all but the outermost thousandth of the gradient."""
    limit = float(np.quantile(reconstruction.exact.abs().numpy(), 0.999)) or 1.0
    return np.linspace(-limit, limit, _BINS + 1)


def _draw_15(
    study: FFTStudy, layer: str, shown: Mapping[str, Reconstruction], errors: Mapping[str, np.ndarray]
) -> None:
    titles = [f"{method.title}: {layer}" for method in LOSSY]
    y = ["share of elements"] * len(LOSSY) + ["share of elements with at most this error"]
    x = f"mean of {study.scale.num_ranks} ranks (last bars: all beyond)"
    figure, panels = plots.canvas(len(LOSSY) + 1, titles=[*titles, "error, all layers and steps"], x=x, y=y)
    edges = _edges(shown["fft"])
    for axes, method in zip(panels, LOSSY, strict=False):
        part = shown[method.name]
        received = histogram(part.received, edges)
        axes.stairs(received, edges, fill=True, color=method.color, alpha=0.6, label="received")
        axes.stairs(histogram(part.exact, edges), edges, color="#333333", label="sent")
        axes.set_yscale("log")
        axes.ticklabel_format(axis="x", scilimits=(-2, 3))
    for method in LOSSY:
        at = errors[method.name]
        panels[-1].plot(at, np.linspace(0, 1, len(at)), color=method.color, label=method.title)
    # What top-k sends is exact: its curve does not begin at 0.
    least = float(np.quantile(errors["fft"], 0.01))
    panels[-1].set(xlabel="|sent − received|", xscale="log", xlim=(max(least, 1e-12), None), ylim=(0, 1.02))
    plots.save(figure, study.picture("15"))


def figure_12(study: FFTStudy) -> list[Row]:
    """Alpha, ``‖v̄ − v̂̄‖ / ‖v̄‖``, along a training at several thetas."""
    every = study.scale.measure_every
    alphas = {theta: study.train(methods.constant(theta), 0, measure=every).alpha for theta in ALPHA_THETAS}
    _draw_12(study, alphas)
    rows = []
    for theta, samples in alphas.items():
        values = [value for _, value in samples]
        # Unlike max(), a NaN comes out on top, so that a run that diverged does not hold.
        worst = float(np.max(values))
        rows.append(Row("12", f"alpha/{theta}", worst, "", {"samples": samples, "mean": fmean(values)}))
    return rows


def _draw_12(study: FFTStudy, alphas: Mapping[float, Sequence[tuple[int, float]]]) -> None:
    title = "error of the ranks' mean gradient after FFT"
    figure, (axes,) = plots.canvas(1, titles=[title], x="step", y="alpha: the error's norm / the gradient's norm")
    for theta, samples in alphas.items():
        axes.plot(*zip(*samples, strict=True), label=f"theta {theta}: {theta:.0%} of the components dropped")
    _mark_drop(study, axes)
    axes.set_ylim(0, max(1.0, axes.get_ylim()[1]))
    plots.save(figure, study.picture("12"))


def figure_13(study: FFTStudy) -> list[Row]:
    """A mild theta follows SGD, a strong one does not, and a strong one that is dropped to 0 comes back."""
    chosen = methods.convergence(study.task.drop_step, study.task.learning_rate)
    runs = {name: [study.train(method, seed) for seed in study.seeds] for name, method in chosen.items()}
    _draw_13(study, runs)
    rows = accuracy_rows("13", chosen, runs, "sgd")
    for name, own in runs.items():
        loss = fmean(run.last_train_loss for run in own)
        rows.append(Row("13", f"train_loss/{name}", loss, "nats", {"more": added_loss(runs["sgd"], own)}))
    return rows


def accuracy_rows(
    figure: str, chosen: Mapping[str, Method], runs: Mapping[str, Sequence[Trained]], baseline: str
) -> list[Row]:
    """Accuracy of each method, and by how much it is below the baseline's seed by seed."""
    rows = []
    for name, own in runs.items():
        spec = None if chosen[name].kind == "ddp" else chosen[name].spec
        data = {"spec": spec, "lost": lost_accuracy(runs[baseline], own), **curves(own)}
        rows.append(Row(figure, f"accuracy/{name}", fmean(run.final_accuracy for run in own), "", data))
    return rows


def _draw_13(study: FFTStudy, trained: Mapping[str, Sequence[Trained]]) -> None:
    chosen = methods.convergence(study.task.drop_step, study.task.learning_rate)
    titles, y = ["training loss", "held-out accuracy"], ["loss (nats)", "accuracy"]
    figure, (left, right) = plots.canvas(2, titles=titles, x="step", y=y)
    lowest: list[float] = []
    for name, runs in trained.items():
        # Until the drop it lies upon the one that is not dropped.
        style = {"color": chosen[name].color, "linestyle": "--" if "dropped" in name else "-"}
        first = runs[0]
        ends = [0, *first.probe_steps]
        losses = np.mean([run.train_loss for run in runs], axis=0)
        means = [losses[start:end].mean() for start, end in pairwise(ends)]
        left.plot(ends[1:], means, **style)
        accuracy = np.mean([run.accuracy for run in runs], axis=0)
        right.plot(ends, accuracy, label=chosen[name].title, **style)  # on the left a legend would hide lines
        lowest.append(float(accuracy[len(accuracy) // 6 :].min()))
    _mark_drop(study, left, label="")
    _mark_drop(study, right)
    left.set_yscale("log")
    # What lies between methods, rather than the first steps.
    right.set_ylim(bottom=max(0.0, 1.5 * min(lowest) - 0.5))
    plots.save(figure, study.picture("13"))


def _mark_drop(study: FFTStudy, axes: Any, *, label: str = "learning rate falls") -> None:
    axes.axvline(study.task.drop_step, color="#888888", linewidth=1, linestyle=":", label=label)


def table_2(study: FFTStudy) -> list[Row]:
    """Accuracy of every method, of a control that must be worse, and of fp32 at other rates; no clock takes part."""
    methods_by_name = {method.name: method for method in ALL} | {"control": CONTROL}
    runs = {name: [study.train(method, seed) for seed in study.seeds] for name, method in methods_by_name.items()}
    rates = by_rate(study, study.task, FP32, study.scale.num_ranks)
    return [*accuracy_rows("table 2", methods_by_name, runs, FP32.name), Row("table 2", *rates)]


def figure_14(study: FFTStudy) -> list[Row]:
    """Train over the slow link with every method from the same seeds."""
    runs: dict[str, list[Trained]] = {method.name: [] for method in ALL}
    for seed in study.seeds:
        # Seed by seed, so that what slows the machine for a while slows all methods.
        for method in ALL:
            runs[method.name].append(study.train(method, seed, shaped=True))
    _draw_14(study, runs)
    return speed_rows(runs)


def speed_rows(runs: Mapping[str, Sequence[Trained]]) -> list[Row]:
    """Seconds of a step by seed, and speeds over fp32 pair by pair, so that a machine that slows down slows both."""
    step_s = {name: [run.step_seconds for run in own] for name, own in runs.items()}
    sent = {name: fmean(run.payload_bytes for run in own) for name, own in runs.items()}
    rows = []
    for name, times in step_s.items():
        gains = [base / own for base, own in zip(step_s[FP32.name], times, strict=True)]
        data = {"step_s": times, "train_s": [sum(run.step_s) for run in runs[name]], "payload_bytes": sent[name]}
        data |= {"ratio": sent[FP32.name] / sent[name], "ratio_in_the_paper": _PAPER_RATIOS.get(name)}
        rows.append(Row("14", f"speedup/{name}", fmean(gains), "x", data))
    return rows


def _draw_14(study: FFTStudy, trained: Mapping[str, Sequence[Trained]]) -> None:
    figure, (axes,) = plots.canvas(1, titles=[""], x=f"seconds of training {study.over}", y="held-out loss (nats)")
    for method in ALL:
        runs = trained[method.name]
        seconds = np.mean([run.seconds for run in runs], axis=0)
        accuracy = fmean(run.final_accuracy for run in runs)
        losses = np.mean([run.held_out_loss for run in runs], axis=0)
        axes.plot(seconds, losses, color=method.color, label=f"{method.title} (accuracy {accuracy:.1%})")
    axes.set_yscale("log")
    plain_log(axes.yaxis)
    plots.save(figure, study.picture("14"))


def figure_16(study: FFTStudy) -> list[Row]:
    """Images a second by world size, as multiples of one rank's: of replayed steps, in several separate runs."""
    scale, computes = study.scale, {}
    model = Model("cnn", "CNN", "ResNet-32", scale.timed, scale.timed.batch, "images/s", 0)
    step_s: dict[str, dict[int, Sequence[float]]] = {method.name: {} for method in (*ALL, NOTHING)}
    for size in scale.world_sizes:
        runs = SeparateRuns("links", study.emulated and size > 1, size, scale.runs, computes)
        methods = (*ALL, NOTHING) if size > 1 else (FP32,)
        options: dict[str, Any] = {"rounds": scale.rounds, "steps": scale.scaling_steps, "on_turn": study.advance}
        (times,) = runs.times(model, methods, rates=(study.rate if size > 1 else None,), **options)
        for name, by_size in step_s.items():
            by_size[size] = times.rounds[name if size > 1 else FP32.name]
    speeds = {
        name: {size: size / median(seconds) for size, seconds in by_size.items()} for name, by_size in step_s.items()
    }
    times = {
        name: {size: value / by_size[min(by_size)] for size, value in by_size.items()}
        for name, by_size in speeds.items()
    }
    _draw_16(study, times)
    most, rows = max(scale.world_sizes), []
    for name, by_size in speeds.items():
        images = {size: model.items_per_batch * value for size, value in by_size.items()}
        data = {"by_world_size": times[name], "images_per_s": images, "step_s": step_s[name][most]}
        data |= {"share_of_ceiling": by_size[most] / speeds[NOTHING.name][most]}
        rows.append(Row("16", f"scaling/{name}", times[name][most], "x", data))
    return rows


def _draw_16(study: FFTStudy, times: dict[str, dict[int, float]]) -> None:
    figure, (axes,) = plots.canvas(
        1, titles=[f"weak scaling {study.over}"], x="ranks", y="images/s, relative to one rank"
    )
    styles = {method.name: (method.title, method.color) for method in ALL}
    styles[NOTHING.name] = ("nothing sent", "#aaaaaa")
    for name, by_size in times.items():
        title, color = styles[name]
        dashed = "--" if name == NOTHING.name else "-"
        axes.plot(list(by_size), list(by_size.values()), color=color, linestyle=dashed, marker="o", label=title)
    axes.set_xticks(list(study.scale.world_sizes))
    # Room for the legend.
    axes.set_ylim(0, 1.5 * axes.get_ylim()[1])
    plots.save(figure, study.picture("16"))
