"""What docs/repro-aqsgd.md shows of the figures of ``thinwire repro aqsgd``."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from figures import BENCHMARKS, Figures, bullets, claims, pictures, table
from repro_pages import results_of

_SHOWN_PROMPTS = 3


def repro_aqsgd(benchmarks: Path = BENCHMARKS) -> str:
    """The whole section: claims, tables, what differs, pictures."""
    path = benchmarks / "repro-aqsgd.json"
    if not path.exists():
        return "Not measured yet: `make bench`."
    figures, results = Figures(path), results_of(path.stem, benchmarks)
    about = figures.record["about"]
    tables = [_losses(results), _throughput(results), _breakdown(results), _links(results), _completions(results)]
    shown = "\n\n".join(text for text in tables if text)
    return (
        f"{claims(results, 'the paper')}\n\nHow a claim is judged: {about['judged']}.\n\n{shown}\n\n"
        f"In what this is not the paper's experiment:\n\n{bullets(about['differs_from_the_paper'])}\n"
        f"{pictures(benchmarks / 'repro-aqsgd')}\n{figures.machine}."
    )


def _row(results: list[dict[str, Any]], name: str) -> dict[str, Any] | None:
    return next((row for row in results if row["name"] == name), None)


def _losses(results: list[dict[str, Any]]) -> str:
    by_key: dict[str, dict[str, dict[str, Any]]] = {}
    for row in results:
        kind, _, key = row["name"].partition("/")[2].partition("/")
        if kind in ("aqsgd", "direct") and "setting" in row:
            by_key.setdefault(key, {})[kind] = row
    rows = []
    for found in by_key.values():
        if set(found) != {"aqsgd", "direct"}:
            continue
        ours, direct = found["aqsgd"], found["direct"]
        losses = [_mean(of["losses"]) for of in (ours["baseline"], direct, ours)]
        bits = "fw{} bw{}".format(*ours["bits"])
        rows.append([f"{ours['setting']}, {bits}", *losses, f"{ours['dense_bytes'] / ours['sent_bytes']:.1f}x"])
    head = ["loss of the last epoch", "FP32", "DirectQ", "AQ-SGD", "fewer bytes in all, first epoch included"]
    return f"Figures 3 and 7 to 9:\n\n{table(head, rows)}" if rows else ""


def _mean(losses: list[float | None]) -> str:
    """None stands for what diverged."""
    known = [loss for loss in losses if loss is not None]
    return f"{fmean(known):.3f}" if len(known) == len(losses) else "diverges"


def _throughput(results: list[dict[str, Any]]) -> str:
    row = _row(results, "table 2/throughput")
    if row is None:
        return ""
    rates = list(row["links"])
    rows = []
    for way, per_s in row["per_s"].items():
        cells = [f"{per_s[rate]:.1f}" if rate in per_s else "" for rate in rates]
        theirs = row["paper"].get(way)
        paper = " / ".join(f"{theirs[rate]:.1f}" for rate in rates if rate in theirs) if theirs else ""
        rows.append([row["titles"][way], *cells, paper])
    head = ["sequences/s", *(f"{rate} ({row['links'][rate] or 'loopback'})" for rate in rates), "in the paper"]
    return f"Table 2, by the paper's rates (and the links' here):\n\n{table(head, rows)}"


def _breakdown(results: list[dict[str, Any]]) -> str:
    rows = []
    for row in results:
        if row["name"].startswith("table 3/wire/"):
            ours = [row[name] for name in ("forward_compute_s", "forward_s", "backward_compute_s", "backward_s")]
            theirs = [45, 1e3 * row["paper"]["forward_s"], 135, 1e3 * row["paper"]["backward_s"]]
            cells = [f"{1e3 * here:.0f} ({there:.0f})" for here, there in zip(ours, theirs, strict=True)]
            rows.append([f"{row['rate']} ({row['link'] or 'loopback'})", *cells])
    head = ["ms a micro-batch, here (in the paper)", "forward", "its message", "backward", "its message"]
    return f"Table 3, AQ-SGD fw4 bw8:\n\n{table(head, rows)}" if rows else ""


def _links(results: list[dict[str, Any]]) -> str:
    row = _row(results, "links/chosen")
    if row is None:
        return ""
    rows = []
    for at, link in enumerate(row["links"]):
        cells = [
            f"{8e-6 * link[way]['rate']:.1f} Mbit/s, `{link[way]['compressor']}`" for way in ("forward", "backward")
        ]
        rows.append([str(at), *cells])
    head = ["boundary", "forward", "backward"]
    return f"Bits by link, chosen by `adapt=thinwire.ByLink(...)`:\n\n{table(head, rows, numbers=False)}"


def _completions(results: list[dict[str, Any]]) -> str:
    row = _row(results, "appendix I/completions")
    if row is None:
        return ""
    rows = [
        [_code(prompt), _code(row["gold"][at]), *(_code(ends[at]) for ends in row["completions"].values())]
        for at, prompt in enumerate(row["prompts"][:_SHOWN_PROMPTS])
    ]
    head = ["prompt", "the text itself", *row["completions"]]
    shown = table(head, rows, numbers=False)
    return f"Appendix I, greedy completions (a space is shown as ␣, a line's end as ⏎):\n\n{shown}"


def _code(text: str) -> str:
    shown = text.replace("\n", "⏎").replace(" ", "␣").replace("|", "¦").replace("`", "'")
    return f"`{''.join(letter if letter.isprintable() else '.' for letter in shown)}`"
