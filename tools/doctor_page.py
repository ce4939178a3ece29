"""What docs/doctor.md shows of ``thinwire bench doctor``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from figures import BENCHMARKS, Figures, table

_NOTHING = "nothing sent"


def doctor(benchmarks: Path = BENCHMARKS) -> str:
    return _foretold(
        benchmarks / "doctor.json",
        "`thinwire bench doctor`: steps of the demo's GPT on 2 ranks, foretold / taken (error). Predictions come from "
        "a model that trains uncompressed and from probes; they know none of the steps that they are held against.",
    )


def doctor_fsdp(benchmarks: Path = BENCHMARKS) -> str:
    return _foretold(
        benchmarks / "doctor-fsdp.json", "`thinwire bench doctor --sharded`: the same of the demo's GPT under FSDP2."
    )


def _foretold(path: Path, text: str) -> str:
    if not path.exists():
        return "Not measured yet: `make bench`."
    figures = Figures(path)
    cells = list(figures.record["about"]["cells"])
    titles = [name.split("/")[1] for name in figures.rows if name.startswith("error/") and name.endswith(cells[0])]
    rows, errors = [], {}
    for cell in cells:
        rate, rtt = cell.split("/")
        line = [f"{rate}, +{rtt}"]
        for title in titles:
            foretold, taken, error = (
                figures.get(f"{name}/{title}/{cell}") or 0.0 for name in ("predicted_step_s", "step_s", "error")
            )
            errors[cell, title] = error
            line.append(f"{1e3 * foretold:.0f} / {1e3 * taken:.0f} ms ({100 * error:+.0f} %)")
        rows.append(line)
    claimed = figures.record["about"]["claimed"]
    ways = [error for (_, title), error in errors.items() if title != _NOTHING]
    least = [error for (_, title), error in errors.items() if title == _NOTHING]
    found = [_within(of, claimed, what) for of, what in ((ways, "ways to send"), (least, "steps with nothing sent"))]
    return f"{text} {'. '.join(found)}.\n\n{table(['', *titles], rows)}\n\n{figures.machine}."


def _within(errors: Sequence[float], claimed: float, what: str) -> str:
    close = sum(abs(error) <= claimed for error in errors)
    largest = 100 * max(map(abs, errors))
    return f"{close} of {len(errors)} {what} are within {100 * claimed:.0f} %, the largest error is {largest:.0f} %"
