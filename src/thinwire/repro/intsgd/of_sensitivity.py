"""Part (c), figure 5: what beta and eps do to IntSGD."""

from __future__ import annotations

import numpy as np

from thinwire.repro import plots
from thinwire.repro.fft.of_theorems import curves
from thinwire.repro.fft.runs import Trained
from thinwire.repro.findings import Finding
from thinwire.repro.intsgd.of_training import lost, measure
from thinwire.repro.intsgd.study import TASKS, Study
from thinwire.repro.intsgd.ways import RANDOM, Task, sensitive

_BETA, _EPS = 0.9, 1e-8
_MARGIN: dict[Task, float] = {"pictures": 0.01, "words": 0.02}
"""A point of accuracy; two per cent of the default's loss."""


def part_c(study: Study) -> list[Finding]:
    """Train with one constant changed at a time, from one seed."""
    rows, panels = [], {}
    for task in TASKS:
        default = study.train(task, RANDOM.spec_for(task), 0, RANDOM.title)
        found: dict[str, Trained] = {f"beta={_BETA:g}, eps={_EPS:g}": default}
        for beta, eps in [*((beta, _EPS) for beta in study.scale.betas), *((_BETA, eps) for eps in study.scale.epss)]:
            title = f"beta={beta:g}, eps={eps:g}"
            found[title] = study.train(task, sensitive(beta, eps), 0, f"IntSGD, {title}")
        panels[task] = found
        rows.append(stability(task, found, default))
    _draw(study, panels)
    return rows


def stability(task: Task, found: dict[str, Trained], default: Trained) -> Finding:
    """Whether no choice is worse than the default by more than the margin."""
    margin = _MARGIN[task] * (1.0 if task == "pictures" else default.final_loss)
    worst = {title: lost(task, [default], [run])[0] for title, run in found.items()}
    # Unlike max(), a NaN comes out on top, so that a run that diverged does not hold.
    most = float(np.max(list(worst.values())))
    at = max(worst, key=lambda title: worst[title])
    unit = (100.0, " points of accuracy") if task == "pictures" else (1.0, " nats")
    network = "ResNet" if task == "pictures" else "LSTM"
    return Finding(
        "5",
        f"sensitivity/{task}",
        most,
        "" if task == "pictures" else "nats",
        f"{network}: IntSGD is quite stable across beta and eps (C.4)",
        f"at most {unit[0] * most:+.3f}{unit[1]} worse than the default, with {at}; {unit[0] * margin:.3f} allowed",
        bool(most <= margin),
        {
            "margin": margin,
            "values": {title: measure(task, run) for title, run in found.items()},
            "curves": {title: curves([run]) for title, run in found.items()},
        },
    )


def _draw(study: Study, panels: dict[Task, dict[str, Trained]]) -> None:
    titles = ["ResNet: held-out accuracy", "LSTM: held-out loss"]
    figure, axes = plots.canvas(2, titles=titles, x="step", y=["", "nats"])
    for task, panel in zip(TASKS, axes, strict=True):
        for title, run in panels[task].items():
            values = run.accuracy if task == "pictures" else run.held_out_loss
            panel.plot(run.probe_steps, values[1:], label=title)
    plots.save(figure, study.picture("5"))
