"""Figures 12 and 13: assumption 3.2, and theorems 3.4 and 3.5."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np

from thinwire.repro import plots
from thinwire.repro.fft import methods
from thinwire.repro.fft.runs import Trained
from thinwire.repro.fft.study import Study
from thinwire.repro.findings import Finding, no_worse, points, worse

MILD, STRONG = 0.5, 0.9
_COLOURS = {"sgd": "#555555", "mild": "#0a7d4f", "strong": "#c0392b", "dropped": "#d98a00"}


def alpha_thetas() -> tuple[float, ...]:
    """Thetas whose alpha is sampled (Fig. 12)."""
    return MILD, methods.THETA, STRONG


def figure_12(study: Study) -> list[Finding]:
    """Alpha, ``‖v̄ − v̂̄‖ / ‖v̄‖``, along a training at several thetas."""
    every = study.scale.measure_every
    found = {theta: study.train(methods.constant(theta), 0, measure=every).alpha for theta in alpha_thetas()}
    figure, (axes,) = plots.canvas(1, titles=["assumption 3.2"], x="step", y="alpha: ‖v̄ − v̂‖ / ‖v̄‖")
    for theta, samples in found.items():
        axes.plot(*zip(*samples, strict=True), label=f"theta={theta}")
    _mark_drop(study, axes)
    axes.set_ylim(0, max(1.0, axes.get_ylim()[1]))
    plots.save(figure, study.picture("12"))
    # Unlike max(), a NaN comes out on top, so that a run that diverged does not hold.
    most = {theta: float(np.max([value for _, value in samples])) for theta, samples in found.items()}
    text = "the highest is " + ", ".join(f"{most[theta]:.2f} at theta={theta}" for theta in found)
    return [
        Finding(
            "12",
            f"alpha/{theta}",
            most[theta],
            "",
            "alpha stays in [0, 1] (section 4.1)" if theta == methods.THETA else "",
            text,
            all(value <= 1 for value in most.values()) if theta == methods.THETA else None,
            {"samples": samples, "mean": fmean(value for _, value in samples)},
        )
        for theta, samples in found.items()
    ]


def figure_13(study: Study) -> list[Finding]:
    """A mild theta follows SGD, a strong one does not, and a strong one that is dropped to 0 comes back."""
    specs = {
        "sgd": None,
        "mild": methods.constant(MILD),
        "strong": methods.constant(STRONG),
        "dropped": methods.dropped(STRONG, study.task.drop_step),
    }
    found = {name: [study.train(spec, seed) for seed in study.seeds] for name, spec in specs.items()}
    _draw_13(study, found)
    claims = {
        "mild": f"theta={MILD} has exactly the {{}} of SGD (section 4.1)",
        "strong": f"theta={STRONG} deviates from SGD's {{}} significantly (section 4.1)",
        "dropped": f"theta={STRONG}, dropped to 0 with the learning rate, ends at SGD's {{}} (section 4.1)",
    }
    rows = []
    for name, runs in found.items():
        lost, more_loss = lost_accuracy(found["sgd"], runs), added_loss(found["sgd"], runs)
        judged = worse if name == "strong" else no_worse
        estimate, holds = judged(lost, study.scale.margin)
        loss_estimate, loss_holds = judged(more_loss, study.scale.loss_margin)
        train = {key: fmean(run.last_train_loss for run in value) for key, value in found.items()}
        # The paper says it of the accuracy alone.
        loss_claim = "" if name == "dropped" else claims.get(name, "").format("training loss")
        rows.append(
            Finding(
                "13",
                f"accuracy/{name}",
                fmean(run.final_accuracy for run in runs),
                "",
                claims.get(name, "").format("accuracy"),
                f"{fmean(run.final_accuracy for run in runs):.2%}"
                + (f", lost: {points(estimate)}" if name in claims else ""),
                holds if name in claims else None,
                {"spec": specs[name], "margin": study.scale.margin, "lost": lost, **curves(runs)},
                aside="" if name in claims else "SGD's accuracy",
            )
        )
        rows.append(
            Finding(
                "13",
                f"train_loss/{name}",
                train[name],
                "nats",
                loss_claim,
                f"{train[name]:.4f} against {train['sgd']:.4f}: {loss_estimate.mean:+.0%}",
                loss_holds if loss_claim else None,
                {"margin": study.scale.loss_margin, "more": more_loss},
            )
        )
    return rows


def lost_accuracy(baseline: Sequence[Trained], runs: Sequence[Trained]) -> list[float]:
    """Accuracy that each seed's run lost against its pair."""
    return [base.final_accuracy - run.final_accuracy for base, run in zip(baseline, runs, strict=True)]


def added_loss(baseline: Sequence[Trained], runs: Sequence[Trained]) -> list[float]:
    """By how much, relatively, each seed's training loss is above its pair's; infinity where either diverged."""
    pairs = [(base.last_train_loss, run.last_train_loss) for base, run in zip(baseline, runs, strict=True)]
    return [own / base - 1 if base > 0 and math.isfinite(own) else math.inf for base, own in pairs]


def curves(runs: Sequence[Trained]) -> dict[str, object]:
    """What a JSON row keeps of runs: final figures by seed, and the mean curves over steps."""
    return {
        "final_accuracy": [run.final_accuracy for run in runs],
        "final_loss": [run.final_loss for run in runs],
        "train_loss": [run.last_train_loss for run in runs],
        "steps": [0, *runs[0].probe_steps],
        "accuracy_curve": np.mean([run.accuracy for run in runs], axis=0).tolist(),
        "held_out_loss_curve": np.mean([run.held_out_loss for run in runs], axis=0).tolist(),
    }


def _draw_13(study: Study, found: Mapping[str, Sequence[Trained]]) -> None:
    labels = {
        "sgd": "SGD",
        "mild": f"theta={MILD}",
        "strong": f"theta={STRONG}",
        "dropped": f"theta={STRONG}, then 0",
    }
    titles, y = ["training loss", "held-out accuracy"], ["loss (nats)", "accuracy"]
    figure, (left, right) = plots.canvas(2, titles=titles, x="step", y=y)
    lowest: list[float] = []
    for name, runs in found.items():
        # Until the drop it lies upon the strong one.
        style = {"color": _COLOURS[name], "label": labels[name], "linestyle": "--" if name == "dropped" else "-"}
        first = runs[0]
        ends = [0, *first.probe_steps]
        losses = np.mean([run.train_loss for run in runs], axis=0)
        means = [losses[start:end].mean() for start, end in pairwise(ends)]
        left.plot(ends[1:], means, **style)
        accuracy = np.mean([run.accuracy for run in runs], axis=0)
        right.plot(ends, accuracy, **style)
        lowest.append(float(accuracy[len(accuracy) // 6 :].min()))
    for axes in (left, right):
        _mark_drop(study, axes)
    left.set_yscale("log")
    # What lies between methods, rather than the first steps.
    right.set_ylim(bottom=max(0.0, 1.5 * min(lowest) - 0.5))
    plots.save(figure, study.picture("13"))


def _mark_drop(study: Study, axes: Any) -> None:
    axes.axvline(study.task.drop_step, color="#888888", linewidth=1, linestyle=":", label="learning rate falls")
