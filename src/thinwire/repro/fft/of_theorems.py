"""Figures 12 and 13: assumption 3.2, and theorems 3.4 and 3.5."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean

import numpy as np

from thinwire.repro.fft import methods, plots
from thinwire.repro.fft.findings import Finding, no_worse, points, worse
from thinwire.repro.fft.runs import Trained
from thinwire.repro.fft.study import Study

MILD, STRONG = 0.5, 0.9
_COLOURS = {"sgd": "#555555", "mild": "#0a7d4f", "strong": "#c0392b", "dropped": "#d98a00"}


def alpha_thetas() -> tuple[float, ...]:
    """Thetas whose alpha is sampled (Fig. 12)."""
    return MILD, methods.THETA, STRONG


def figure_12(study: Study) -> list[Finding]:
    """Alpha, ``‖v̄ − v̂̄‖ / ‖v̄‖``, along a training at several thetas."""
    every = study.scale.measure_every
    found = {theta: study.train(methods.constant(theta), 0, measure=every).alpha for theta in alpha_thetas()}
    figure, (axes,) = plots.canvas(1, titles=["Assumption 3.2"], x="step", y="alpha")
    for theta, samples in found.items():
        axes.plot(*zip(*samples, strict=True), label=f"theta={theta}")
    axes.axvline(study.task.drop_step, color="#888888", linewidth=1, linestyle="--")
    axes.set_ylim(bottom=0)
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
            "alpha stays in [0, 1]" if theta == methods.THETA else "",
            text,
            all(value <= 1 for value in most.values()),
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
        "mild": f"theta={MILD} behaves exactly as SGD",
        "strong": f"theta={STRONG} deviates from SGD significantly",
        "dropped": f"theta={STRONG}, dropped to 0 with the learning rate, ends where SGD does",
    }
    rows = []
    for name, runs in found.items():
        lost = lost_accuracy(found["sgd"], runs)
        judged = worse if name == "strong" else no_worse
        estimate, holds = judged(lost, study.scale.margin)
        train = {key: fmean(run.last_train_loss for run in value) for key, value in found.items()}
        text = f"accuracy lost: {points(estimate)}; training loss {train[name]:.4f}, SGD's {train['sgd']:.4f}"
        rows.append(
            Finding(
                "13",
                f"accuracy/{name}",
                fmean(run.final_accuracy for run in runs),
                "",
                claims.get(name, ""),
                text,
                holds if name in claims else None,
                {"spec": specs[name], "margin": study.scale.margin, "lost": lost, **curves(runs)},
            )
        )
    return rows


def lost_accuracy(baseline: Sequence[Trained], runs: Sequence[Trained]) -> list[float]:
    """Accuracy that each seed's run lost against its pair."""
    return [base.final_accuracy - run.final_accuracy for base, run in zip(baseline, runs, strict=True)]


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
    for name, runs in found.items():
        style = {"color": _COLOURS[name], "label": labels[name]}
        first = runs[0]
        ends = [0, *first.probe_steps]
        losses = np.mean([run.train_loss for run in runs], axis=0)
        means = [losses[start:end].mean() for start, end in pairwise(ends)]
        left.plot(ends[1:], means, **style)
        right.plot(ends, np.mean([run.accuracy for run in runs], axis=0), **style)
    for axes in (left, right):
        axes.axvline(study.task.drop_step, color="#888888", linewidth=1, linestyle="--")
    left.set_yscale("log")
    plots.save(figure, study.picture("13"))
