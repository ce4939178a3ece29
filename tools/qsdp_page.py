"""What docs/repro-qsdp.md shows of the figures of ``thinwire repro qsdp``."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from figures import BENCHMARKS, Figures, bullets, claims, pictures, table
from repro_pages import results_of

GRID = "table 5.2"
LEARNED = ("table 5.3", "table C.3")
RATIOS = "table C.2"


def repro_qsdp(benchmarks: Path = BENCHMARKS) -> str:
    """The whole section: claims, tables, what differs, pictures."""
    path = benchmarks / "repro-qsdp.json"
    if not path.exists():
        return "Not measured yet: `make bench`."
    figures, results = Figures(path), results_of(path.stem, benchmarks)
    about = figures.record["about"]
    tables = [_recovery(results), _grid(results), _learned(results), _step_times(results), _ratios(results)]
    shown = "\n\n".join(text for text in tables if text)
    return (
        f"{claims(results, 'the thesis')}\n\nHow a claim is judged: {about['judged']}.\n\n{shown}\n\n"
        f"In what this is not the thesis's experiment:\n\n{bullets(about['differs_from_the_thesis'])}\n"
        f"{pictures(benchmarks / 'repro-qsdp')}\n{figures.machine}."
    )


def sharded(benchmarks: Path = BENCHMARKS) -> str:
    """The section of README.md: steps of FSDP2 over slow links, and perplexity."""
    path = benchmarks / "repro-qsdp.json"
    if not path.exists():
        return "Not measured yet: `make bench`."
    results = results_of(path.stem, benchmarks)
    steps = next(row for row in results if row["name"] == "figure 5.3/step_s")
    seconds = steps["step_s"]
    rows = []
    for rate, stock in seconds["fp32"].items():
        ways = [seconds[way][rate] for way in ("fp16", "raw", "W8G8", "nothing")]
        times = [f"{1e3 * taken:,.0f} ms" for taken in (stock, *ways)]
        rows.append([_rate(rate), *times, f"{stock / seconds['W8G8'][rate]:.1f}x"])
    head = ["2 ranks", "FSDP2 fp32", "gradients fp16", "thinwire, raw", "**W8G8**", "nothing sent", "against fp32"]
    lost = ", ".join(
        f"{100 * row['value']:+.2f} % ({row['title']}, {row['num_ranks']} ranks)"
        for row in _named(results, "table 5.1", "lost")
    )
    return (
        "`thinwire repro qsdp`: steps of FSDP2 on a small GPT, five gathers of all weights and one reduction of all "
        f"gradients each, over emulated links.\n\n{table(head, rows)}\n\nPerplexity lost by W8G8, three seeds: {lost}. "
        f"[All of it](docs/repro-qsdp.md).\n\n{Figures(path).machine}."
    )


def _rate(rate: str) -> str:
    return rate.replace("mbit", " Mbit/s").replace("gbit", " Gbit/s")


def _named(results: list[dict[str, Any]], figure: str, prefix: str) -> list[dict[str, Any]]:
    return [row for row in results if row["figure"] == figure and row["name"].startswith(f"{figure}/{prefix}/")]


def _recovery(results: list[dict[str, Any]]) -> str:
    rows = []
    for row in _named(results, "table 5.1", "lost"):
        theirs = row["thesis"]
        rows.append(
            [
                f"{row['title']}, {row['num_ranks']} ranks",
                f"{fmean(row['baseline_perplexities']):.3f}",
                f"{fmean(row['perplexities']):.3f}",
                f"{100 * row['value']:+.2f} %",
                f"{theirs['baseline']} and {theirs['qsdp']}, {theirs['model']}",
            ]
        )
    head = ["perplexity", "weights fp32, gradients fp16", "W8G8", "lost", "in the thesis"]
    return f"Table 5.1:\n\n{table(head, rows)}" if rows else ""


def _grid(results: list[dict[str, Any]]) -> str:
    cells = {(row["weights"], row["gradients"]): row for row in _named(results, GRID, "perplexity")}
    if not cells:
        return ""
    weights, gradients = (sorted({key[i] for key in cells}, reverse=True) for i in range(2))
    rows = [
        [
            f"weights of {w} bits",
            *(f"{cells[w, g]['value']:.3f} ({100 * cells[w, g]['lost']:+.1f} %)" for g in gradients),
            " / ".join(f"{cells[w, g]['thesis']:.2f}" for g in gradients),
        ]
        for w in weights
    ]
    baseline = next(iter(cells.values()))["baseline"]
    head = ["", *(f"gradients of {g} bits" for g in gradients), "in the thesis"]
    return f"Table 5.2, uniform quantisation, the baseline {baseline:.3f} (in the thesis 35.81):\n\n{table(head, rows)}"


def _learned(results: list[dict[str, Any]]) -> str:
    nearest = {row["pair"]: row["perplexities"] for row in _named(results, "table 5.3", "learned_beside_nearest")}
    rows = []
    for figure in LEARNED:
        for row in _named(results, figure, "learned"):
            theirs = row["thesis"]
            rows.append(
                [
                    row["pair"],
                    f"{fmean(row['uniform_perplexities']):.3f}",
                    f"{fmean(nearest[row['pair']]):.3f}" if row["pair"] in nearest else "",
                    f"{fmean(row['perplexities']):.3f}",
                    f"{100 * row['value']:+.2f} %",
                    f"{theirs['uniform']} and {theirs['learned']}",
                ]
            )
    head = ["perplexity", "uniform", "uniform, nearest", "learned", "learned against uniform", "in the thesis"]
    return f"Tables 5.3 and C.3:\n\n{table(head, rows)}" if rows else ""


def _step_times(results: list[dict[str, Any]]) -> str:
    row = next((row for row in results if row["name"] == "figure 5.3/step_s"), None)
    if row is None:
        return ""
    rates = list(next(iter(row["step_s"].values())))
    rows = [
        [row["titles"][way], *(f"{1e3 * seconds[rate]:,.0f}" for rate in rates), _megabytes(row["payload_bytes"], way)]
        for way, seconds in row["step_s"].items()
    ]
    head = [f"ms a step, {row['num_ranks']} ranks", *rates, "MB sent by a rank"]
    return f"Figure 5.3, step times over links of several rates:\n\n{table(head, rows)}"


def _megabytes(sent: dict[str, float], way: str) -> str:
    return f"{sent[way] / 1e6:.1f}" if way in sent else ""


def _ratios(results: list[dict[str, Any]]) -> str:
    cells = {(row["weights"], row["gradients"]): row for row in _named(results, RATIOS, "step_s")}
    if not cells:
        return ""
    weights, gradients = (sorted({key[i] for key in cells}) for i in range(2))
    rows = [[f"weights / {w}", *(_cell(cells[w, g]) for g in gradients)] for w in weights]
    head = ["", *(f"gradients / {g}" for g in gradients)]
    return (
        "Table C.2, steps of which only a part is sent, and as shares of whole ones here and in the thesis:\n\n"
        f"{table(head, rows)}"
    )


def _cell(row: dict[str, Any]) -> str:
    return f"{1e3 * row['value']:,.0f} ms ({row['relative']:.2f}, {row['thesis_relative']:.2f})"
