"""``python -m experiments bench local`` and ``peers``: local updates over slow links.

The first shows the time to the same loss beside a network that costs nothing, the second another library's updates."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from importlib.util import find_spec
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn

from experiments.framework.pages import show
from thinwire.local import DiLoCo, Nesterov
from thinwire.local.fragments import FEW_BITS
from thinwire_tools import lab
from thinwire_tools.bench.allreduce import sent_on_interface
from thinwire_tools.compare.comparison import Run
from thinwire_tools.compare.demo import MARGIN, TASK, Turns
from thinwire_tools.compare.gpt import GPTConfig
from thinwire_tools.compare.paired import train_in_turns
from thinwire_tools.compare.statistics import estimate, reached, relative_differences
from thinwire_tools.compare.tasks import GPTTask
from thinwire_tools.compare.train import digest, learning_rate
from thinwire_tools.compare.variants import (
    LOCAL_EVERY,
    POWERSGD_RANK,
    VARIANTS as OF_THE_DEMO,
    Variant,
    local_updates,
    low_rank,
)
from thinwire_tools.lab.network import address
from thinwire_tools.lab.units import format_rate, parse_rate
from thinwire_tools.ranks import run_ranks
from thinwire_tools.results import OutputFile, Results

VARIANTS = {
    **OF_THE_DEMO,
    "low-rank-bf16": low_rank(f"thinwire rank {POWERSGD_RANK}, bf16", "bf16"),
    "one-bit-adam": Variant("onebit(bucket=layer)", title="1-bit Adam", optimizer="one-bit-adam"),
    "overlapped": local_updates("local, 1 step late", overlap=1),
    "streaming": local_updates("local, streaming", fragments=2, overlap=3, mix=0.5),
    "muloco-streaming": local_updates("local with Muon, streaming", "muon", fragments=2, overlap=2),
}
METHODS = ("fp32", "thinwire", "local", "overlapped", "streaming", "muloco", "muloco-streaming", "muon", "alone")
CONTROLS = ("fp32", "alone")

SAME_LOSS = 1 + MARGIN
"""Two runs have "the same loss" where one is at most this many times the other."""


def local(
    *,
    rates: tuple[str, ...] = ("100mbit", "10mbit"),
    steps: int = 192,
    seeds: int = 3,
    methods: tuple[str, ...] = METHODS,
    json: OutputFile = None,
) -> int:
    """Train the demo's GPT over slow links: fp32 and 4-bit gradients, local updates with AdamW and Muon, and alone.

    Speeds are those of the first seed, whose methods take turns of 8 steps over each link. What is learned does not
    depend on the link, so other seeds train over loopback. A free network would take fp32's steps at the speed of
    training alone. Takes about fifteen minutes on two idle cores.

    Examples:
      python -m experiments bench local --json benchmarks/local/local.json
      python -m experiments bench local --rates 100mbit --methods thinwire powersgd in-optimizer one-bit-adam

    Args:
        rates: of each rank's link, both ways.
        steps: training steps of each way.
        seeds: of the initial weights, the batches and the rounding.
        methods: of `VARIANTS`; fp32 and training alone are always among them.
        json: write the figures to this file.
    """
    console = Console(highlight=False)
    if unknown := set(methods) - set(VARIANTS):
        raise ValueError(f"--methods {' '.join(sorted(unknown))}: it can be {', '.join(VARIANTS)}")
    lab.need_network()
    task = replace(TASK, steps=steps)
    order = (CONTROLS[0], *(name for name in methods if name not in CONTROLS), CONTROLS[1])
    chosen = "" if order == METHODS else f" --rates {' '.join(rates)} --methods {' '.join(order[1:-1])}"
    results = Results(f"python -m experiments bench local{chosen}")
    results.about = {"rates": list(rates), "task": {**asdict(task), "seed": 0}, "every": LOCAL_EVERY, "seeds": seeds}
    others = [_train(console, task, order, seed, None) for seed in range(1, seeds)]
    links: dict[str, dict[str, Run]] = {}
    for rate in rates:
        over_link = order if not links else [name for name in order[1:] if VARIANTS[name].on_link]
        links[rate] = _train(console, task, over_link, 0, rate)
    add_losses(results, [links[rates[0]], *others])
    for rate, runs in links.items():
        add_speeds(results, rate, runs, steps)
    show("local", results, json)
    return 0


def _train(console: Console, task: GPTTask, names: Sequence[str], seed: int, rate: str | None) -> dict[str, Run]:
    """All methods in turns over a link of ``rate``, or loopback: the link does not change what is learned.

    Raises:
        RankFailedError: one of them did not finish.
    """
    variants = {name: VARIANTS[name] for name in names}
    with ExitStack() as stack:
        network = None if rate is None else stack.enter_context(lab.Network(2, rate=rate))
        watcher = stack.enter_context(Turns(console, task.steps))
        runs, failures = train_in_turns(task, variants, seed=seed, num_ranks=2, network=network, watcher=watcher)
    for failure in failures.values():
        raise failure
    return runs


def add_losses(results: Results, learned: Sequence[Mapping[str, Run]]) -> None:
    """Add what each method has learned by seed: held-out loss, and the steps until it has fp32's within `SAME_LOSS`."""
    fp32 = [runs["fp32"].val_loss for runs in learned]
    for name in learned[0]:
        losses = [runs[name].val_loss for runs in learned]
        above = estimate(relative_differences(losses, fp32))
        results.add(f"val_loss/{name}", fmean(losses), "nats/byte", by_seed=losses)
        bounds = {} if len(learned) == 1 else {"lower": above.lower, "upper": above.upper}
        results.add(f"val_loss_above_fp32/{name}", above.mean, "", **bounds)
        taken = [steps_to(runs[name], SAME_LOSS * runs["fp32"].losses[-1]) for runs in learned]
        known = [steps for steps in taken if steps is not None]
        if len(known) == len(taken):
            results.add(f"steps_to_same_loss/{name}", fmean(known), "steps", by_seed=taken)


def steps_to(run: Run, loss: float) -> float | None:
    """Steps until the probe's loss first reaches ``loss``, between probes by a straight line."""
    return reached([0, *run.probe_steps], run.losses, loss)


def add_speeds(results: Results, rate: str, trained: Mapping[str, Run], num_steps: int) -> None:
    """Add the time of a step, the bytes, and the time to fp32's loss over one link."""
    runs = {name: run for name, run in trained.items() if VARIANTS[name].on_link}
    for name, run in runs.items():
        results.add(f"{rate}/step_s/{name}", 1 / run.steps_per_s, "s", step_s=[round(s, 4) for s in run.step_s])
        speed = run.speedup(runs["alone"])
        results.add(f"{rate}/speed_over_alone/{name}", speed.median, "x", lower=speed.lower, upper=speed.upper)
        results.add(f"{rate}/sent_bytes/{name}", run.payload_bytes[-1] / num_steps, "B/step")
    steps = {name: _value(results, f"steps_to_same_loss/{name}") for name in runs}
    times = {name: (taken, 1 / runs[name].steps_per_s) for name, taken in steps.items()}
    times["free"] = (_value(results, "steps_to_same_loss/fp32"), 1 / runs["alone"].steps_per_s)
    for name, (taken, step_s) in times.items():
        if taken is not None:
            results.add(f"{rate}/seconds_to_same_loss/{name}", taken * step_s, "s")


def _value(results: Results, name: str) -> float | None:
    return next((row["value"] for row in results.results if row["name"] == name), None)


PEER, OTHER = "torchft", "hivemind"
COMPRESSORS = {"thinwire, fp32": "raw", "thinwire, 2 bits": FEW_BITS}
"""Ways of thinwire, and the compressor of their exchanges."""


def peers(
    *,
    rates: tuple[str, ...] = ("100mbit", "10mbit"),
    steps: int = 500,
    every: int = 25,
    seeds: int = 3,
    json: OutputFile = None,
) -> int:
    """Train a small GPT with torchft's DiLoCo and with thinwire's on two workers: loss, bytes on the link, seconds.

    Model, batches, inner optimizer (AdamW), outer optimizer and the steps between exchanges are the same. torchft sends
    fp32 over gloo, as on any machine without GPUs. Where hivemind is installed, too, its averager takes the place of
    the all-reduce, in fp32. Methods take turns, in another order with every seed; what is timed and counted begins
    after the first exchange, in which workers connect. Takes about six minutes.

    Examples:
      python -m experiments bench peers --json benchmarks/local/peers.json

    Args:
        rates: of each worker's link, both ways.
        steps: training steps of 4 windows of 64 bytes a worker.
        every: steps from one exchange to the next; a divisor of ``steps``.
        seeds: of the initial weights and the batches.
        json: write the figures to this file.
    """
    console = Console(highlight=False)
    if find_spec(PEER) is None:
        console.print(f"{PEER} is not installed: pip install {PEER}")
        return 1
    methods = (PEER, *COMPRESSORS)
    if find_spec(OTHER) is None:
        console.print(f"{OTHER} is not installed, and left out: pip install {OTHER}")
    else:
        methods = (PEER, OTHER, *COMPRESSORS)
    lab.need_network()
    task = GPTTask(
        model=GPTConfig(width=64, layers=2, context=64), steps=steps, batch=4, learning_rate=4e-3, held_out_windows=2048
    )
    results = Results("python -m experiments bench peers")
    results.about = {"rates": list(rates), "every": every, "seeds": seeds, "task": asdict(task)}
    for rate in rates:
        runs: dict[str, list[dict[str, Any]]] = {method: [] for method in methods}
        for seed in range(seeds):
            for method in methods[seed % len(methods) :] + methods[: seed % len(methods)]:
                runs[method].append(_run(method, task, every, seed, rate))
                console.print(f"{format_rate(parse_rate(rate))}, {method}, seed {seed}: {runs[method][-1]}")
        _add(results, rate, runs)
        show("peers", results, json)
    return 0


def _run(method: str, task: GPTTask, every: int, seed: int, rate: str) -> dict[str, Any]:
    config = {"method": method, "compressor": COMPRESSORS.get(method, "")}
    config |= {"task": asdict(task), "every": every, "seed": seed}
    with lab.Network(2, rate=rate) as network:
        return run_ranks(train, config, 2, network)


def _add(results: Results, rate: str, runs: dict[str, list[dict[str, Any]]]) -> None:
    losses = {method: [run["loss"] for run in runs[method]] for method in runs}
    for method in runs:
        seconds = [run["seconds"] for run in runs[method]]
        of_peer = [one / other["seconds"] for one, other in zip(seconds, runs[PEER], strict=True)]
        results.add(f"{rate}/loss/{method}", fmean(losses[method]), "nats/byte", by_seed=losses[method])
        results.add(f"{rate}/seconds/{method}", median(seconds), "s", by_seed=seconds)
        results.add(f"{rate}/seconds_of_peer/{method}", median(of_peer), "x", by_seed=of_peer)
        results.add(f"{rate}/sent_bytes/{method}", fmean(run["sent_bytes"] for run in runs[method]), "B/step")
        results.add(f"{rate}/replicas_differ/{method}", sum(run["replicas_differ"] for run in runs[method]), "runs")
        above = estimate(relative_differences(losses[method], losses[PEER]))
        bounds = {} if len(seconds) == 1 or method == PEER else {"lower": above.lower, "upper": above.upper}
        results.add(f"{rate}/loss_above_peer/{method}", above.mean, "", **bounds)


# --- on a rank

_LIGHTHOUSE_PORT = 29510
_OUTER = Nesterov()
_TIMEOUT = timedelta(seconds=60)


def train(method: str, compressor: str, task: dict[str, Any], every: int, seed: int) -> dict[str, Any]:
    """Train from ``seed``; held-out loss, and seconds and bytes a step after the first exchange, of this worker."""
    made = GPTTask.from_json(task)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    model = made.build(seed)
    optimizer = made.optimizer(model)
    peer = {"torchft": _torchft, "hivemind": _hivemind}.get(method)
    with peer(model, optimizer, every) if peer else _thinwire(model, optimizer, every, compressor, seed) as step:
        started, sent = 0.0, 0
        for i, batch in enumerate(made.batches(seed, rank, num_ranks)):
            if i == every:
                dist.barrier()
                started, sent = time.perf_counter(), sent_on_interface()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(made.learning_rate, i, made.steps)
            optimizer.zero_grad(set_to_none=True)
            made.loss(model, batch).backward()
            optimizer.step()
            step()
        seconds = time.perf_counter() - started
        sent = sent_on_interface() - sent
    model.eval()
    with torch.no_grad():
        total, count = made.evaluate(model, rank, num_ranks, probe=False)
    both = torch.tensor([total, count], dtype=torch.float64)
    dist.all_reduce(both)
    of_all: list[Any] = [None] * num_ranks
    dist.all_gather_object(of_all, digest(model))
    sent_bytes = sent / (made.steps - every)
    differ = len(set(of_all)) > 1
    return {"loss": float(both[0] / both[1]), "seconds": seconds, "sent_bytes": sent_bytes, "replicas_differ": differ}


@contextmanager
def _thinwire(
    model: nn.Module, optimizer: torch.optim.Optimizer, every: int, compressor: str, seed: int
) -> Iterator[Callable[[], None]]:
    local = DiLoCo(model, optimizer, every=every, outer=_OUTER, compressor=compressor, seed=seed)
    yield local.step
    local.close()


@contextmanager
def _torchft(model: nn.Module, optimizer: torch.optim.Optimizer, every: int) -> Iterator[Callable[[], None]]:
    """torchft's DiLoCo, which counts the optimizer's steps by itself; its lighthouse is on the first worker."""
    from torchft import Manager, ProcessGroupGloo  # pyright: ignore[reportMissingImports]
    from torchft.coordination import LighthouseServer  # pyright: ignore[reportMissingImports]
    from torchft.local_sgd import DiLoCo as TorchftDiLoCo  # pyright: ignore[reportMissingImports]

    rank = dist.get_rank()
    lighthouse = LighthouseServer(bind=f"[::]:{_LIGHTHOUSE_PORT}", min_replicas=2) if rank == 0 else None
    dist.barrier()
    store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]
    manager = Manager(
        pg=ProcessGroupGloo(timeout=_TIMEOUT),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=2,
        use_async_quorum=False,
        init_sync=False,
        timeout=_TIMEOUT,
        quorum_timeout=_TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=address(rank),
        store_port=store.port,
        hostname=address(rank),
        lighthouse_addr=f"http://{os.environ['MASTER_ADDR']}:{_LIGHTHOUSE_PORT}",
    )
    outer = torch.optim.SGD(model.parameters(), lr=_OUTER.lr, momentum=_OUTER.momentum, nesterov=True)
    with TorchftDiLoCo(manager, [model], optimizer, outer, sync_every=every):
        yield lambda: None
    dist.barrier()
    manager.shutdown(wait=False)
    if lighthouse is not None:
        lighthouse.shutdown()


@contextmanager
def _hivemind(model: nn.Module, optimizer: torch.optim.Optimizer, every: int) -> Iterator[Callable[[], None]]:
    """hivemind's averager in fp32, within the same outer optimizer; the second worker finds the first in its table."""
    import hivemind  # pyright: ignore[reportMissingImports]
    from hivemind.averaging import DecentralizedAverager  # pyright: ignore[reportMissingImports]

    # Its table and its averager are processes of their own, which cannot be pickled.
    multiprocessing.current_process().daemon = False
    multiprocessing.set_start_method("fork", force=True)
    place = {"start": True, "host_maddrs": [f"/ip4/{address(dist.get_rank())}/tcp/0"]}
    table = hivemind.DHT(**place) if dist.get_rank() == 0 else None
    known = [None if table is None else [str(maddr) for maddr in table.get_visible_maddrs()]]
    dist.broadcast_object_list(known, 0)
    table = table or hivemind.DHT(initial_peers=known[0], **place)
    parameters = list(model.parameters())
    anchor = nn.utils.parameters_to_vector(parameters).detach().clone()
    momentum, steps = torch.zeros_like(anchor), 0
    averager = DecentralizedAverager([torch.zeros_like(anchor)], table, start=True, prefix="peers", target_group_size=2)

    def step() -> None:
        nonlocal steps
        steps += 1
        if steps % every:
            return
        with torch.no_grad(), averager.get_tensors() as (mean,):
            mean.copy_(anchor - nn.utils.parameters_to_vector(parameters))
        if averager.step(timeout=_TIMEOUT.total_seconds()) is None:
            raise TimeoutError("the workers did not find each other")
        with torch.no_grad(), averager.get_tensors() as (mean,):
            _OUTER.update(anchor, momentum, mean)
            nn.utils.vector_to_parameters(anchor.clone(), parameters)

    yield step
    dist.barrier()
    averager.shutdown()
    table.shutdown()
