"""What docs/repro-lgreco.md shows of the figures of ``thinwire repro lgreco``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from figures import BENCHMARKS, Figures, bullets, claims, pictures, table

NETWORKS = {"gpt": "GPT of words", "cnn": "small ResNet"}
FAMILIES = {"bits": "4 bits", "topk": "top-k", "powersgd": "PowerSGD"}
QUALITY = {"gpt": "table 4.3", "cnn": "table 4.2"}
POLICIES = {
    "table 3.8": "Table 3.8: policies over 4 bits, the GPT, one seed",
    "table 4.5": "Table 4.5: policies over PowerSGD, the GPT, one seed",
    "table 4.4": "Table 4.4: policies over top-k, the ResNet, relative to a density of 2 %",
    "future work": "Several families in one plan, within the error of uniform top-k, the GPT, one seed",
}
"""Tables of policies, by the figure that their rows name."""


def repro_lgreco(benchmarks: Path = BENCHMARKS) -> str:
    """The whole section: claims, tables, what differs, pictures."""
    path = benchmarks / "repro-lgreco.json"
    if not path.exists():
        return "Not measured yet: `make bench`."
    figures = Figures(path)
    results, about = figures.record["results"], figures.record["about"]
    tables = [_quality(figures), *(_policies(results, part, title) for part, title in POLICIES.items())]
    shown = "\n\n".join(text for text in [*tables, *_throughput(results)] if text)
    return (
        f"{claims(results, 'the thesis')}\n\nHow a claim is judged: {about['judged']}.\n\n{shown}\n\n"
        f"In what this is not the thesis's experiment:\n\n{bullets(about['differs_from_the_thesis'])}\n"
        f"{pictures(benchmarks / 'repro-lgreco')}\n{figures.machine}."
    )


def _quality(figures: Figures) -> str:
    """Tables 4.2 and 4.3 in one: ratios to fp32, the gain, quality lost, overhead."""
    rows = []
    for name, network in NETWORKS.items():
        for family, title in FAMILIES.items():
            gain = figures.rows.get(f"{QUALITY[name]}/gain/{name}/{family}")
            if gain is None:
                continue
            lost = [figures.get(f"{QUALITY[name]}/lost/{name}/{family}/{kind}") for kind in ("uniform", "l-greco")]
            overhead = figures.get(f"table 4.1/overhead/{name}/{family}")
            unit = "%" if name == "gpt" else "points"
            rows.append(
                [
                    f"{network}, {title}",
                    *(f"{gain['ratio'][kind]:.1f}x" for kind in ("uniform", "lgreco")),
                    f"{gain['value']:.2f}x",
                    *("" if value is None else f"{100 * value:+.2f} {unit}" for value in lost),
                    "" if overhead is None else f"{overhead:.2%}",
                ]
            )
    if not rows:
        return ""
    head = ["bytes against fp32's", "uniform", "L-GreCo", "gain", "uniform loses", "L-GreCo loses", "overhead"]
    return (
        "Tables 4.1 to 4.3: times fewer bytes than fp32 as measured, quality lost to fp32 (loss of the GPT, accuracy "
        f"of the ResNet), and what deciding takes of training:\n\n{table(head, rows)}"
    )


def _policies(results: list[dict[str, Any]], part: str, title: str) -> str:
    rows = []
    for row in results:
        if row["figure"] == part and "/ratio/" in row["name"]:
            theirs, unit = row["thesis"], "points" if "/cnn/" in row["name"] else "%"
            lost = "diverged" if row["lost"] is None else f"{100 * row['lost']:+.2f} {unit}"
            rows.append([row["title"], f"{row['value']:.2f}x", "" if theirs is None else f"{theirs:.2f}x", lost])
    head = ["", "bytes, times fewer than uniform", "in the thesis", "lost to fp32"]
    return f"{title}:\n\n{table(head, rows)}" if rows else ""


def _throughput(results: list[dict[str, Any]]) -> list[str]:
    """Figures 4.3 and 4.4 as tables: items per second by ranks, one table a link."""
    found = []
    for row in results:
        if "/scaling/" not in row["name"]:
            continue
        by_way = {name: values for name, values in row["items_per_s"].items() if isinstance(values, dict)}
        worlds = list(row["nothing_sent"])
        body = [
            [row["titles"][name], *(f"{values[n]:,.0f}" for n in worlds), _kilobytes(row, name, worlds[-1])]
            for name, values in by_way.items()
        ]
        body.append(["nothing sent", *(f"{row['nothing_sent'][n]:,.0f}" for n in worlds), "0"])
        head = ["tokens/s", *(f"{n} ranks" for n in worlds), f"kB a step, {worlds[-1]} ranks"]
        found.append(f"{row['figure'].capitalize()}, {row['found'].split(':')[0]}:\n\n{table(head, body)}")
    return found


def _kilobytes(row: dict[str, Any], way: str, num_ranks: str) -> str:
    sent = row["payload_bytes"][num_ranks].get(way)
    return "" if sent is None else f"{sent / 1e3:,.0f}"
