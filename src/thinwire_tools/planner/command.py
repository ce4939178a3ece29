"""``thinwire plan pipeline``: the fastest plan of a pipeline that was measured."""

from __future__ import annotations

import json as jsons
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from thinwire.policies import ByLink
from thinwire_tools.exits import ends_command
from thinwire_tools.lab.units import format_rate, parse_rate, parse_time
from thinwire_tools.planner import (
    PYTORCH_CLASSES,
    REFERENCE,
    SCHEDULES,
    Layer,
    Link,
    Machine,
    PipelinePlan,
    PipelineProblem,
    ScheduleName,
    Simulated,
    even_plan,
    plan_pipeline,
)
from thinwire_tools.planner.plot import Row, draw_timelines
from thinwire_tools.results import OutputFile, Results

_MOST_LAYERS, _MOST_MACHINES, _MOST_CHUNKS = 512, 32, 1024


def plan_pipeline_command(
    pipeline: tyro.conf.Positional[Path],
    *,
    schedules: tuple[ScheduleName, ...] = SCHEDULES,
    per_machine: int = 2,
    forward: tuple[str, ...] = (),
    backward: tuple[str, ...] = (),
    error_forward: str = REFERENCE[0],
    error_backward: str = REFERENCE[1],
    svg: Annotated[Path | None, tyro.conf.arg(metavar="PATH.svg")] = None,
    json: OutputFile = None,
) -> int:
    """The fastest plan of a pipeline: cuts of its layers, order of machines, schedule, bits of each boundary.

    The file has what was measured, of one micro-batch: {"micro_batches": 8, "layers": [{"name": "block", "repeat": 12,
    "forward_ms": 4, "backward_ms": 8, "activation_bytes": 524288}], "machines": ["a", {"name": "b", "speed": 0.5}],
    "links": [{"rate": "1gbit"}, {"between": ["a", "b"], "rate": "100mbit", "latency": "5ms"}]}. Links without
    "between" hold for all that have none of their own, both ways; latency is one way; activation_bytes are those of a
    layer's output in fp32. The plan may lose as much of activations and of gradients as --error-forward and
    --error-backward would at the boundaries of one stage for each machine.

    Examples:
      thinwire plan pipeline pipeline.json
      thinwire plan pipeline pipeline.json --schedules 1f1b zero-bubble
      thinwire plan pipeline pipeline.json --forward "gaussian(bits=4)" --error-forward "gaussian(bits=4)"
      thinwire plan pipeline pipeline.json --svg plan.svg --json plan.json

    Args:
        pipeline: the file with the measurements.
        schedules: those to choose from.
        per_machine: the most stages that a machine may have, in the schedules that allow it.
        forward: compressors of activations to choose from; by default those of ByLink().
        backward: compressors of gradients to choose from.
        error_forward: the compressor that sets how much of activations may be lost.
        error_backward: the compressor that sets how much of gradients may be lost.
        svg: draw a step of the plan, and one without it.
        json: write the plan to this file.
    """
    console = Console(highlight=False)
    with ends_command(ValueError, TypeError, OSError, ImportError, RecursionError):
        usual = ByLink()
        problem = read_problem(
            jsons.loads(pipeline.read_text(encoding="utf-8")),
            choices=ByLink(forward=forward or usual.forward, backward=backward or usual.backward),
            reference=(error_forward, error_backward),
            per_rank=per_machine,
        )
        plans = _plans(problem, schedules)
        best = min(plans.values(), key=lambda plan: plan.step_s)
        now = even_plan(problem)
        if svg:
            pairs = {"even cuts, uncompressed, 1f1b": now.simulated, f"planned, {_schedule(best)}": best.simulated}
            draw_timelines({title: timeline(simulated) for title, simulated in pairs.items()}, svg)
        if json:
            _results(best, plans, now).write(json)
    _show(console, best, plans, now)
    for path in (json, svg):
        if path:
            console.print(f"Written: {path}", soft_wrap=True, markup=False)
    return 0


def read_problem(content: Any, **options: Any) -> PipelineProblem:
    """The problem in what a file of measurements holds. ``options``: further arguments of `PipelineProblem`.

    Raises:
        ValueError: it holds something else; says what is missing or wrong.
    """
    if not isinstance(content, dict):
        raise ValueError("a pipeline is a JSON object with micro_batches, layers, machines and links")
    layers = tuple(layer for row in _rows(content, "layers", _MOST_LAYERS) for layer in _layers(row))
    if len(layers) > _MOST_LAYERS:
        raise ValueError(f"{len(layers)} layers: at most {_MOST_LAYERS}, so take several together")
    rows = _rows(content, "machines", _MOST_MACHINES)
    machines = tuple(Machine(row) if isinstance(row, str) else _machine(row) for row in rows)
    chunks = _number(content, "micro_batches")
    if chunks != int(chunks) or chunks > _MOST_CHUNKS:
        raise ValueError(f"micro_batches is {chunks:g}: write a whole number up to {_MOST_CHUNKS}")
    names = [machine.name for machine in machines]
    return PipelineProblem(layers, machines, _links(content, names), int(chunks), **options)


def _rows(content: Mapping[str, Any], name: str, most: int) -> list[Any]:
    rows = content.get(name)
    if not isinstance(rows, list) or not 0 < len(rows) <= most:
        raise ValueError(f"{name} must be a list of 1 to {most}")
    return rows


def _text(row: Any, name: str) -> str:
    text = row.get(name) if isinstance(row, dict) else None
    if not isinstance(text, str) or not text:
        raise ValueError(f"{row!r} has no {name}, which is a text")
    return text


def _number(row: Any, name: str, default: float | None = None, *, zero: bool = False) -> float:
    number = row.get(name, default) if isinstance(row, dict) else None
    if (
        not isinstance(number, int | float)
        or isinstance(number, bool)
        or not 0 <= number < 1e15
        or not (number or zero)
    ):
        raise ValueError(f"{name} must be a number {'of 0 or' if zero else ''} above 0, in {row!r}"[:300])
    return float(number)


def _machine(row: Any) -> Machine:
    machine = Machine(_text(row, "name"), _number(row, "speed", 1.0))
    return replace(machine, line=parse_rate(_text(row, "line")) / 8) if "line" in row else machine


def _layers(row: Any) -> list[Layer]:
    name, count = _text(row, "name"), _number(row, "repeat", 1)
    if count != int(count) or count > _MOST_LAYERS:
        raise ValueError(f"{name} is repeated {count:g} times: write a whole number up to {_MOST_LAYERS}")
    weights = _number(row, "weights_ms", zero=True) / 1e3 if "weights_ms" in row else None
    times = (_number(row, "forward_ms", zero=True) / 1e3, _number(row, "backward_ms", zero=True) / 1e3)
    if weights is not None and weights > times[1]:
        raise ValueError(f"{name}: weights_ms is a part of backward_ms, and cannot be more")
    layer = Layer(name, *times, _number(row, "activation_bytes"), weights)
    if count == 1:
        return [layer]
    return [Layer(f"{name} {i}", *times, layer.activation_bytes, weights) for i in range(int(count))]


def _links(content: Mapping[str, Any], names: list[str]) -> dict[tuple[str, str], Link]:
    links: dict[tuple[str, str], Link] = {}
    rows = _rows(content, "links", _MOST_MACHINES**2)
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError('a link is an object, {"rate": "100mbit"}')
    for row in sorted(rows, key=lambda row: "between" in row):
        latency = parse_time(_text(row, "latency")) if "latency" in row else 0.0
        link = Link(parse_rate(_text(row, "rate")) / 8, latency)
        between = row.get("between")
        if between is None:
            links |= {(a, b): link for a in names for b in names if a != b}
        elif not isinstance(between, list) or len(between) != 2 or not set(map(str, between)) <= set(names):
            raise ValueError(f"between must name two of the machines {', '.join(names)}, not {between!r}")
        else:
            a, b = map(str, between)
            links |= {(a, b): link, (b, a): link}
    return links


def _plans(problem: PipelineProblem, schedules: tuple[ScheduleName, ...]) -> dict[ScheduleName, PipelinePlan]:
    """The plan for each schedule that takes so many micro-batches on so many machines."""
    plans: dict[ScheduleName, PipelinePlan] = {}
    for name in schedules:
        one = problem.only(name)
        if any(True for _ in one.shapes()):
            plans[name] = plan_pipeline(one)
    if not plans:
        raise ValueError(f"none of {', '.join(schedules)} takes {problem.num_chunks} micro-batches here")
    return plans


def timeline(simulated: Simulated) -> list[Row]:
    """Rows of a picture: each rank, and below it the links to the next one, there and back."""
    rows: list[Row] = []
    for rank, spans in enumerate(simulated.tasks):
        rows.append((f"rank {rank}", [(span.kind, span.chunk, span.begin_s, span.end_s) for span in spans]))
        for direction, arrow in (("forward", "→"), ("backward", "←")):
            behind = [link_spans for b, link_spans in enumerate(simulated.messages) if b % len(simulated.tasks) == rank]
            bars = [
                ("wire", s.chunk, s.begin_s, s.end_s)
                for link_spans in behind
                for s in link_spans
                if s.kind == direction
            ]
            if bars:
                rows.append((f"{rank} {arrow} {(rank + 1) % len(simulated.tasks)}", bars))
    return rows


def _schedule(plan: PipelinePlan) -> str:
    several = f", {plan.schedule.per_rank} stages a machine" if plan.schedule.per_rank > 1 else ""
    return f"{plan.schedule.name}{several}"


def _show(console: Console, best: PipelinePlan, plans: Mapping[ScheduleName, PipelinePlan], now: PipelinePlan) -> None:
    gain = now.step_s / best.step_s
    text = (
        f"A step takes {_ms(best.step_s)} with {_schedule(best)}: {gain:.2f} times as fast as even cuts, uncompressed, "
        f"under 1f1b ({_ms(now.step_s)})."
    )
    console.print(Panel(escape(text), title="[bold]thinwire plan pipeline[/]", expand=False))
    for line in lines(best):
        console.print(f"  {line}", markup=False, soft_wrap=True)
    console.print(_stages(best))
    console.print(_schedules(plans, now))
    (fe, be), (fb, bb) = best.errors, best.problem.budgets
    console.print(
        f"Loses {_share(fe, fb)} of what may be lost of activations, {_share(be, bb)} of gradients, in sums of "
        "squares. Predicted from the times and links given; each two machines have a link of their own.",
        style="dim",
        markup=False,
    )


def lines(plan: PipelinePlan) -> list[str]:
    """To paste: what goes where."""
    name = PYTORCH_CLASSES[plan.schedule.name]
    single = plan.schedule.name in ("gpipe", "1f1b")
    stages = "stage" if single else "[stage]" if plan.schedule.per_rank == 1 else "stages"
    cuts = ", ".join(f"layers[{a}:{b}]" for a, b in zip(plan.cuts, plan.cuts[1:], strict=False))
    ranks = ", ".join(plan.machine(rank) for rank in range(len(plan.order)))
    return [
        f"# ranks: {ranks}",
        f"# stages: {cuts}",
        f"stage = thinwire.compress_stage(stage, forward={_listed(plan.forward_specs)}, "
        f"backward={_listed(plan.backward_specs)})",
        f"schedule = {name}({stages}, n_microbatches={plan.schedule.num_chunks}, loss_fn=loss_fn)",
    ]


def _listed(specs: tuple[str, ...]) -> str:
    return repr(specs[0]) if len(set(specs)) == 1 else repr(list(specs))


def _stages(plan: PipelinePlan) -> Table:
    table = Table(title="Stages, and the boundary behind each", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("stage", "machine", "layers", "computes", "link", "forward", "takes", "backward", "takes"):
        table.add_column(
            column, justify="right" if column in ("computes", "takes", "link") else "left", overflow="fold"
        )
    simulated = plan.simulated
    for s, times in enumerate(simulated.stages):
        first, last = plan.problem.layers[plan.cuts[s]], plan.problem.layers[plan.cuts[s + 1] - 1]
        count = plan.cuts[s + 1] - plan.cuts[s]
        cells = [str(s), plan.machine(s), first.name if count == 1 else f"{first.name} – {last.name}"]
        cells.append(_ms(times.forward_s + times.backward_s))
        if s < len(simulated.boundaries):
            wires, rate = simulated.boundaries[s], plan.problem.links[plan.machine(s), plan.machine(s + 1)].rate
            cells += [format_rate(8 * rate), plan.forward_specs[s], _ms(wires.forward.link_s + wires.forward.latency_s)]
            cells += [plan.backward_specs[s], _ms(wires.backward.link_s + wires.backward.latency_s)]
        table.add_row(*map(escape, cells))
    return table


def _schedules(plans: Mapping[ScheduleName, PipelinePlan], now: PipelinePlan) -> Table:
    table = Table(title="The best plan of each schedule", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("", "a step", "bubbles", "waits for links", "stages held"):
        table.add_column(column, justify="right" if column else "left")
    rows = {"even cuts, uncompressed, 1f1b": now}
    rows |= {_schedule(plan): plan for plan in sorted(plans.values(), key=lambda plan: plan.step_s)}
    for title, plan in rows.items():
        simulated = plan.simulated
        bubbles = sum(simulated.bubble_s) / len(simulated.bubble_s) / simulated.step_s
        cells = [_ms(simulated.step_s), f"{bubbles:.0%}", f"{simulated.exposed_s / simulated.step_s:.0%}"]
        table.add_row(escape(title), *cells, str(plan.schedule.most_held), style="dim" if plan is now else None)
    return table


def _results(best: PipelinePlan, plans: Mapping[ScheduleName, PipelinePlan], now: PipelinePlan) -> Results:
    about = {
        "schedule": best.schedule.name,
        "stages_per_machine": best.schedule.per_rank,
        "micro_batches": best.schedule.num_chunks,
        "machines": [best.machine(rank) for rank in range(len(best.order))],
        "cuts": list(best.cuts),
        "forward": list(best.forward_specs),
        "backward": list(best.backward_specs),
        "lines": lines(best),
    }
    results = Results("thinwire plan pipeline", about=about)
    for title, plan in {"even": now, "planned": best, **plans}.items():
        simulated = plan.simulated
        results.add(f"step_s/{title}", simulated.step_s, "s")
        results.add(f"exposed_s/{title}", simulated.exposed_s, "s")
        results.add(f"bubble_s/{title}", max(simulated.bubble_s), "s", ranks=list(simulated.bubble_s))
    return results


def _ms(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "0%"
