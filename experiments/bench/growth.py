"""``python -m experiments bench growth``: what grows with the ranks, and with the model."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import torch.distributed as dist
import tyro
from rich.console import Console

from experiments.framework.methods import FP32, NOTHING, THINWIRE, Method
from experiments.framework.pages import show
from experiments.framework.rank import Rank
from experiments.framework.replay import Compute
from experiments.framework.timing import PinnedTiming, SeparateRuns, Times, Timing
from experiments.tasks.images import Model
from experiments.validation import chaos
from experiments.validation.chaos_rank import Scenario, Training
from thinwire.collectives import World, parse_algorithm
from thinwire.compressors import parse
from thinwire.integrations.transports import bare_transport
from thinwire.plan.forecast import Bucket, Curve, HierarchyTimes, Links, Pace, native_step, planned_step
from thinwire.runtime.probe import measure_links
from thinwire_tools import lab, plots
from thinwire_tools.compare.gpt import GPTConfig
from thinwire_tools.compare.tasks import GPTTask
from thinwire_tools.exits import ends_command
from thinwire_tools.results import OutputFile, Results

_SMALL = GPTTask(model=GPTConfig(width=192, layers=4), batch=4, bucket_cap_mb=1.0)
_GPT2 = {"vocabulary": 50257, "context": 16}
_MODELS = {
    "1M": GPTConfig(width=128, layers=5, context=16),
    "10M": GPTConfig(width=384, layers=6, context=16),
    "124M": GPTConfig(width=768, layers=12, heads=12, **_GPT2),
    "350M": GPTConfig(width=1024, layers=24, heads=16, **_GPT2),
    "1B": GPTConfig(width=1536, layers=33, heads=16, **_GPT2),
}
_NO_STEPS = ("1B",)
"""Models that are opened but not trained: their steps do not fit into memory."""
_METHODS = (FP32, THINWIRE, NOTHING)
_ON_PAPER = (64, 128, 256, 512, 1024)
_MOST_FAR, _MOST_IN_FP32 = 16, 8
"""The most ranks whose steps are timed over links with a round-trip time, by any method and by DDP in fp32: its ring
waits 2(n - 1) times a bucket, and where ranks share cores, all waiting takes longer."""
_TWO_LEVELS = parse_algorithm("hierarchical(inside=same)")


def growth(
    *,
    ranks: tuple[int, ...] = (2, 4, 8, 16, 32),
    rate: str = "1gbit",
    rtts_ms: tuple[float, ...] = (0.0, 20.0),
    models: tuple[str, ...] = tuple(_MODELS),
    runs: int = 1,
    rounds: int = 3,
    json: OutputFile = None,
    plot: Annotated[Path | None, tyro.conf.arg(metavar="PATH.svg")] = None,
) -> int:
    """Measure steps, start, memory and errors with more and more ranks, and with larger and larger models.

    Steps of a GPT of 1.8 million parameters are replayed, each rank behind a link of its own, and set against the cost
    model, which is given the link as two ranks measure it and the processor time of communication, up to 1,024 ranks.
    Of more than 16 ranks only steps without a round-trip time are timed. Models are trained by two ranks on this
    machine. Takes about a quarter of an hour.

    Examples:
      python -m experiments bench growth --json growth.json --plot growth.svg
      python -m experiments bench growth --ranks 2 4 --rtts-ms 0 --models 1M --runs 1

    Args:
        ranks: numbers of ranks.
        rate: of each rank's link, in both directions.
        rtts_ms: round-trip times added to the links, in ms.
        models: sizes of models, of those in the default.
        runs: separate runs of the steps.
        rounds: turns of each method in a run.
        json: write the figures to this file.
        plot: draw steps by ranks.
    """
    with ends_command():
        if any(rtts_ms) and min(ranks) > _MOST_FAR:
            raise ValueError(
                f"--ranks {min(ranks)}: with --rtts-ms up to {_MOST_FAR} ranks are timed; give --rtts-ms 0"
            )
    lab.need_network()
    small = Model("gpt", "GPT", "", _SMALL, _SMALL.batch * _SMALL.model.context, "tokens/s", 8)
    about: dict[str, Any] = {"rate": rate, "runs": runs, "rounds": rounds, "spec": THINWIRE.spec, "ranks": list(ranks)}
    results = Results("python -m experiments bench growth", about={**about, "rtts_ms": list(rtts_ms)})
    computes: dict[Model, Compute] = {}
    with Console().status("") as status:
        two = SeparateRuns("links", True, 2, 1, computes)
        turns: Any = {"rounds": rounds, "steps": 1, "rates": (rate,), "on_turn": lambda *_: None}
        links = _links(two, rate)
        for rtt_ms in rtts_ms:
            found: dict[int, Times] = {}
            for n in (n for n in ranks if not rtt_ms or n <= _MOST_FAR):
                status.update(f"{n} ranks, round trip +{rtt_ms:g} ms")
                timed = replace(two, num_ranks=n, runs=runs, rtt_s=rtt_ms / 1e3)
                methods = _METHODS[1:] if rtt_ms and n > _MOST_IN_FP32 else _METHODS
                methods += (_two_levels(_group(n)),) if _group(n) else ()
                (found[n],) = timed.times(small, methods, **turns)
                for name, by_run in found[n].rounds.items():
                    cpu_s = median(found[n].cpu_s[name])
                    results.add(f"step_s/{rtt_ms:g}/{n}/{name}", median(by_run), "s", by_run=by_run, cpu_s=cpu_s)
                if json:
                    results.write(json)
            pace = _pace(small, computes[small], found[min(found)])
            for n in (*found, *_ON_PAPER):
                for name, seconds in forecast(pace, links, n, processor(found, n), rtt_ms / 1e3).items():
                    results.add(f"forecast_s/{rtt_ms:g}/{n}/{name}", seconds, "s")
        for n in ranks:
            status.update(f"{n} ranks: start, errors, a rank that dies")
            _add_ranks(results, small, n)
        for name in models:
            status.update(f"a model of {name}")
            task = GPTTask(model=_MODELS[name], batch=1, bucket_cap_mb=25.0, steps=8)
            with Timing("host", emulated=False, num_ranks=2) as timing:
                options: Any = {"steps": 0, "methods": (THINWIRE,)} if name in _NO_STEPS else {"methods": _METHODS}
                by_method = timing.call(opened, task=task, **options)[0]["found"]
            for method, figures in by_method.items():
                results.add(f"model/{name}/{method}", figures.pop("start_s"), "s", **figures)
            if json:
                results.write(json)
    if plot:
        draw(results, plot)
    show("growth", results, json)
    return 0


def _add_ranks(results: Results, small: Model, n: int) -> None:
    """Add what is measured of ``n`` ranks on this host: start, bytes, error of the mean, and how a death is named."""
    with Timing("host", emulated=False, num_ranks=n) as timing:
        found = timing.call(opened, task=small.task, methods=(THINWIRE,), steps=0)[0]["found"][THINWIRE.name]
        errors = timing.errors(small, (THINWIRE,), steps=3, on_turn=lambda *_: None)[THINWIRE.name]
    results.add(f"start_s/{n}", found["start_s"], "s", memory_bytes=found["memory_bytes"])
    results.add(f"error/{n}", fmean(errors), "", by_step=errors)
    killed = Scenario(Training("ddp", "minmax(bits=4)", "group", n), 60.0, "kill", "backward", n - 1, 2)
    survivors = chaos.run(killed).survivors
    named = sum(survivor.named for survivor in survivors)
    results.add(f"named_s/{n}", max(survivor.seconds for survivor in survivors), "s", named=named, of=len(survivors))


def _group(num_ranks: int) -> int:
    """Return the number of ranks of a group in two levels, about the root of all; 0 if those are too few."""
    group = 1 << (num_ranks.bit_length() // 2)
    return group if num_ranks > 2 * group > 4 else 0


def _two_levels(group: int) -> Method:
    """Return thinwire's means in two levels: among groups of ranks, and among the groups' ranks of one number."""
    return replace(THINWIRE, name="two levels", algorithm=str(_TWO_LEVELS), ranks_per_node=group)


# --- on paper


def _links(runs: SeparateRuns, rate: str) -> Links:
    """Return the links of two ranks."""
    with PinnedTiming(runs, 0) as timing:
        timing.shape(rate)
        found = timing.call(measured)[0]
    native, exchange = (Curve(tuple(map(tuple, found[name]["points"]))) for name in ("native", "exchange"))
    return Links(native, exchange, 2)


def processor(found: Mapping[int, Times], num_ranks: int) -> dict[str, float]:
    """Return the processor seconds that communication takes a rank in a step, by method: as measured, or beyond on the
    line through the two largest numbers of ranks, for a rank's messages are as many as there are other ranks."""
    taken = {}
    for name in (FP32.name, THINWIRE.name):
        own = {
            n: median(times.cpu_s[name]) - median(times.cpu_s[NOTHING.name])
            for n, times in found.items()
            if name in times.cpu_s
        }
        few, more = sorted(own)[-2:][0], max(own)
        slope = (own[more] - own[few]) / max(1, more - few)
        taken[name] = own.get(num_ranks, own[more] + slope * (num_ranks - more))
    return taken


def _pace(model: Model, compute: Compute, times: Times) -> Pace:
    """Return the replayed step as the cost model sees it, as long as it took with nothing sent. A rank has one core,
    which communication takes as well."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.task.build(0).named_parameters()}
    longer = times.step_s(NOTHING.name) / compute.step_s
    at, ready, buckets = compute.forward_s, {}, {}
    for name, seconds in compute.gradients_s.items():
        ready[name] = at = at + seconds
    for row in times.layers[THINWIRE.name]:
        buckets.setdefault(row["bucket"], []).append(row["name"])
    made = [
        Bucket(longer * max(ready[name] for name in names), tuple((name, shapes[name]) for name in names))
        for names in buckets.values()
    ]
    return Pace(tuple(sorted(made, key=lambda bucket: bucket.ready_s)), longer * compute.step_s, shared=1.0)


def forecast(pace: Pace, links: Links, num_ranks: int, cpu_s: Mapping[str, float], rtt_s: float) -> dict[str, float]:
    """Return the seconds of a step of ``num_ranks`` ranks, of stock DDP, of thinwire, and of thinwire in two levels,
    from the links of two ranks, the processor seconds of a step's communication, by method, and a round-trip time.

    In a ring 2(n - 1) messages follow each other, and gloo's receivers ask for each. thinwire's are asked for ahead,
    and in any tree as many as in a star.
    """
    numel = sum(bucket.numel for bucket in pace.buckets)
    native, exchange = _later(links.native, 2 * (num_ranks - 1) * rtt_s), _later(links.exchange, rtt_s / 2)
    grown = replace(links, num_ranks=num_ranks, native=native, exchange=exchange)
    grown = replace(grown, native_cpu=cpu_s[FP32.name] / (4 * numel * grown.ring))
    compressor = parse(THINWIRE.spec)
    layers = {name: compressor for bucket in pace.buckets for name, _ in bucket.layers}
    codec_s = {compressor: cpu_s[THINWIRE.name] / numel}
    found = {"fp32": native_step(pace, grown), "thinwire": planned_step(pace, grown, layers, codec_s)}
    if group := _group(num_ranks):
        world = World(num_ranks, tuple(rank // group for rank in range(num_ranks)))
        legs = HierarchyTimes(world, exchange, exchange)
        found["two levels"] = planned_step(pace, replace(grown, legs=legs), layers, codec_s, _TWO_LEVELS)
    return found


def _later(curve: Curve, seconds: float) -> Curve:
    return Curve(tuple((size, taken + seconds) for size, taken in curve.points))


def draw(results: Results, path: Path) -> None:
    """Draw steps by ranks, measured and on paper, for each round-trip time."""
    rtts = results.about["rtts_ms"]
    figure, panels = plots.canvas(
        len(rtts), titles=[f"round trip +{rtt:g} ms" for rtt in rtts], x="ranks", y="seconds of a step"
    )
    rows = [(row["name"].split("/"), row["value"]) for row in results.results if row["name"].count("/") == 3]
    for rtt, axes in zip(rtts, panels, strict=True):
        for name, color in (("fp32", FP32.color), ("thinwire", THINWIRE.color), ("two levels", "#c2571a")):
            for kind, style in (("forecast_s", "--"), ("step_s", "o")):
                points = [(int(n), s) for (what, at, n, of), s in rows if (what, at, of) == (kind, f"{rtt:g}", name)]
                label = f"{name}, {'measured' if style == 'o' else 'on paper'}"
                axes.plot(*zip(*points, strict=True) if points else ((), ()), style, color=color, label=label)
        axes.set(xscale="log", yscale="log")
        shown = [2, 8, 32, 128, 512]
        axes.set_xticks(shown, list(map(str, shown)))
        axes.minorticks_off()
    plots.save(figure, path)


# --- on a rank


def measured(rank: Rank) -> dict[str, Any]:
    """Return the times of messages among these ranks."""
    assert dist.group.WORLD is not None
    transport = bare_transport(dist.group.WORLD)
    try:
        return asdict(measure_links(transport))
    finally:
        transport.close()


def opened(rank: Rank, task: GPTTask, methods: tuple[Method, ...], steps: int = 5) -> dict[str, Any]:
    """Return, by method, the seconds in which it attaches to the task's model, the bytes that a Wire says it needs,
    and the seconds of a step, the median of ``steps``."""
    found = {}
    for method in methods:
        ddp = task.distribute(task.build(0))
        dist.barrier()
        started = time.perf_counter()
        wire = method.attach(ddp)
        start_s, numel = time.perf_counter() - started, sum(p.numel() for p in ddp.parameters())
        memory = wire.memory if wire else 0
        taken = []
        for batch in islice(cycle(task.batches(0, rank.rank, rank.num_ranks)), steps + 2 if steps else 0):
            started = time.perf_counter()
            task.loss(ddp, batch).backward()
            ddp.zero_grad(set_to_none=True)
            taken.append(time.perf_counter() - started)
        step_s = median(taken[2:]) if steps else None
        found[method.name] = {"start_s": start_s, "memory_bytes": memory, "elements": numel, "step_s": step_s}
        if wire is not None:
            wire.detach()
        del ddp, wire
        gc.collect()
    return {"found": found}
