"""``python -m experiments bench owners``: sparse gradients reduced by owners, beside gathering them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from rich.console import Console
from rich.table import Table

from experiments.tasks.resnet import ImageTask
from thinwire_tools import lab
from thinwire_tools.bench.allreduce import measure
from thinwire_tools.compare.compare import Bar, facts_of
from thinwire_tools.compare.every import TINY
from thinwire_tools.compare.paired import compare_training
from thinwire_tools.compare.variants import ALONE
from thinwire_tools.results import OutputFile, Results

METHODS = ("topk", "chunktopk", "fft")
TASKS = {"digits": ImageTask(steps=200, batch=16), "gpt": TINY}
"""By momentum SGD, and by AdamW."""


def specs_of(method: str, density: float, num_ranks: int, chunk: int) -> tuple[str, str, str]:
    """Three specs of a method: gathered, by owners, and by owners with so many more values that about as much arrives.

    A rank receives n−1 messages where all are gathered, and 2(n−1)/n where chunks have owners: n/2 times fewer.
    """
    more = num_ranks / 2
    if method == "chunktopk":
        k = round(64 * more)
        return "chunktopk(k=64)", "chunktopk(k=64, average=owners)", f"chunktopk(k={k}, average=owners)"
    if method == "fft":
        spec = f"fft(theta={{:g}}, chunk={chunk})"
        return "fft(theta=0.85)", spec.format(0.85), spec.format(1 - 0.15 * more)
    spec = f"topk(density={{:g}}, chunk={chunk})"
    return f"topk(density={density:g})", spec.format(density), spec.format(density * more)


def owners(
    *,
    ranks: int = 4,
    methods: tuple[str, ...] = METHODS,
    density: float = 0.01,
    rate: str = "100mbit",
    size_mb: float = 25.0,
    repeats: int = 3,
    task: Literal["digits", "gpt"] = "digits",
    seeds: int = 2,
    smoke: bool = False,
    json: OutputFile = None,
) -> int:
    """Sparse gradients whose owners add them up and choose again, beside gathering: time, bytes, loss.

    Each method three times: gathered; by owners with as many values; by owners with n/2 times as many, so that a rank
    receives about as much as by gathering. An all-reduce is timed over an emulated link, chosen from chunks of 262144;
    then a model is trained with each over loopback, chosen from chunks of 16384, paired as in `thinwire compare`.

    Examples:
      python -m experiments bench owners --json owners-4.json
      python -m experiments bench owners --ranks 8 --json owners-8.json

    Args:
        ranks: number of ranks, each on a node of its own.
        methods: which of topk, chunktopk and fft.
        density: of topk, where it is gathered.
        rate: of each node's link, both ways.
        size_mb: size of the timed gradient in fp32, in MB (10^6 bytes).
        repeats: timed all-reduces of each method; the median counts; 0: none.
        task: what is trained: digits, a ResNet of digits by momentum SGD, or gpt, a small GPT by AdamW.
        seeds: number of seeds, each one paired run of every method; 0: none.
        smoke: a small gradient and a few steps of one seed: the same path, no figures worth keeping.
        json: write the figures to this file.
    """
    console = Console(highlight=False)
    lab.need_network()
    if smoke:
        size_mb, repeats, seeds = 0.5, 1, 1
    about = {"ranks": ranks, "rate": rate, "size_mb": size_mb, "task": task, "seeds": seeds, "smoke": smoke}
    results = Results("python -m experiments bench owners", about=about)
    if repeats:
        specs = [spec for method in methods for spec in specs_of(method, density, ranks, 262144)]
        console.print(_time(results, specs, ranks, rate, size_mb, repeats))
    if seeds:
        specs = [spec for method in methods for spec in specs_of(method, density, ranks, 16384)]
        train(results, console, specs)
    if json:
        results.write(json)
    return 0


def train(results: Results, console: Console, specs: Sequence[str]) -> None:
    """Train alone and by each compressor, beside fp32, as ``results.about`` says; losses go to ``results`` and a table.

    It says the task of `TASKS`, the seeds, the ranks, and whether it is a smoke test.
    """
    about = results.about
    task = TASKS[about["task"]]
    if about["smoke"]:
        task = replace(task, steps=4, probe_every=2)
    seeds, ranks = range(about["seeds"]), about["ranks"]
    with Bar(console, task.steps) as bar:
        comparison = compare_training(task, [ALONE, *specs], seeds=seeds, num_ranks=ranks, watcher=bar)
    console.print(comparison.table("Trained over loopback"))
    for line in comparison.remarks():
        console.print(line, soft_wrap=True)
    about["training"] = facts_of(comparison)
    comparison.record(results)


def _time(results: Results, specs: list[str], ranks: int, rate: str, size_mb: float, repeats: int) -> Table:
    """Time an all-reduce by each compressor; the figures go to ``results``, and into a table."""
    table = Table("all-reduce", "ms", "gloo", "MB received a rank")
    for spec in specs:
        [answer], _ = measure([("sra", "group")], [size_mb], ranks=ranks, rate=rate, compressor=spec, repeats=repeats)
        [(name, counted)] = answer["about"].items()
        seconds, gloo = answer["seconds"][name], answer["seconds"]["gloo"]
        # What all ranks send, all ranks receive.
        received = sum(counted["crossing_bytes"]) / ranks
        results.add(f"seconds/{spec}", seconds, "s", gloo=gloo, all=answer["all"][name])
        results.add(f"received_bytes/{spec}", received, "B", interfaces=counted["interface_bytes"])
        results.add(f"replicas_identical/{spec}", float(counted["replicas_identical"]), "")
        table.add_row(spec, f"{seconds * 1e3:.1f}", f"{gloo / seconds:.2f}x", f"{received / 1e6:.2f}")
    return table
