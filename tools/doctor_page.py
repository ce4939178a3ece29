"""What docs/doctor.md shows of ``thinwire bench doctor``."""

from __future__ import annotations

from pathlib import Path

from figures import BENCHMARKS, Figures, table


def doctor(benchmarks: Path = BENCHMARKS) -> str:
    path = benchmarks / "doctor.json"
    if not path.exists():
        return "Not measured yet: `make bench`."
    figures = Figures(path)
    cells = list(figures.record["about"]["cells"])
    titles = [name.split("/")[1] for name in figures.rows if name.startswith("error/") and name.endswith(cells[0])]
    rows = []
    for cell in cells:
        rate, rtt = cell.split("/")
        line = [f"{rate}, +{rtt}"]
        for title in titles:
            foretold, taken, error = (
                figures.get(f"{name}/{title}/{cell}") or 0.0 for name in ("predicted_step_s", "step_s", "error")
            )
            line.append(f"{1e3 * foretold:.0f} / {1e3 * taken:.0f} ms ({100 * error:+.0f} %)")
        rows.append(line)
    claimed, within = figures.record["about"]["claimed"], figures.get("within_claimed") or 0.0
    return (
        "`thinwire bench doctor`: steps of the demo's GPT on 2 ranks, foretold / taken (error). Predictions come from "
        "a model that trains uncompressed and from probes; they know none of the steps that they are held against. "
        f"{100 * within:.0f} % of them are within {100 * claimed:.0f} %; the largest error is "
        f"{100 * (figures.get('largest_error') or 0.0):.0f} %.\n\n"
        f"{table(['', *titles], rows)}\n\n{figures.machine}."
    )
