"""``python -m experiments bench integers``: sums of integers of 2, 4 and 8 bits: time, bytes, loss."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from experiments.framework.pages import show
from experiments.tasks.images import ImageTask
from thinwire import Plan, Wire
from thinwire.collectives import ProcessGroupTransport, ring_bytes
from thinwire.plan import Filter
from thinwire.runtime import BucketEngine
from thinwire_tools import lab
from thinwire_tools.bench.allreduce import same_everywhere, sent_on_interface
from thinwire_tools.compare.compare import Bar, comparison_facts
from thinwire_tools.compare.paired import compare_training
from thinwire_tools.compare.tasks import SIZES
from thinwire_tools.compare.variants import ALONE
from thinwire_tools.ranks import TIMEOUT, run_ranks
from thinwire_tools.results import OutputFile, Results

SPECS = ("intsgd(bits=8)", "intsgd(bits=4)", "intsgd(bits=2)", "intdiana(bits=2)")
_TASKS = {"digits": ImageTask(steps=200, batch=16), "gpt": SIZES["tiny"]}
"""By momentum SGD, and by AdamW."""


def integers(
    *,
    ranks: int = 4,
    rate: str = "100mbit",
    size_mb: float = 25.0,
    repeats: int = 7,
    task: Literal["gpt", "digits"] = "gpt",
    seeds: int = 3,
    smoke: bool = False,
    json: OutputFile = None,
) -> int:
    """Integers of few bits, summed in messages that widen with the sums, beside 8 bits by native all-reduces, and fp32.

    A gradient's way from one rank to all is timed over an emulated link, encoding and decoding included; methods take
    turns. Then a model is trained with each over loopback, paired as in `thinwire compare`; "alone" must be worse.

    Examples:
      python -m experiments bench integers --json benchmarks/compressors/integers.json
      python -m experiments bench integers --rate 1gbit --seeds 0

    Args:
        ranks: number of ranks, each on a node of its own.
        rate: of each node's link, both ways.
        size_mb: size of the timed gradient in fp32, in MB (10^6 bytes).
        repeats: timed all-reduces of each method; the median counts; 0: none.
        task: what is trained: gpt, a small GPT by AdamW, or digits, a ResNet of digits by momentum SGD.
        seeds: number of seeds, each one paired run of every method; 0: none.
        smoke: a small gradient and a few steps of one seed: the same path, no figures worth keeping.
        json: write the figures to this file.
    """
    console = Console(highlight=False)
    if smoke:
        size_mb, repeats, seeds = 0.5, 1, 1
    about = {"ranks": ranks, "rate": rate, "size_mb": size_mb, "task": task, "seeds": seeds, "smoke": smoke}
    results = Results("python -m experiments bench integers", about=about)
    if repeats:
        lab.need_network()
        _time(results, ranks, rate, size_mb, repeats)
    if seeds:
        _train(results, console)
    show("integers", results, json)
    return 0


def _train(results: Results, console: Console) -> None:
    """Train alone and by each compressor, beside fp32, as ``results.about`` says; losses go to ``results``.

    It says the task of `_TASKS`, the seeds, the ranks, and whether it is a smoke test.
    """
    about = results.about
    task = _TASKS[about["task"]]
    if about["smoke"]:
        task = replace(task, steps=4, probe_every=2)
    seeds, ranks = range(about["seeds"]), about["ranks"]
    with Bar(console, task.steps) as bar:
        comparison = compare_training(task, [ALONE, *SPECS], seeds=seeds, num_ranks=ranks, watcher=bar)
    for line in comparison.remarks():
        console.print(line, soft_wrap=True)
    about["training"] = comparison_facts(comparison)
    comparison.record(results)


def _time(results: Results, ranks: int, rate: str, size_mb: float, repeats: int) -> None:
    """Time all methods; the figures go to ``results``."""
    config: dict[str, Any] = {"specs": SPECS, "numel": int(size_mb * 1e6 / 4), "repeats": repeats}
    with lab.Network(ranks, rate=rate) as network:
        answer = run_ranks(measure, config, ranks, network)
    for spec, figures in answer.items():
        results.add(f"seconds/{spec}", figures["seconds"], "s", all=figures["all"])
        results.add(f"sent_bytes/{spec}", figures["sent_bytes"], "B", interface=figures["interface_bytes"])
        results.add(f"bits/{spec}", figures["bits"], "bits")
        results.add(f"codec_s/{spec}", figures["codec_s"], "s")
        results.add(f"replicas_identical/{spec}", float(figures["replicas_identical"]), "")


# --- on a rank

_ROWS = 1000
_WARM = 2
"""Steps that are not timed: the first is exact and opens messages, the second opens those of integers."""


def measure(specs: list[str], numel: int, repeats: int) -> dict[str, dict[str, Any]]:
    """Seconds, bytes and bits of a gradient's all-reduce by gloo in fp32 and by each compressor, in turns.

    Seconds are those of the slowest rank. Bits are those of a ring all-reduce's coordinates, of which a rank sends
    2(n−1)/n.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    layers = (("weight", (_ROWS, numel // _ROWS)),)
    numel = numel // _ROWS * _ROWS
    wires = {spec: _wire(spec, dict(layers)) for spec in specs}

    def by_gloo(x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def by(wire: Wire) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            wire.engine.begin_step()
            return wire.engine.reduce(x, layers).wait()

        return run

    runs = {"fp32": by_gloo, **{spec: by(wire) for spec, wire in wires.items()}}
    found: dict[str, dict[str, Any]] = {name: {"all": [], "replicas_identical": True} for name in runs}
    for step in range(_WARM + repeats):
        gradient = torch.randn(numel, generator=torch.Generator().manual_seed(100 * step + rank))
        # What comes right after a long transfer finds the link's queues full: none may always be the one.
        for name in random.Random(step).sample(list(runs), len(runs)):
            x, own = gradient.clone(), found[name]
            if step == _WARM and name in wires:
                wires[name].reset_stats()
            dist.barrier()
            before, started = sent_on_interface(), time.perf_counter()
            mean = runs[name](x)
            seconds = torch.tensor(time.perf_counter() - started)
            # The kernel counts what it has sent: wait until the last messages have left.
            time.sleep(0.05)
            own["interface_bytes"] = sent_on_interface() - before
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            own["replicas_identical"] &= same_everywhere(mean)
            if step >= _WARM:
                own["all"].append(float(seconds))
    for name, own in found.items():
        own["seconds"] = median(own["all"])
        own["sent_bytes"], own["codec_s"] = ring_bytes(4 * numel, num_ranks), 0.0
        if (wire := wires.get(name)) is not None:
            stats = wire.stats
            own["sent_bytes"] = stats.payload_sent_bytes / repeats
            own["codec_s"] = (stats.encode_s + stats.reduce_s + stats.decode_s) / repeats
            wire.detach()
        own["bits"] = 8 * own["sent_bytes"] / (2 * (num_ranks - 1) / num_ranks * numel)
    return found


def _wire(spec: str, shapes: dict[str, tuple[int, ...]]) -> Wire:
    group = dist.new_group(timeout=TIMEOUT)
    assert isinstance(group, dist.ProcessGroup)
    transport = ProcessGroupTransport(group, TIMEOUT)
    return Wire(BucketEngine(Plan.build(shapes, spec, Filter()), shapes, transport))
