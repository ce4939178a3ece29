"""One rank of a comparison: reads commands as JSON lines on standard input, answers with JSON lines on standard output.

Commands: ``setup`` (first) and ``run`` (train one variant from one seed). The conversation is that of the demo's ranks:
whenever a rank answers ``hold`` it waits for a ``go``, and when standard input ends, so does the rank.
"""

# No `from __future__ import annotations` here: DDP checks the annotations of a communication hook as objects.

import gc
import hashlib
import math
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.repro.demo_rank import Channel, join, run_rank
from thinwire.repro.tasks import Task, restore
from thinwire.repro.train import gradient_bytes, ring_factor

_WARM_UP_SHARE = 0.1


def probe_steps(task: Task) -> list[int]:
    """Steps after which the held-out probe is evaluated; the last step is one of them."""
    return sorted({*range(task.probe_every, task.steps, task.probe_every), task.steps})


def learning_rate(highest: float, step: int, steps: int) -> float:
    """Learning rate of ``step`` (from 0): a linear warm-up over the first tenth, then a cosine that ends at zero."""
    warm_up = math.ceil(steps * _WARM_UP_SHARE)
    if step < warm_up:
        return highest * (step + 1) / warm_up
    return highest * 0.5 * (1 + math.cos(math.pi * (step - warm_up + 1) / (steps - warm_up + 1)))


class Rank:
    """What stays alive over all runs: the process group and the task."""

    def __init__(self, setup: dict[str, Any], channel: Channel) -> None:
        self.channel = channel
        self.task = restore(setup["task"])
        self.rank, self.num_ranks = join(setup)

    def run(self, rules: str | None, seed: int, highest: float, measure: int = 0) -> dict[str, Any]:
        """Train from ``seed`` with gradients compressed by ``rules`` (None: plain DDP).

        ``step_s`` has the seconds of every step, without the evaluations between them; ``payload_bytes`` those sent
        until each probe, without those of ``measure``, which takes the exact mean every so many steps; ``probes`` and
        ``held_out`` are this rank's sums of the loss with their numbers of terms.
        """
        model = self.task.build(seed)
        ddp = self.task.distribute(model)
        wire = thinwire.compress(ddp, rules, seed=seed, decline=False, measure=measure) if rules is not None else None
        if wire and wire.plan.all_raw:
            measure = 0
        dense_bytes = gradient_bytes(model) * ring_factor(self.num_ranks)
        # What a model draws while it trains (dropout) is the same for every variant, too.
        torch.manual_seed(seed * self.num_ranks + self.rank)
        steps = self._train(ddp, seed, highest)
        probes, payload_bytes, step_s = [self._evaluate(model, probe=True)], [0.0], []
        for until in probe_steps(self.task):
            self.channel.hold("train")
            step_s += list(islice(steps, until - len(step_s)))
            self.channel.hold("trained")
            exact_bytes = dense_bytes * math.ceil(until / measure) if measure else 0.0
            payload_bytes.append(wire.stats.payload_sent_bytes - exact_bytes if wire else dense_bytes * until)
            probes.append(self._evaluate(model, probe=True))
        result = {
            "alpha": wire.stats.alpha if wire else [],
            "step_s": step_s,
            "probes": probes,
            "payload_bytes": payload_bytes,
            "formula_bytes": wire.wire_bytes_per_step() if wire and not wire.plan.all_raw else dense_bytes,
            "held_out": self._evaluate(model, probe=False),
            "digest": digest(model),
        }
        if wire:
            wire.detach()
        del ddp, wire, steps
        gc.collect()
        return result

    def _train(self, ddp: DistributedDataParallel, seed: int, highest: float) -> Iterator[float]:
        """Train step by step; yields the seconds of each."""
        optimizer = self.task.optimizer(ddp.module)
        for step, batch in enumerate(self.task.batches(seed, self.rank, self.num_ranks)):
            started = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(highest, step, self.task.steps)
            optimizer.zero_grad(set_to_none=True)
            loss = self.task.loss(ddp, batch)
            loss.backward()
            optimizer.step()
            seconds = time.perf_counter() - started
            self.channel.send("step", step=step + 1, loss=loss.item(), seconds=seconds)
            yield seconds

    @torch.no_grad()
    def _evaluate(self, model: nn.Module, *, probe: bool) -> tuple[float, int]:
        model.eval()
        found = self.task.evaluate(model, self.rank, self.num_ranks, probe=probe)
        model.train()
        return found


def digest(model: nn.Module) -> str:
    """Hash of all parameters' bytes: equal on two ranks exactly where their replicas are."""
    state = hashlib.sha256()
    for parameter in model.parameters():
        state.update(parameter.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def _serve(channel: Channel) -> None:
    rank = Rank(channel.receive(), channel)
    channel.send("done")
    while True:
        command = channel.receive()
        asked = command["rules"], int(command["seed"]), float(command["learning_rate"]), int(command["measure"])
        channel.send("done", **rank.run(*asked))


if __name__ == "__main__":
    run_rank(_serve)
