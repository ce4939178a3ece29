"""Appendix G: one epoch, with changes from cluster centres instead of from samples' messages."""

from __future__ import annotations

import dataclasses
from statistics import fmean
from typing import Any

from thinwire.repro.aqsgd import ways as pipelines
from thinwire.repro.findings import Finding, no_worse, share, worse
from thinwire.repro.fullstack.jobs import run_jobs
from thinwire.repro.fullstack.study import Scale, Study
from thinwire.repro.statistics import relative_differences

BITS = (2, 3)
_BACKWARD = "maxabs(bits=6)"

Found = dict[str, list[dict[str, Any]]]


def _ways() -> dict[str, tuple[str, str, str, bool]]:
    """Title, forward, backward and whether centres are kept, by name."""
    found = {"fp32": ("FP32", "raw", "raw", False)}
    for bits in BITS:
        coder = pipelines.direct(bits, 6).forward
        found[f"direct{bits}"] = (f"DirectQ fw{bits} bw6", coder, _BACKWARD, False)
        found[f"centres{bits}"] = (f"256 centres fw{bits} bw6", coder, _BACKWARD, True)
    return found


WAYS = _ways()


def clusters_steps(scale: Scale) -> int:
    return len(WAYS) * scale.seeds * scale.online.steps


def online(study: Study) -> list[Finding]:
    """Every way from each seed; all samples are new."""
    task = study.scale.online
    weights = study.first().weights(task, study.shower("first training"))
    told = [(name, seed) for seed in study.seeds for name in WAYS]
    jobs = []
    for name, seed in told:
        _, forward, backward, centres = WAYS[name]
        job = {"task": dataclasses.asdict(task), "weights": None if weights is None else str(weights), "seed": seed}
        jobs.append({**job, "forward": forward, "backward": backward, "centres": centres})
    results = run_jobs(study, "clusters", jobs, [WAYS[name][0] for name, _ in told])
    found: Found = {name: [] for name in WAYS}
    for (name, _), result in zip(told, results, strict=True):
        found[name].append(result)
    return [*(row for bits in BITS for row in _judged(study, found, bits)), _alike(found), _table(found)]


def _losses(found: Found, name: str) -> list[float]:
    return [float(run["loss"]) for run in found[name]]


def _judged(study: Study, found: Found, bits: int) -> list[Finding]:
    margin, base = study.scale.margin, _losses(found, "fp32")
    ours, direct = _losses(found, f"centres{bits}"), _losses(found, f"direct{bits}")
    lost = relative_differences(ours, base)
    told, within = no_worse(lost, margin)
    gained = relative_differences(direct, ours)
    beside, better = worse(gained, 0.0)
    moved = fmean(float(run["moved_share"]) for run in found[f"centres{bits}"])
    return [
        Finding(
            "appendix G",
            f"loss/{bits}",
            told.mean,
            "",
            f"one epoch, fw{bits} bw6: with cluster centres the loss is within {margin:.0%} of FP32's",
            f"{fmean(ours):.3f} against {fmean(base):.3f}: {share(told)}; a change from the nearest centre is "
            f"{100 * moved:.0f} % of an activation",
            within,
            {"differences": lost, "moved_share": moved},
        ),
        Finding(
            "appendix G",
            f"direct/{bits}",
            beside.mean,
            "",
            f"one epoch, fw{bits} bw6: cluster centres help, DirectQ ends at a worse loss",
            f"DirectQ's {fmean(direct):.3f} against {fmean(ours):.3f}: {share(beside)}",
            better,
            {"differences": gained},
        ),
    ]


def _alike(found: Found) -> Finding:
    runs = [run for name in found if name.startswith("centres") for run in found[name]]
    alike = sum(bool(run["alike"]) for run in runs)
    return Finding(
        "appendix G",
        "alike",
        float(alike),
        "",
        "both sides keep the same centres",
        f"the same bytes at the end of {alike} of {len(runs)} trainings",
        alike == len(runs),
    )


def _table(found: Found) -> Finding:
    rows = []
    for name, (title, *_) in WAYS.items():
        runs = found[name]
        fewer = fmean(run["dense_bytes"] / run["sent_bytes"] for run in runs)
        held_out = fmean(run["held_out"] for run in runs)
        rows.append([title, f"{fmean(_losses(found, name)):.3f}", f"{held_out:.3f}", f"{fewer:.1f}x"])
    head = ["one epoch", "loss of its last quarter", "held out", "fewer bytes forward"]
    return Finding(
        "appendix G",
        "table",
        fmean(_losses(found, f"centres{BITS[0]}")),
        "",
        "",
        "all losses",
        None,
        {
            "table": {"title": "Appendix G, online learning", "head": head, "rows": rows},
            "losses": {name: [run["losses"] for run in runs] for name, runs in found.items()},
        },
    )
