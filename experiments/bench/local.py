"""``python -m experiments bench local``: local updates over slow links, beside a network that costs nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from statistics import fmean

from rich.console import Console

from experiments.framework.pages import show
from thinwire_tools import lab
from thinwire_tools.compare.comparison import Run
from thinwire_tools.compare.demo import MARGIN, TASK, Turns
from thinwire_tools.compare.paired import train_in_turns
from thinwire_tools.compare.statistics import estimate, reached, relative_differences
from thinwire_tools.compare.tasks import GPTTask
from thinwire_tools.compare.variants import (
    LOCAL_EVERY,
    POWERSGD_RANK,
    VARIANTS as OF_THE_DEMO,
    Variant,
    local_updates,
    low_rank,
)
from thinwire_tools.results import OutputFile, Results

VARIANTS = {
    **OF_THE_DEMO,
    "low-rank-bf16": low_rank(f"thinwire rank {POWERSGD_RANK}, bf16", "bf16"),
    "one-bit-adam": Variant("onebit(bucket=layer)", title="1-bit Adam", optimizer="one-bit-adam"),
    "quantized-adam": Variant("minmax(bits=4, bucket=128)", title="QuantizedAdam, 4 bits", optimizer="one-bit-adam"),
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
      python -m experiments bench local --rates 100mbit --methods thinwire bf16 powersgd in-optimizer quantized-adam

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
    task = replace(TASK, steps=steps, held_out_windows=512, probe_windows=64)
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
