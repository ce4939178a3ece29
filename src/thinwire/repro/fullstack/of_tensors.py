"""Appendix F: the all-reduces of tensor parallelism, compressed with and without delta compensation."""

from __future__ import annotations

import dataclasses
from statistics import fmean
from typing import Any

from thinwire.repro.aqsgd import ways as pipelines
from thinwire.repro.findings import Finding, no_worse, share, worse
from thinwire.repro.fullstack.jobs import run_jobs
from thinwire.repro.fullstack.study import Scale, Study
from thinwire.repro.statistics import relative_differences

BITS = (3, 4)
_NUM_RANKS = 2

Found = dict[str, list[dict[str, Any]]]


def _ways() -> dict[str, tuple[str, str]]:
    """Title and spec, by name."""
    found = {"fp32": ("FP32", "")}
    for bits in BITS:
        found[f"direct{bits}"] = (f"Q of sums, {bits} bits", pipelines.direct(bits, 6).forward)
        found[f"delta{bits}"] = (f"delta compensation, {bits} bits", pipelines.aqsgd(bits, 6).forward)
    return found


WAYS = _ways()


def tensors_steps(scale: Scale) -> int:
    return len(WAYS) * scale.seeds * scale.sums.steps


def sums(study: Study) -> list[Finding]:
    """Every way from each seed."""
    task = study.scale.sums
    weights = study.first().weights(task, study.shower("first training"))
    told = [(name, seed) for seed in study.seeds for name in WAYS]
    jobs = [
        {
            "task": dataclasses.asdict(task),
            "weights": None if weights is None else str(weights),
            "seed": seed,
            "spec": WAYS[name][1],
            "num_ranks": _NUM_RANKS,
        }
        for name, seed in told
    ]
    results = run_jobs(study, "tensors", jobs, [WAYS[name][0] for name, _ in told])
    found: Found = {name: [] for name in WAYS}
    for (name, _), result in zip(told, results, strict=True):
        found[name].append(result)
    return [*(row for bits in BITS for row in _judged(study, found, bits)), _table(study, found)]


def _losses(found: Found, name: str) -> list[float]:
    return [float(run["loss"]) for run in found[name]]


def _judged(study: Study, found: Found, bits: int) -> list[Finding]:
    margin, base = study.scale.margin, _losses(found, "fp32")
    ours, direct = _losses(found, f"delta{bits}"), _losses(found, f"direct{bits}")
    lost, gained = relative_differences(ours, base), relative_differences(direct, ours)
    told, within = no_worse(lost, margin)
    beside, better = worse(gained, 0.0)
    return [
        Finding(
            "appendix F",
            f"loss/{bits}",
            told.mean,
            "",
            f"tensor parallelism, {bits} bits: with delta compensation the loss is within {margin:.0%} of FP32's",
            f"{fmean(ours):.3f} against {fmean(base):.3f}: {share(told)}",
            within,
            {"differences": lost},
        ),
        Finding(
            "appendix F",
            f"direct/{bits}",
            beside.mean,
            "",
            f"tensor parallelism, {bits} bits: delta compensation helps, without it the loss is worse",
            f"without {fmean(direct):.3f} against {fmean(ours):.3f}: {share(beside)}",
            better,
            {"differences": gained},
        ),
    ]


def _table(study: Study, found: Found) -> Finding:
    rows = []
    for name, (title, _) in WAYS.items():
        runs = found[name]
        sent = fmean(run["sent_bytes"] for run in runs)
        fewer = f"{fmean(run['dense_bytes'] for run in runs) / sent:.1f}x" if sent else "1.0x"
        held_out = fmean(run["held_out"] for run in runs)
        rows.append([title, f"{fmean(_losses(found, name)):.3f}", f"{held_out:.3f}", fewer])
    head = [f"{_NUM_RANKS} ranks", "loss of the last epoch", "held out", "fewer bytes, first visits included"]
    return Finding(
        "appendix F",
        "table",
        fmean(_losses(found, f"delta{BITS[0]}")),
        "",
        "",
        f"{2 * study.scale.sums.model.layers} sums a step, {_NUM_RANKS + 1} messages each",
        None,
        {
            "table": {"title": "Appendix F, tensor parallelism", "head": head, "rows": rows},
            "losses": {name: [run["losses"] for run in runs] for name, runs in found.items()},
        },
    )
