"""What docs/repro-fullstack.md shows of the figures of ``thinwire repro fullstack``."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from figures import BENCHMARKS, Figures, bullets, claims, pictures, table
from repro_pages import results_of


def repro_fullstack(benchmarks: Path = BENCHMARKS) -> str:
    """The whole section: claims, tables, what differs, pictures."""
    path = benchmarks / "repro-fullstack.json"
    if not path.exists():
        return "Not measured yet: `make bench`."
    figures, results = Figures(path), results_of(path.stem, benchmarks)
    about = figures.record["about"]
    tables = [_losses(results), _throughput(results), _optimizers(results), _others(results)]
    shown = "\n\n".join(text for text in tables if text)
    return (
        f"{claims(results, 'the paper')}\n\nHow a claim is judged: {about['judged']}.\n\n{shown}\n\n"
        f"In what this is not the paper's experiment:\n\n{bullets(about['differs_from_the_paper'])}\n"
        f"{pictures(benchmarks / 'repro-fullstack')}\n{figures.machine}."
    )


def _row(results: list[dict[str, Any]], name: str) -> dict[str, Any] | None:
    return next((row for row in results if row["name"] == name), None)


def _losses(results: list[dict[str, Any]]) -> str:
    rows = []
    for row in results:
        if row["name"].startswith("figure 5/loss/") and "title" in row:
            base = row["baseline"]
            cells = [_mean(base["losses"]), _mean(row["losses"]), f"{row['dense_bytes'] / row['sent_bytes']:.1f}x"]
            rows.append([row["title"], *cells])
    head = ["loss of the last epoch", "FP32", "compressed", "fewer bytes in all, exact steps included"]
    return f"Figure 5 (a, b):\n\n{table(head, rows)}" if rows else ""


def _mean(losses: list[float | None]) -> str:
    """None stands for what diverged."""
    known = [loss for loss in losses if loss is not None]
    return f"{fmean(known):.3f}" if len(known) == len(losses) else "diverges"


def _throughput(results: list[dict[str, Any]]) -> str:
    row = _row(results, "figure 5/throughput")
    if row is None:
        return ""
    rates = list(row["links"])
    rows = []
    for way, per_s in row["per_s"].items():
        sent = f"{row['step_bytes'][way] / 1e6:.2f} MB"
        rows.append([row["titles"][way], *(f"{per_s[rate]:.1f}" for rate in rates), sent])
    head = ["sequences/s", *(f"{rate} ({row['links'][rate] or 'loopback'})" for rate in rates), "sent by rank 0 a step"]
    return f"Figure 5 (c), by the paper's rates (and the links' here):\n\n{table(head, rows)}"


def _optimizers(results: list[dict[str, Any]]) -> str:
    row = _row(results, "adam/seconds")
    if row is None:
        return ""
    rows = []
    for way in row["ways"].values():
        seconds = "never" if way["seconds"] is None else f"{way['seconds']:.1f}"
        steps = "" if way["steps"] is None else f"{way['steps']:.0f}"
        rows.append([way["title"], f"{1e3 * way['step_s']:.0f}", f"{way['loss']:.3f}", steps, seconds])
    head = [
        f"over {row['link'] or 'loopback'}",
        "ms a step",
        "held-out loss at the end",
        "steps",
        "seconds to the same",
    ]
    return f"QuantizedAdam and others, means over seeds:\n\n{table(head, rows)}"


def _others(results: list[dict[str, Any]]) -> str:
    """Tables that parts made themselves: a title, a head and rows of text."""
    made = [row["table"] for row in results if "table" in row]
    return "\n\n".join(f"{of['title']}:\n\n{table(of['head'], of['rows'])}" for of in made)
