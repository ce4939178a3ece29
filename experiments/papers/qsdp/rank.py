"""One rank of the thesis's chapter 5: trains a GPT under FSDP2 on command, and holds several that take turns.

Commands: ``setup`` (first), ``train`` (one method from one seed), ``enter`` (build models, attach methods, warm up),
``turn`` (some steps of one of them), ``leave``. The conversation is that of the demo's ranks.
"""

# No `from __future__ import annotations` here: methods are made of plain values.

import gc
import time
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from experiments.papers.qsdp.methods import Method
from experiments.papers.qsdp.sharding import Batch, backward, shard
from thinwire_tools.compare.gpt import GPT
from thinwire_tools.compare.rank_program import Channel, join, run_rank
from thinwire_tools.compare.tasks import GPTTask, probe_steps, restore
from thinwire_tools.compare.train import learning_rate

_BATCHES, _WARM_UP_STEPS = 4, 3
_STAGES = ("encode_s", "wire_s", "reduce_s", "decode_s")


class TimedModel:
    """One model and the method that sends its weights and gradients."""

    def __init__(self, task: GPTTask, method: Method, mesh: Any, batches: Iterator[Batch], num_micro: int) -> None:
        self._task, self._num_micro, self._batches = task, num_micro, batches
        self._model = shard(task, mesh, 0, half=method.half, keeps=method.keeps)
        self.wire = method.attach(self._model)
        self._optimizer = task.optimizer(self._model)
        self.train(_WARM_UP_STEPS)

    def train(self, steps: int) -> None:
        for batch in islice(self._batches, steps):
            self._optimizer.zero_grad(set_to_none=True)
            backward(self._task, self._model, batch, self._num_micro)
            self._optimizer.step()

    def counters(self) -> dict[str, float]:
        """What its Wire has counted until now; nothing where there is none."""
        return self.wire.stats.to_dict() if self.wire else {}

    def formula_bytes(self) -> float | None:
        """That this rank hands to the network in a step of several micro-batches, where there is a formula."""
        if self.wire is None:
            return None
        return (self._num_micro + 1) * self.wire.sent_bytes("weights") + self.wire.sent_bytes()


class Rank:
    """What stays alive over all trainings and timings: the process group."""

    def __init__(self, setup: dict[str, Any], channel: Channel) -> None:
        self.channel = channel
        self.rank, self.num_ranks = join(setup)
        self.mesh = init_device_mesh("cpu", (self.num_ranks,))
        self.timed: list[TimedModel] = []

    def train(self, task: GPTTask, method: Method, seed: int, num_micro: int) -> dict[str, Any]:
        """Train from ``seed``; seconds of every step without the evaluations between them, this rank's sums of the
        held-out loss with their numbers of tokens (of the probe along the method; of all at the end, through weights as
        they are gathered, and as the optimizer keeps them), seconds of learning levels, bytes that this rank sent in
        every step, and what each layer is sent by in the end."""
        model = shard(task, self.mesh, seed, half=method.half, keeps=method.keeps)
        wire = method.attach(model, seed)
        optimizer = task.optimizer(model)
        torch.manual_seed(seed * self.num_ranks + self.rank)
        probes, step_s, step_bytes = [self._evaluate(task, model, probe=True)], [], []
        batches = task.batches(seed, self.rank, self.num_ranks)
        for until in probe_steps(task):
            self.channel.hold("train")
            for batch in islice(batches, until - len(step_s)):
                before = wire.stats.payload_sent_bytes if wire else 0
                step, started = len(step_s), time.perf_counter()
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(task.learning_rate, step, task.steps)
                optimizer.zero_grad(set_to_none=True)
                loss = backward(task, model, batch, num_micro)
                optimizer.step()
                step_s.append(time.perf_counter() - started)
                step_bytes.append(wire.stats.payload_sent_bytes - before if wire else 0)
                self.channel.send("step", step=step + 1, loss=loss)
            self.channel.hold("trained")
            probes.append(self._evaluate(task, model, probe=True))
        result = {
            "step_s": step_s,
            "probes": probes,
            "held_out": self._evaluate(task, model, probe=False),
            "master": self._evaluate(task, _whole(task, model), probe=False),
            "learn_s": wire.stats.learn_s if wire else 0.0,
            "step_bytes": step_bytes if wire else [],
            "plan": {name: str(compressor) for name, compressor in wire.plan.layers.items()} if wire else {},
        }
        if wire:
            wire.detach()
        del model, optimizer, wire
        gc.collect()
        return result

    def enter(self, task: GPTTask, methods: Sequence[dict[str, Any]], num_micro: int) -> dict[str, Any]:
        """Build a model for each of ``methods`` and train it for a few steps; bytes that each hands to the network in a
        step, by formula, where there is one."""
        for method in methods:
            batches = cycle(list(islice(task.batches(0, self.rank, self.num_ranks), _BATCHES)))
            self.timed.append(TimedModel(task, Method(**method), self.mesh, batches, num_micro))
        return {"payload_bytes": [c.formula_bytes() for c in self.timed], "layers": [[] for _ in methods]}

    def turn(self, which: int, steps: int) -> dict[str, Any]:
        """Train ``steps`` steps; the mean seconds of one, those in each stage of communication, and what else was
        counted in all of them."""
        timed = self.timed[which]
        before = timed.counters()
        self.channel.hold("turn")
        started = time.perf_counter()
        timed.train(steps)
        seconds = (time.perf_counter() - started) / steps
        self.channel.hold("turned")
        counted = {name: value - before[name] for name, value in timed.counters().items()}
        stages = {name: counted[name] / steps for name in _STAGES if name in counted}
        return {"seconds": seconds, "stages": stages, "counted": counted, "formula_bytes": timed.formula_bytes()}

    def leave(self) -> dict[str, Any]:
        for timed in self.timed:
            if timed.wire is not None:
                timed.wire.detach()
        self.timed.clear()
        gc.collect()
        return {}

    @torch.no_grad()
    def _evaluate(self, task: GPTTask, model: GPT, *, probe: bool) -> tuple[float, int]:
        return task.evaluate(model, self.rank, self.num_ranks, probe=probe)


def _whole(task: GPTTask, model: GPT) -> GPT:
    """The model with all its weights, as the optimizer keeps them."""
    whole = task.build(0)
    shards = {name: value for name, value in model.state_dict().items() if isinstance(value, DTensor)}
    whole.load_state_dict({name: shard.full_tensor() for name, shard in shards.items()})
    return whole


def _serve(channel: Channel) -> None:
    rank = Rank(channel.receive(), channel)
    channel.send("done")
    while True:
        command = channel.receive()
        match command["do"]:
            case "train":
                task: Any = restore(command["task"])
                numbers = int(command["seed"]), int(command["num_micro"])
                answer = rank.train(task, Method(**command["method"]), *numbers)
            case "enter":
                task = restore(command["task"])
                answer = rank.enter(task, command["methods"], int(command["num_micro"]))
            case "turn":
                answer = rank.turn(int(command["which"]), int(command["steps"]))
            case _:
                answer = rank.leave()
        channel.send("done", **answer)


def main() -> None:
    run_rank(_serve)
