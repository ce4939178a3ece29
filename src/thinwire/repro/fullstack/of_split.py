"""Figure 10: split learning, FP32, AQ-SGD fw2 bw8[0.2] and DirectQ of as many bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from thinwire.repro import plots
from thinwire.repro.aqsgd import ways as pipelines
from thinwire.repro.findings import Finding, no_worse, points, share, worse
from thinwire.repro.fullstack.jobs import run_jobs
from thinwire.repro.fullstack.study import Scale, Study
from thinwire.repro.fullstack.ways import Way
from thinwire.repro.statistics import relative_differences

_BACKWARD = "topk(density=0.2) | maxabs(bits=8)"
_BITS = "fw2 bw8[0.2]"
FP32 = Way("fp32", "FP32", "#222222")
AQSGD = Way("aqsgd", f"AQ-SGD {_BITS}", "#1f6fb2", forward=pipelines.aqsgd(2, 8).forward, backward=_BACKWARD)
DIRECT = Way("direct", f"DirectQ {_BITS}", "#e8a33d", forward=pipelines.direct(2, 8).forward, backward=_BACKWARD)
WAYS = (FP32, AQSGD, DIRECT)
_POINTS = 0.02
"""Of accuracy: what "similar" is taken for."""
_LOSS_MARGIN = 0.1
"""Of a training loss that is close to zero."""
_LAST_ROUNDS = 3

Found = dict[str, list[dict[str, Any]]]


def split_steps(scale: Scale) -> int:
    """Rounds of all trainings."""
    return len(WAYS) * scale.seeds * scale.split.rounds


def splitting(study: Study) -> list[Finding]:
    """Every way from each seed, which is that of the weights, of who has which images, and of how they are seen."""
    task, seeds = study.scale.split, range(study.scale.seeds)
    told = [(way, seed) for seed in seeds for way in WAYS]
    jobs = [
        {"task": dataclasses.asdict(task), "forward": way.forward, "backward": way.backward, "seed": seed}
        for way, seed in told
    ]
    results = run_jobs(study, "split", jobs, [way.title for way, _ in told])
    found: Found = {way.name: [] for way in WAYS}
    for (way, _), result in zip(told, results, strict=True):
        found[way.name].append(result)
    _draw(study, found)
    rows = [_loss(found), _accuracy(found), _direct_loss(found), _direct_accuracy(found), _alike(found)]
    return [*rows, _table(study, found)]


def train_loss(run: dict[str, Any]) -> float:
    """Of the last rounds."""
    return fmean(run["losses"][-_LAST_ROUNDS:])


def accuracy(run: dict[str, Any]) -> float:
    """At the end."""
    return float(run["accuracies"][-1][1])


def _losses(found: Found, way: Way) -> list[float]:
    return [train_loss(run) for run in found[way.name]]


def _lost(found: Found, way: Way, other: Way) -> list[float]:
    """Accuracy, in shares of the images, seed by seed."""
    pairs = zip(found[way.name], found[other.name], strict=True)
    return [accuracy(theirs) - accuracy(ours) for ours, theirs in pairs]


def _loss(found: Found) -> Finding:
    differences = relative_differences(_losses(found, AQSGD), _losses(found, FP32))
    told, holds = no_worse(differences, _LOSS_MARGIN)
    return Finding(
        "figure 10",
        "loss/aqsgd",
        told.mean,
        "",
        f"split learning: AQ-SGD {_BITS} has a training loss similar to FP32's (within {_LOSS_MARGIN:.0%})",
        f"{fmean(_losses(found, AQSGD)):.3f} against {fmean(_losses(found, FP32)):.3f}: {share(told)}",
        holds,
        {"differences": differences},
    )


def _accuracy(found: Found) -> Finding:
    differences = _lost(found, AQSGD, FP32)
    told, holds = no_worse(differences, _POINTS)
    return Finding(
        "figure 10",
        "accuracy/aqsgd",
        told.mean,
        "",
        f"split learning: AQ-SGD {_BITS} keeps FP32's test accuracy (within {100 * _POINTS:.0f} points)",
        f"{_shown(found, AQSGD)} against {_shown(found, FP32)}, lost: {points(told)}",
        holds,
        {"differences": differences},
    )


def _direct_loss(found: Found) -> Finding:
    differences = relative_differences(_losses(found, DIRECT), _losses(found, AQSGD))
    told, holds = worse(differences, 0.0)
    return Finding(
        "figure 10",
        "loss/direct",
        told.mean,
        "",
        "split learning: AQ-SGD converges better than DirectQ",
        f"DirectQ's training loss {fmean(_losses(found, DIRECT)):.3f} against {fmean(_losses(found, AQSGD)):.3f}: "
        f"{share(told)}",
        holds,
        {"differences": differences},
    )


def _direct_accuracy(found: Found) -> Finding:
    differences = _lost(found, DIRECT, AQSGD)
    told, holds = worse(differences, 0.0)
    return Finding(
        "figure 10",
        "accuracy/direct",
        told.mean,
        "",
        "split learning: AQ-SGD generalises better than DirectQ",
        f"test accuracy {_shown(found, AQSGD)} against DirectQ's {_shown(found, DIRECT)}, lost: {points(told)}",
        holds,
        {"differences": differences},
    )


def _alike(found: Found) -> Finding:
    runs: Sequence[dict[str, Any]] = found[AQSGD.name]
    alike = sum(bool(run["alike"]) for run in runs)
    return Finding(
        "figure 10",
        "alike",
        float(alike),
        "",
        "client and server keep the same messages, cropped and mirrored images' too",
        f"the same bytes at the end of {alike} of {len(runs)} trainings",
        alike == len(runs),
    )


def _shown(found: Found, way: Way) -> str:
    return f"{fmean(map(accuracy, found[way.name])):.1%}"


def _table(study: Study, found: Found) -> Finding:
    images, rows = study.scale.split.images.name, []
    for way in WAYS:
        runs = found[way.name]
        fewer = fmean(run["dense_bytes"] / run["sent_bytes"] for run in runs)
        rows.append([way.title, f"{fmean(_losses(found, way)):.3f}", _shown(found, way), f"{fewer:.1f}x"])
    head = ["", "training loss", "test accuracy", "fewer bytes, first visits included"]
    return Finding(
        "figure 10",
        "table",
        accuracy(found[AQSGD.name][0]),
        "",
        "",
        f"{images}, {study.scale.split.clients} clients, {study.scale.split.rounds} rounds",
        None,
        {
            "table": {"title": f"Split learning, {images}", "head": head, "rows": rows},
            "losses": {name: [run["losses"] for run in runs] for name, runs in found.items()},
            "accuracies": {name: [run["accuracies"] for run in runs] for name, runs in found.items()},
        },
    )


def _draw(study: Study, found: Found) -> None:
    titles = ["split learning: training loss", "test accuracy"]
    figure, (left, right) = plots.canvas(2, titles=titles, x="round", y=["loss", ""])
    for way in WAYS:
        runs = found[way.name]
        losses = [fmean(column) for column in zip(*(run["losses"] for run in runs), strict=True)]
        left.plot(range(1, len(losses) + 1), losses, color=way.colour, label=way.title)
        rounds = [at for at, _ in runs[0]["accuracies"]]
        shares = zip(*([value for _, value in run["accuracies"]] for run in runs), strict=True)
        right.plot(rounds, [fmean(column) for column in shares], color=way.colour, label=way.title)
    plots.save(figure, study.picture("10-split"))
