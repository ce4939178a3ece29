"""``python -m experiments bench pipelines``: simulated steps beside measured ones, and what a plan gains."""

from __future__ import annotations

import json as jsons
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from thinwire.compressors import parse
from thinwire_tools import lab
from thinwire_tools.bench.ranks import run_ranks
from thinwire_tools.lab.units import format_rate, parse_rate
from thinwire_tools.planner import (
    Boundary,
    Choice,
    Layer,
    Link,
    LinkCost,
    Machine,
    PipelinePlan,
    PipelineProblem,
    Schedule,
    ScheduleName,
    StageTimes,
    even_plan,
    plan_pipeline,
    simulate,
)
from thinwire_tools.planner.plot import Row, draw_timelines
from thinwire_tools.results import OutputFile, Results

RANKS, CHUNKS, BATCH, LENGTH, WIDTH = 4, 8, 2, 128, 512
SCHEDULES: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "interleaved", "zero-bubble")
METHODS: dict[str, list[str] | None] = {
    "PyTorch": None,
    "raw": ["raw", "raw"],
    "fw3 bw6": ["delta(maxabs(bits=3))", "maxabs(bits=6)"],
}
LAYER_MS = (5.0, 10.0, 5.0)
"""Of each of eight layers: forward, backward, and the part of that which is the weights'."""
LINKS = (("100mbit", 1.0), ("1gbit", 4.0))
"""Rates, and how many times `LAYER_MS` layers take there: 1F1B cannot hide its messages, and nearly can."""
UNEVEN = (1.0, 0.5, 0.5, 2.0, 1.0, 0.5, 1.5, 1.0)
"""Times of the layers that are to be planned, over those."""
UNEVEN_RATES = ("100mbit", "15mbit", "100mbit", "100mbit")
_DRAWN = ("PyTorch/1f1b/100mbit", "fw3 bw6/1f1b/100mbit")
_ACTIVATION_BYTES = 4 * BATCH * LENGTH * WIDTH
_PAYLOAD = 1448 / 1514
"""Of an Ethernet frame's bytes, which token buckets count, those that are not headers."""


def pipelines(
    *,
    steps: int = 5,
    svg: Annotated[Path | None, tyro.conf.arg(metavar="PATH.svg")] = None,
    draw_from: Annotated[Path | None, tyro.conf.arg(metavar="PATH.json")] = None,
    json: OutputFile = None,
) -> int:
    """Steps of four stages over emulated links, measured and simulated: schedules, compression, and a plan.

    Stages sleep as if an accelerator computed, so that four fit on two cores. What a stage computes and what coding
    costs are measured once, over a network without limits; from these and from the link alone each step is predicted.
    Layers take as long as a small accelerator's on the slow link, and four times as long on the fast one, which leaves
    a schedule room to hide its messages. Then eight uneven layers on machines with uneven links: cut evenly and sent in
    full, and as planned.

    Examples:
      python -m experiments bench pipelines --json benchmarks/pipelines.json
      python -m experiments bench pipelines --draw-from benchmarks/pipelines.json --svg docs/pipelines.svg

    Args:
        steps: of each run; the median counts.
        svg: draw the recorded steps of two runs.
        draw_from: draw them from this file, and measure nothing.
        json: write the figures to this file.
    """
    console = Console(highlight=False)
    if draw_from is not None:
        draw(jsons.loads(draw_from.read_text())["about"]["timelines"], svg or draw_from.with_suffix(".svg"))
        return 0
    lab.need_network()
    results = Results("python -m experiments bench pipelines")
    results.about = {"ranks": RANKS, "micro_batches": CHUNKS, "activation_bytes": _ACTIVATION_BYTES, "steps": steps}
    results.about |= {"layer_ms": list(LAYER_MS), "layers": len(UNEVEN), "times": dict(LINKS), "timelines": {}}
    for rate, times in LINKS:
        costs = _costs(times, steps)
        results.about.setdefault("coding_s", {name: costs[name] for name in METHODS})
        with lab.Network(RANKS, rate=rate) as network:
            for schedule in SCHEDULES:
                for name, method in METHODS.items():
                    ran = run(method, schedule, even_stages(schedule, times), steps, network)
                    predicted = _predict(costs, name, schedule, Link(_payload_rate(rate)))
                    _add(results, f"{name}/{schedule}/{rate}", ran, predicted.step_s, predicted.unbound.step_s)
        console.print(_table(results, rate))
        if json is not None:
            results.write(json)
    for name, plan in _plans().items():
        _add_planned(results, name, plan, steps)
    console.print(_table(results, "uneven"))
    if json is not None:
        results.write(json)
    if svg is not None:
        draw(results.about["timelines"], svg)
    return 0


def even_stages(schedule: str, times: float) -> list[list[list[float]]]:
    """By stage and layer the seconds to sleep: two layers on each rank, which take ``times`` `LAYER_MS`."""
    layer = [times * ms / 1e3 for ms in LAYER_MS]
    return [[layer]] * (2 * RANKS) if schedule == "interleaved" else [[layer, layer]] * RANKS


def run(
    method: list[str] | None,
    schedule: str,
    stages: Sequence[Sequence[Sequence[float]]],
    steps: int,
    network: lab.Network | None,
) -> dict[str, Any]:
    """Return what the ranks of `pipelines_rank.run` answer; ``network`` None: over loopback."""
    config = {"method": method, "schedule": schedule, "stages": stages, "chunks": CHUNKS, "batch": BATCH}
    config |= {"length": LENGTH, "width": WIDTH, "steps": steps}
    return run_ranks("experiments.bench.pipelines_rank", config, RANKS, network)


def _costs(times: float, steps: int) -> dict[str, Any]:
    """Of each method, seconds to encode and to decode a message; of each schedule, what a stage computes whose layers
    take ``times`` `LAYER_MS`."""
    costs: dict[str, Any] = {}
    for name, method in METHODS.items():
        ran = run(method, "1f1b", even_stages("1f1b", times), steps, None)
        messages = sum(stats["steps"] for stats in ran["stats"]) / RANKS * CHUNKS * 2 * (RANKS - 1)
        costs[name] = [
            sum(stats[key] for stats in ran["stats"]) / messages if messages else 0.0
            for key in ("encode_s", "decode_s")
        ]
    for schedule in SCHEDULES:
        ran = run(None, schedule, even_stages(schedule, times), steps, None)
        costs[schedule] = _times(ran["tasks"])
    return costs


def _times(tasks: Sequence[Sequence[Sequence[Any]]]) -> list[StageTimes]:
    """By stage, the median seconds of its tasks."""
    taken: dict[tuple[int, str], list[float]] = {}
    for kind, stage, _, begin, end in (task for rank_tasks in tasks for task in rank_tasks):
        taken.setdefault((stage, kind), []).append(end - begin)
    middle = {key: median(seconds) for key, seconds in taken.items()}
    count = 1 + max(stage for stage, _ in middle)
    rows = [[middle.get((s, kind), 0.0) for kind in ("forward", "backward", "weights")] for s in range(count)]
    return [StageTimes(forward, backward + weights, weights) for forward, backward, weights in rows]


def _predict(costs: Mapping[str, Any], method: str, schedule: ScheduleName, link: Link) -> Any:
    specs = METHODS[method]
    shares = [1.0, 1.0] if specs is None else [Choice.from_compressor(parse(spec)).share for spec in specs]
    encode_s, decode_s = costs[method]
    messages = [
        LinkCost(_ACTIVATION_BYTES * share / link.rate, link.latency_s, encode_s, decode_s, link.rate)
        for share in shares
    ]
    stages = costs[schedule]
    built = Schedule.build(schedule, RANKS, CHUNKS, len(stages) // RANKS)
    boundaries = [Boundary(*messages)] * (len(stages) - 1)
    return simulate(built, stages, boundaries, ahead=specs is not None, lines=[link.rate] * RANKS)


def _payload_rate(rate: str) -> float:
    """Bytes per second of messages over an emulated machine's line."""
    return _PAYLOAD * parse_rate(rate) / 8


def _plans() -> dict[str, PipelinePlan]:
    """Uneven layers on machines with uneven links, cut evenly and as planned."""
    forward, backward, weights = (ms / 1e3 for ms in LAYER_MS)
    layers = tuple(
        Layer(f"layer {i}", forward * by, backward * by, _ACTIVATION_BYTES, weights * by) for i, by in enumerate(UNEVEN)
    )
    rates = [_payload_rate(rate) for rate in UNEVEN_RATES]
    machines = tuple(Machine(str(i), line=rate) for i, rate in enumerate(rates))
    links = {(str(a), str(b)): Link(min(rates[a], rates[b])) for a in range(RANKS) for b in range(RANKS) if a != b}
    problem = PipelineProblem(layers, machines, links, CHUNKS)
    plain = METHODS["fw3 bw6"]
    assert plain is not None
    return {
        "even, uncompressed": even_plan(problem),
        "even, fw3 bw6": even_plan(problem, spec=(plain[0], plain[1])),
        "planned": plan_pipeline(problem),
    }


def _add_planned(results: Results, name: str, plan: PipelinePlan, steps: int) -> None:
    forward, backward, weights = (ms / 1e3 for ms in LAYER_MS)
    cuts = zip(plan.cuts, plan.cuts[1:], strict=False)
    stages = [[[forward * by, backward * by, weights * by] for by in UNEVEN[a:b]] for a, b in cuts]
    method = [jsons.dumps(list(plan.forward_specs)), jsons.dumps(list(plan.backward_specs))]
    rates = ",".join(UNEVEN_RATES[int(plan.machine(rank))] for rank in range(RANKS))
    with lab.Network(RANKS, rate=rates) as network:
        ran = run(method, plan.schedule.name, stages, steps, network)
    _add(results, f"{name}/{plan.schedule.name}/uneven", ran, plan.step_s, plan.simulated.unbound.step_s)
    results.results[-1] |= {"cuts": list(plan.cuts), "machines": [plan.machine(rank) for rank in range(RANKS)]}
    results.results[-1] |= {"forward": list(plan.forward_specs), "backward": list(plan.backward_specs)}


def _add(results: Results, cell: str, ran: Mapping[str, Any], predicted_s: float, free_s: float) -> None:
    measured = median(ran["step_s"])
    results.add(f"{cell}/measured_s", measured, "s", all=ran["step_s"])
    results.add(f"{cell}/of_a_free_network", free_s / measured, "")
    results.add(f"{cell}/predicted_s", predicted_s, "s", off=predicted_s / measured - 1)
    if cell in _DRAWN:
        results.about["timelines"][cell] = {"tasks": ran["tasks"], "arrivals": ran["arrivals"]}


def draw(timelines: Mapping[str, Any], path: Path) -> None:
    """Write the recorded steps as a picture."""
    titles = {
        _DRAWN[0]: "PyTorch's stages, uncompressed, 1F1B",
        _DRAWN[1]: "thinwire's stages, 3 bits forward and 6 back, 1F1B",
    }
    draw_timelines(
        {titles[cell]: _rows(recorded["tasks"], recorded["arrivals"]) for cell, recorded in timelines.items()}, path
    )


def _rows(tasks: Sequence[Sequence[Sequence[Any]]], arrivals: Sequence[Sequence[Sequence[Any]]]) -> list[Row]:
    """What ranks computed, and below each the messages between it and the next: from computed, or from when the one
    before has arrived, until arrived."""
    ends = {(kind, stage, chunk): end for rank_tasks in tasks for kind, stage, chunk, _, end in rank_tasks}
    rows: list[Row] = []
    for rank, own in enumerate(tasks):
        rows.append((f"rank {rank}", [(kind, chunk, begin, end) for kind, _, chunk, begin, end in own]))
        for wanted, source, arrow in (("forward", rank, "→"), ("backward", rank + 1, "←")):
            free, bars = 0.0, []
            arrived = [
                (at, chunk)
                for rank_arrivals in arrivals
                for kind, stage, chunk, at in rank_arrivals
                if (kind, stage) == (wanted, source)
            ]
            for at, chunk in sorted(arrived):
                bars.append(("wire", chunk, max(free, ends[wanted, source, chunk]), at))
                free = at
            if bars:
                rows.append((f"{rank} {arrow} {rank + 1}", bars))
    return rows


def _table(results: Results, link: str) -> Table:
    title = "uneven layers and links" if link == "uneven" else format_rate(parse_rate(link))
    table = Table("", "schedule", "measured", "predicted", "off", "of a free network", title=title)
    for row in (row for row in results.results if row["name"].endswith(f"/{link}/predicted_s")):
        name, schedule = row["name"].split("/")[:2]
        cell = row["name"].removesuffix("/predicted_s")
        measured = results.value(f"{cell}/measured_s")
        free = results.value(f"{cell}/of_a_free_network")
        table.add_row(
            name,
            schedule,
            f"{1e3 * measured:.0f} ms",
            f"{1e3 * row['value']:.0f} ms",
            f"{row['off']:+.1%}",
            f"{free:.2f}x",
        )
    return table
