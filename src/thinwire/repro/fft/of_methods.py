"""Figure 14 and table 2: accuracy and wall time over a slow link, by method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np

from thinwire.repro import plots
from thinwire.repro.fft.methods import FFT, FP32, LOSSY, Method
from thinwire.repro.fft.of_theorems import curves, lost_accuracy
from thinwire.repro.fft.runs import Trained
from thinwire.repro.fft.study import Study
from thinwire.repro.findings import Finding, no_worse, points, worse


def all_methods() -> tuple[Method, ...]:
    """Of Fig. 14: as the paper has them, and again with error feedback."""
    return (FP32, *LOSSY, *(method.with_feedback() for method in LOSSY))


def figure_14(study: Study) -> list[Finding]:
    """Train over the slow link with every method from the same seeds."""
    found: dict[str, list[Trained]] = {method.name: [] for method in all_methods()}
    for seed in study.seeds:
        # Seed by seed, so that what slows the machine for a while slows all methods.
        for method in all_methods():
            run = study.train(method.spec, seed, exclude=method.exclude, shaped=True)
            found[method.name].append(run)
    _draw_14(study, found)
    return [*_accuracies(study, found), *_speedups(study, found)]


def _accuracies(study: Study, found: Mapping[str, Sequence[Trained]]) -> list[Finding]:
    rows = []
    for method in all_methods():
        runs = found[method.name]
        lost = lost_accuracy(found[FP32.name], runs)
        judged = method in LOSSY
        estimate, holds = (worse if judged and method is not FFT else no_worse)(lost, study.scale.margin)
        verb = "loses next to nothing" if method is FFT else "loses accuracy"
        claim = f"{method.title} {verb}: {method.accuracy:.2f} points (table 2, ResNet-32)"
        rows.append(
            Finding(
                "14",
                f"accuracy/{method.name}",
                fmean(run.final_accuracy for run in runs),
                "",
                claim if judged else "",
                f"{fmean(run.final_accuracy for run in runs):.2%}"
                + ("" if method is FP32 else f", lost: {points(estimate)}"),
                holds if judged else None,
                {"spec": method.spec, "margin": study.scale.margin, "lost": lost, **curves(runs)},
                aside="" if judged else method.title,
            )
        )
    return rows


def _speedups(study: Study, found: Mapping[str, Sequence[Trained]]) -> list[Finding]:
    # Pair by pair, so that a machine that slows down slows both down.
    step_s = {name: [run.step_seconds for run in runs] for name, runs in found.items()}
    speedups = {
        name: fmean(base / own for base, own in zip(step_s[FP32.name], times, strict=True))
        for name, times in step_s.items()
    }
    rows = []
    for method in all_methods():
        runs, claim, slower = found[method.name], "", [FP32.name]
        if method in LOSSY:
            claim = f"{method.title} is faster than fp32: {method.speedup:.2f}x (table 2, ResNet-32)"
        if method is FFT:
            claim = f"{method.title} is the fastest: {method.speedup:.2f}x (table 2, ResNet-32)"
            slower += [other.name for other in LOSSY if other is not FFT]
        holds = faster(step_s[method.name], [step_s[name] for name in slower])
        sent = fmean(run.payload_bytes for run in runs)
        dense = fmean(run.payload_bytes for run in found[FP32.name])
        rows.append(
            Finding(
                "14",
                f"speedup/{method.name}",
                speedups[method.name],
                "x",
                claim,
                f"{speedups[method.name]:.2f}x with {dense / sent:.1f}x fewer bytes"
                if study.timed
                else "no slow link can be emulated here",
                holds if claim and study.timed else None,
                {
                    "timed": study.timed,
                    "step_s": step_s[method.name],
                    "train_s": [sum(run.step_s) for run in runs],
                    "payload_bytes": sent,
                    "ratio": dense / sent,
                    "ratio_in_the_paper": method.ratio,
                },
                aside=f"{method.title}'s speed over fp32" if method not in (FP32, *LOSSY) else "",
            )
        )
    return rows


def faster(seconds: Sequence[float], others: Sequence[Sequence[float]]) -> bool | None:
    """Whether ``seconds`` (one a seed) are below all of ``others``' at each seed; None where seeds disagree, and for
    a single one."""
    won = [mine < min(their) for mine, *their in zip(seconds, *others, strict=True)]
    return won[0] if len(won) > 1 and len(set(won)) == 1 else None


def _draw_14(study: Study, found: Mapping[str, Sequence[Trained]]) -> None:
    titles = ["as in the paper, without error feedback", "with error feedback"]
    over = f"over {study.runs.rate}" if study.timed else "over loopback"
    figure, panels = plots.canvas(2, titles=titles, x=f"seconds of training {over}", y="held-out loss (nats)")
    for axes, feedback in zip(panels, (False, True), strict=True):
        for method in (FP32, *(m.with_feedback() if feedback else m for m in LOSSY)):
            runs = found[method.name]
            seconds = np.mean([run.seconds for run in runs], axis=0)
            accuracy = fmean(run.final_accuracy for run in runs)
            label = f"{method.title} ({accuracy:.1%})"
            losses = np.mean([run.held_out_loss for run in runs], axis=0)
            axes.plot(seconds, losses, color=method.colour, label=label)
        axes.set_yscale("log")
    plots.save(figure, study.picture("14"))
