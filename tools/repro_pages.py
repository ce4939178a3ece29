"""What the pages of repetitions in docs/ show of their figures: claims, tables, pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from figures import BENCHMARKS, Figures, bullets, claims, pictures, table


def results_of(name: str, benchmarks: Path) -> list[dict[str, Any]]:
    """What the whole run found; a later run of single parts takes the place of what that found of them."""
    results = Figures(benchmarks / f"{name}.json").record["results"]
    for later in sorted(benchmarks.glob(f"{name}-*.json")):
        again = Figures(later).record["results"]
        results = [row for row in results if row["figure"] not in {other["figure"] for other in again}] + again
    return results


def repro_fft(benchmarks: Path = BENCHMARKS) -> str:
    path = benchmarks / "repro-fft.json"
    if not path.exists():
        return "Not measured yet: `make bench`."
    figures, results = Figures(path), results_of(path.stem, benchmarks)
    about = figures.record["about"]
    return (
        f"{claims(results, 'the paper')}\n\nHow a claim is judged: {about['judged']}.\n\n"
        f"In what this is not the paper's experiment:\n\n{bullets(about['differs_from_the_paper'])}\n"
        f"{pictures(benchmarks / 'repro-fft')}\n{figures.machine}."
    )


CGX_TABLES = {
    "3.4": "Table 3.4: reduction schemes",
    "3.6": "Table 3.6: systems",
    "3.9": "Table 3.9: two nodes",
    "3.3": "Figure 3.3: transports on one host",
    "blob": "Section 3.7.2, QNCCL: compression that sees no layers",
}
"""Of throughput, by what they are in the thesis."""


def throughput(results: list[dict[str, Any]], part: str) -> str:
    """Items per second by way and model, also in multiples of the reference's, here and in the thesis."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in results:
        if row["figure"] == part and "/items_per_s/" in row["name"]:
            found.setdefault(row["way"], {})[row["model"]] = row
    models = list(dict.fromkeys(model for rows in found.values() for model in rows))
    head, body = [""], []
    for model in models:
        row = next(rows[model] for rows in found.values() if model in rows)
        head += [f"{model}, {row['unit']}", f"over {row['reference']}", f"{row['model_of_thesis']} in the thesis"]
    for way, rows in found.items():
        line = [way]
        for model in models:
            row = rows[model]
            theirs = row["thesis_relative"]
            line += [f"{row['value']:,.0f}", f"{row['relative']:.2f}x", "" if theirs is None else f"{theirs:.2f}x"]
        body.append(line)
    return table(head, body)


def repro_cgx(benchmarks: Path = BENCHMARKS) -> str:
    path = benchmarks / "repro-cgx.json"
    if not path.exists():
        return "Not measured yet: `make bench`."
    figures, results = Figures(path), results_of(path.stem, benchmarks)
    about = figures.record["about"]
    parts = [row["figure"] for row in results]
    tables = "\n\n".join(
        f"{title}\n\n{throughput(results, part)}" for part, title in CGX_TABLES.items() if part in parts
    )
    return (
        f"{claims(results, 'the thesis')}\n\nHow a claim is judged: {about['judged']}.\n\n{tables}\n\n"
        f"The links, and what fp32 is on them:\n\n{bullets([link['proportion'] for link in about['links'].values()])}\n"
        f"In what this is not the thesis's experiment:\n\n{bullets(about['differs_from_the_thesis'])}\n"
        f"{pictures(benchmarks / 'repro-cgx')}\n{figures.machine}."
    )


INTSGD_WAYS = {
    "sgd all-gather": "SGD (all-gather)",
    "qsgd": "QSGD",
    "natsgd": "NatSGD",
    "sgd": "SGD (all-reduce)",
    "powersgd": "PowerSGD (EF)",
    "intsgd determ": "IntSGD (determ.)",
    "intsgd": "IntSGD (random)",
    "intsgd 32": "IntSGD (random), int32",
    "heuristic": "Heuristic IntSGD, int8",
    "heuristic 32": "Heuristic IntSGD, int32",
}
"""Rows of tables 2 and 3 of the IntSGD paper, and those of its figure 1."""


def intsgd_table(figures: Figures, number: str) -> str:
    """Quality and times of every way: table 2 (images) or 3 (words)."""
    rows = []
    for name, title in INTSGD_WAYS.items():
        quality, times = figures.get(f"{number}/quality/{name}"), figures.rows[f"{number}/step_s/{name}"]
        shown = "" if quality is None else f"{quality:.2%}" if number == "2" else f"{quality:.3f}"
        seconds = (times[key] for key in ("overhead_s", "communication_s", "value"))
        rows.append([title, shown, *(f"{1e3 * value:.1f}" for value in seconds)])
    quality = "test accuracy" if number == "2" else "test loss"
    return table(["", quality, "overhead, ms", "communication, ms", "step, ms"], rows)


def repro_intsgd(benchmarks: Path = BENCHMARKS) -> str:
    path = benchmarks / "repro-intsgd.json"
    if not path.exists():
        return "Not measured yet: `make bench`."
    figures = Figures(path)
    results, about = figures.record["results"], figures.record["about"]
    titles = {"2": "Table 2, the small ResNet", "3": "Table 3, the LSTM"}
    tables = "\n\n".join(
        f"{title}; a step on {about['num_ranks']} ranks, links of {about['rate'] or 'this host'}:\n\n"
        f"{intsgd_table(figures, number)}"
        for number, title in titles.items()
        if f"{number}/step_s/sgd" in figures.rows
    )
    return (
        f"{claims(results, 'the paper')}\n\nHow a claim is judged: {about['judged']}.\n\n{tables}\n\n"
        f"In what this is not the paper's experiment:\n\n{bullets(about['differs_from_the_paper'])}\n"
        f"{pictures(benchmarks / 'repro-intsgd')}\n{figures.machine}."
    )
