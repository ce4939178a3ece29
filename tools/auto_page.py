"""What docs/auto.md shows of ``thinwire bench auto``."""

from __future__ import annotations

from pathlib import Path

from figures import BENCHMARKS, Figures, table

from thinwire.bench.auto import Place

_WAYS = ("fixed", "one way", "auto")


def auto(benchmarks: Path = BENCHMARKS) -> str:
    path = benchmarks / "auto.json"
    if not path.exists():
        return "Not measured yet: `make bench`."
    figures = Figures(path)
    about = figures.record["about"]
    rows = []
    for cell, found in about["cells"].items():
        on = found["decided"]["auto"].startswith("on")
        gains = [f"{figures.get(f'over_fp32/{way}/{cell}') or 0.0:.2f}x" for way in _WAYS]
        fp32 = f"{1e3 * (figures.get(f'step_s/fp32/{cell}') or 0.0):.0f} ms"
        rows.append([_network(cell), fp32, *gains, f"`{found['topology']}`" if on else "off"])
    head = ["network", "fp32", f"`{about['spec']}`", "auto, `sra` alone", "auto", "by"]
    return (
        "`thinwire bench auto`: steps of the demo's GPT in multiples of stock DDP's speed, medians of rounds in which "
        f"all take turns.\n\n{table(head, rows)}\n\n{figures.machine}."
    )


def _network(cell: str) -> str:
    place = Place.of(cell)
    rates = (place.rate or "no limit").replace("mbit", " Mbit/s").replace("gbit", " Gbit/s").replace(",", ", ")
    beside = "a rank on each" if place.ranks == 1 else f"{place.ranks} ranks on each"
    return f"{place.nodes} nodes, {beside}, {rates}"
