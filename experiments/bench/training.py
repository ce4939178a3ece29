"""``python -m experiments bench training``: loss and bytes of every way to train with few bytes, against AdamW."""

from __future__ import annotations

import json as json_module
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf, isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn

import thinwire
from thinwire.local import DiLoCo
from thinwire.local.fragments import FEW_BITS
from thinwire.optim import CompressedAdamW
from thinwire_tools.compare.gpt import GPTConfig
from thinwire_tools.compare.statistics import estimate, relative_differences
from thinwire_tools.compare.tasks import BETAS, WEIGHT_DECAY, GPTTask
from thinwire_tools.compare.train import digest, gradient_bytes, learning_rate, ring_factor, train as steps_of
from thinwire_tools.compare.variants import OPTIMIZERS
from thinwire_tools.ranks import run_ranks
from thinwire_tools.results import OutputFile, Results


@dataclass(frozen=True)
class Method:
    """A way to train. ``optimizer``: one of the tools' `OPTIMIZERS`, or the order of a `CompressedAdamW`; ``every``:
    steps between two exchanges of `thinwire.local.DiLoCo`, 0 for DDP; ``least``: the smallest layer that is compressed;
    ``start``: the first step that is.
    """

    name: str
    optimizer: str
    spec: str
    every: int = 0
    least: int = 1024
    start: int = 0


REFERENCE = "AdamW, fp32"
METHODS = (
    Method(REFERENCE, "task", "raw"),
    Method("alone", "task", "raw"),
    Method("AdamW, 4 bits", "task", "minmax(bits=4)"),
    Method("AdamW, feedback on gradients, 2 bits", "task", "ef(gaussian(bits=2))"),
    Method("AdamW, feedback on gradients, 1 bit", "task", "ef(onebit(bucket=256))"),
    Method("AdamW, feedback on gradients, top 1 %", "task", "ef(topk(density=0.01))"),
    Method("1-bit Adam, the first 15 % of steps in fp32", "one-bit-adam", "onebit(bucket=layer)"),
    Method("QuantizedAdam, 4 bits, the first 15 % of steps in fp32", "one-bit-adam", "minmax(bits=4)"),
    Method("CompressedAdamW, fp32", "pre", "raw"),
    Method("CompressedAdamW, 2 bits", "pre", "gaussian(bits=2)"),
    Method("CompressedAdamW, 2 bits, buckets of 64", "pre", "gaussian(bits=2, bucket=64)"),
    Method("CompressedAdamW, 1 bit", "pre", "onebit(bucket=256)"),
    Method("CompressedAdamW, rank 4", "pre", "powersgd(rank=4)"),
    Method("CompressedAdamW update, 2 bits", "update", "gaussian(bits=2)"),
    Method("CompressedAdamW update, 1 bit", "update", "onebit(bucket=256)"),
    Method("CompressedAdamW update, top 1 %", "update", "topk(density=0.01)"),
    Method("Muon, fp32", "muon", "raw"),
    Method("Muon, 2 bits", "muon", "ef(gaussian(bits=2))"),
    Method("Muon, rank 4", "muon", "powersgd(rank=4)"),
    Method("DiLoCo, AdamW, 2 bits, every 25", "AdamW", FEW_BITS, every=25),
    Method("DiLoCo, Muon, 2 bits, every 10", "Muon", FEW_BITS, every=10),
    Method("DiLoCo, Muon, 2 bits, every 25", "Muon", FEW_BITS, every=25),
    Method("DiLoCo, Muon, 2 bits, every 50", "Muon", FEW_BITS, every=50),
)

SHORT = (
    Method("AdamW, 4 bits, the first 10 steps in fp32", "task", "minmax(bits=4)", start=10),
    Method("AdamW, 4 bits, rounded to nearest", "task", "minmax(bits=4, rounding=nearest)"),
    Method("AdamW, feedback on gradients, 4 bits", "task", "ef(minmax(bits=4))"),
    Method("AdamW, 8 bits", "task", "minmax(bits=8)"),
    Method("AdamW, 1 bit", "task", "minmax(bits=1, rounding=nearest)"),
)
"""What short trainings show is asked of these, by their names; the last is a control."""


def training(
    *,
    workers: int = 2,
    steps: int = 1000,
    seeds: int = 3,
    rates: tuple[float, ...] = (4e-3, 8e-3, 1.6e-2),
    methods: tuple[str, ...] = (),
    json: OutputFile = None,
) -> int:
    """Train a small GPT by every method, each at its best learning rate; held-out loss and bytes beside AdamW's.

    Learning rates are tried with the first seed, and the best is used for all. Where it is the lowest or the highest of
    those, half or double of it is tried, too, until a rate on either side is worse. Takes about an hour. A run that was
    stopped goes on after the last method that is in its file.

    Examples:
      python -m experiments bench training --json benchmarks/optimizer/training.json
      python -m experiments bench training --workers 8 --seeds 1
      python -m experiments bench training --steps 30 --seeds 20 --rates 0.008 --methods "AdamW, 4" "AdamW, 8"

    Args:
        workers: ranks, each a process of one thread on this machine.
        steps: training steps of 4 windows of 64 bytes a worker.
        seeds: runs of each method: initial weights and batches.
        rates: learning rates to begin with.
        methods: only those whose names contain one of these words; a whole name is that method alone.
        json: write the figures to this file.
    """
    task = GPTTask(model=GPTConfig(width=64, layers=2, context=64), steps=steps, batch=4, held_out_windows=2048)
    chosen = [method for method in METHODS if method.name == REFERENCE or not methods or _is_named(method, methods)]
    chosen += [method for method in SHORT if _is_named(method, methods)]
    console = Console(highlight=False)
    results = Results("python -m experiments bench training")
    results.about = {"workers": workers, "steps": steps, "seeds": seeds, "rates": list(rates), "task": asdict(task)}
    results.results = _recorded(json, results.about)
    losses = {row["name"].removeprefix("loss/"): row["losses"] for row in results.results if "losses" in row}
    for method in (method for method in chosen if method.name not in losses):
        tried = bracket(partial(_run, method, task, workers, 0), rates)
        best = best_of(tried)
        runs = [tried[best], *(_run(method, task, workers, seed, best) for seed in range(1, seeds))]
        losses[method.name] = [run["loss"] for run in runs]
        if method.name != "alone" and any(run["replicas_differ"] for run in runs):
            console.print(f"{method.name}: the replicas differ")
            return 1
        by_rate = {str(rate): tried[rate]["loss"] for rate in sorted(tried)}
        loss, sent = fmean(losses[method.name]), fmean(run["sent_bytes"] for run in runs)
        results.add(f"loss/{method.name}", loss, "nats/byte", lr=best, losses=losses[method.name], by_rate=by_rate)
        results.add(f"sent_bytes/{method.name}", sent, "B/step")
        against = "" if method.name == REFERENCE else f", {_against(losses, method.name, results)}"
        console.print(f"{method.name}: lr {best:g}, {sent:,.0f} bytes a step, loss {loss:.4f}{against}")
        if json is not None:
            results.write(json)
    return 0


def _is_named(method: Method, words: Sequence[str]) -> bool:
    names = {other.name for other in METHODS + SHORT}
    return any(word == method.name or (word not in names and word in method.name) for word in words)


def _recorded(path: Path | None, about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows that an earlier run of the same trainings has written to ``path``."""
    if path is None or not path.exists():
        return []
    record = json_module.loads(path.read_text())
    return record["results"] if record["about"] == about else []


def bracket(run: Callable[[float], dict[str, float]], rates: Sequence[float]) -> dict[float, dict[str, float]]:
    """What ``run`` returns for each learning rate of ``rates``, and for more until the best lies between two others."""
    tried = {rate: run(rate) for rate in rates}
    while (best := best_of(tried)) in (min(tried), max(tried)):
        rate = best / 2 if best == min(tried) else best * 2
        tried[rate] = run(rate)
    return tried


def best_of(tried: Mapping[float, Mapping[str, float]]) -> float:
    """The learning rate of the least loss; a training that diverged has none."""
    return min(tried, key=lambda rate: tried[rate]["loss"] if isfinite(tried[rate]["loss"]) else inf)


def _run(method: Method, task: GPTTask, workers: int, seed: int, rate: float) -> dict[str, float]:
    config = {"method": method, "task": replace(task, learning_rate=rate), "seed": seed}
    return run_ranks(train, config, workers, None)


def _against(losses: Mapping[str, list[float]], name: str, results: Results) -> str:
    differences = relative_differences(losses[name], losses[REFERENCE])
    if len(differences) < 2:
        results.add(f"difference/{name}", differences[0], "")
        return f"{differences[0]:+.2%}"
    difference = estimate(differences)
    results.add(f"difference/{name}", difference.mean, "", lower=difference.lower, upper=difference.upper)
    return f"{difference.mean:+.2%} ({difference.lower:+.2%} to {difference.upper:+.2%})"


# --- on a rank


def train(method: Method, task: GPTTask, seed: int) -> dict[str, Any]:
    """Train ``task`` by ``method`` from ``seed``; the held-out loss, and bytes that were sent."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    model = task.build(seed)
    options: Any = {"betas": BETAS, "weight_decay": WEIGHT_DECAY, "order": method.optimizer}
    if method.optimizer in OPTIMIZERS:
        optimizer = OPTIMIZERS[method.optimizer](task, model)
    else:
        optimizer = CompressedAdamW(model.parameters(), task.learning_rate, **options)
    local = wire = None
    trained: nn.Module = model
    dense = 0.0
    if method.every:
        local = DiLoCo(model, optimizer, every=method.every, compressor=method.spec, seed=seed, total_steps=task.steps)
    elif method.name != "alone":
        trained = task.distribute(model)
        if method.spec == "raw":
            dense = gradient_bytes(model) * ring_factor(num_ranks)
        else:
            options = {"seed": seed, "start": method.start, "skip_if_slower": False, "min_numel": method.least}
            wire = thinwire.compress(trained, method.spec, optimizer=optimizer, **options)
    rate = partial(learning_rate, task.learning_rate, steps=task.steps)
    for _ in steps_of(task, trained, optimizer, task.batches(seed, rank, num_ranks), rate):
        if local is not None:
            local.step()
    if local is not None:
        local.finish()
    used = local.wire if local else wire
    sent = used.stats.payload_sent_bytes if used else dense * task.steps
    model.eval()
    alone = method.name == "alone"
    with torch.no_grad():
        # Of ranks that train alone rank 0's is the answer.
        total, count = task.evaluate(model, *((0, 1) if alone else (rank, num_ranks)), probe=False)
    if not alone:
        both = torch.tensor([total, count], dtype=torch.float64)
        dist.all_reduce(both)
        total, count = both.tolist()
    digests: list[Any] = [None] * num_ranks
    dist.all_gather_object(digests, digest(model.parameters()))
    return {"loss": total / count, "sent_bytes": sent / task.steps, "replicas_differ": len(set(digests)) > 1}
