"""``python -m experiments policies replay``: frontiers of all policies, as a table, a picture and JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console

from experiments.framework.claims import plain
from experiments.framework.pages import show
from experiments.policies.methods import METHODS
from experiments.policies.recording import BadRecording, Recording
from experiments.policies.replay import (
    Bench,
    Curve,
    Ratio,
    curve,
    fewer_bytes,
    less_error,
    level_name,
    replay,
    uniform_curve,
)
from thinwire_tools import plots
from thinwire_tools.compare.statistics import need_scipy
from thinwire_tools.exits import ends_command
from thinwire_tools.results import OutputFile, Results


def replay_command(gradients: tyro.conf.Positional[Path], *, json: OutputFile = None, plot: OutputFile = None) -> int:
    """Replay every policy on gradients that `policies record` recorded.

    For every task and family of compressors a frontier of bytes against error over a range of budgets, with uniform
    compression as the reference line: how many times fewer bytes at the same error, how many times less error at the
    same bytes, and how long a decision takes. Bounds keep 95 % each, over trainings. Takes about two minutes.

    Examples:
      python -m experiments policies replay build/gradients
      python -m experiments policies replay build/gradients --json policies.json --plot frontiers.svg

    Args:
        gradients: folder that `policies record` wrote.
        json: write the figures to this file.
        plot: write the picture of all frontiers to this SVG file.
    """
    with ends_command(BadRecording, OSError, ImportError):
        need_scipy()
        if plot is not None:
            plots.need_matplotlib()
        recording = Recording.open(gradients)
        with Console().status("") as status:
            benches = replay(recording, on_step=status.update)
    found = results(benches, recording)
    if plot is not None:
        draw(found, plot)
    show("policies", found, json)
    return 0


def about(recording: Recording) -> dict[str, Any]:
    """What the JSON file says of the recording."""
    return {
        "recording": {
            "trainings": len(recording.trainings),
            "bytes": recording.num_bytes,
            "snapshots": {task: len(recording.of(task)[0].steps) for task in recording.tasks},
            "window": recording.trainings[0].window,
            "titles": recording.tasks,
            "parameters": {task: recording.of(task)[0].numel for task in recording.tasks},
        }
    }


def results(benches: Sequence[Bench], recording: Recording) -> Results:
    """The figures: a row for each task, family and policy, with its frontier."""
    found = Results("python -m experiments policies replay", about=about(recording))
    for bench in benches:
        prefix = f"{bench.task}/{bench.family.name}"
        members = [level_name(bench.family, member) for member in bench.family.members]
        line = uniform_curve(bench)
        found.add(
            f"{prefix}/uniform",
            1.0,
            "x",
            title="uniform",
            family=bench.family.title,
            frontier=_frontier(line, [members[level] for level in line.levels]),
            evaluate_s=plain(bench.evaluate_s),
        )
        for name, replayed in bench.replayed.items():
            points = curve(replayed)
            levels = [level_name(bench.family, bench.family.levels[level]) for level in points.levels]
            ratio = fewer_bytes(bench, name)
            found.add(
                f"{prefix}/{name}",
                plain(ratio.mean if ratio else math.nan),
                "x",
                title=replayed.method.title,
                family=bench.family.title,
                fewer_bytes=_ratio(ratio),
                fewer_bytes_later=_ratio(fewer_bytes(bench, name, later=True)),
                fewer_bytes_whole=_ratio(fewer_bytes(bench, name, measure="whole")),
                less_error=_ratio(less_error(bench, name)),
                decision_s=plain(replayed.seconds),
                decisions=len(replayed.decisions),
                frontier=_frontier(points, levels),
            )
    return found


def _ratio(ratio: Ratio | None) -> Any:
    return None if ratio is None else plain(dataclasses.asdict(ratio))


def _frontier(points: Curve, levels: Sequence[str]) -> dict[str, Any]:
    return plain({"levels": levels, "bytes": points.sent_bytes, "error": points.error, "whole_error": points.whole})


def draw(found: Results, path: Path) -> None:
    """All frontiers, a panel for each task and family, with logarithmic axes and one legend."""
    from matplotlib.ticker import LogLocator, NullFormatter

    titles = found.about["recording"]["titles"]
    panels: dict[str, dict[str, dict[str, Any]]] = {}
    for row in found.results:
        task, _, method = row["name"].split("/")
        panels.setdefault(f"{titles[task]}: {row['family']}", {})[method] = row
    figure, canvases = plots.canvas(
        len(panels), titles=list(panels), x="kB that a rank sends in a step", y="error, for the gradient's norm"
    )
    handles: dict[str, Any] = {}
    for axes, rows in zip(canvases, panels.values(), strict=True):
        for method, row in rows.items():
            line = row["frontier"]
            (handles[row["title"]],) = axes.plot(
                [sent / 1e3 for sent in line["bytes"]], line["error"], **_STYLES[method]
            )
        axes.set(xscale="log", yscale="log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(NullFormatter())
        # Uniform compression reaches farther than the budgets: what counts is where policies are.
        lines = [row["frontier"] for method, row in rows.items() if method != "uniform"]
        for limit, key, unit in ((axes.set_xlim, "bytes", 1e3), (axes.set_ylim, "error", 1.0)):
            values = [value for line in lines for value in line[key]]
            limit(0.8 * min(values) / unit, 1.25 * max(values) / unit)
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=5, frameon=False, fontsize="small"
    )
    plots.save(figure, path, legends=False)


_STYLES: dict[str, dict[str, Any]] = {
    "uniform": {"color": "#555555", "linewidth": 4, "alpha": 0.4},
    **{
        method.name: {
            "color": method.color,
            "marker": "s" if method.sparse else "o",
            "markersize": 3.5,
            "linewidth": 1.2,
            "linestyle": "--" if method.name in ("squared", "priority", "both") else "-",
        }
        for method in METHODS
    },
}
"""Of uniform compression and of each policy; variants of L-GreCo are dashed."""
