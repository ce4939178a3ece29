"""One rank of the experiments: trains a task from a seed, holds models of which each takes its turn to be timed, and
probes gradients.

Commands: ``setup`` (first), ``train`` (one method from one seed); ``pin`` (keep to a core), ``record`` (the computation
of a step), ``enter`` (build models, which compute or replay a recorded step, attach methods, warm up), ``turn`` (some
steps of one of them), ``leave``; ``errors`` (of what arrives of some gradients), ``syncs`` (times of buckets while a
policy tries plans) and ``gradients`` (this rank's own, along a training). The conversation is that of the demo's ranks.
"""

# No `from __future__ import annotations` here: DDP checks the annotations of a communication hook as objects.

import gc
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from experiments.framework.methods import Method, TimedReduction
from experiments.framework.replay import Clock, Compute, ReplayedTask, gradients_along, pin, record
from experiments.tasks.resnet import ImageTask
from thinwire_tools.compare.rank_program import Channel, join, run_rank
from thinwire_tools.compare.tasks import GPTTask, Task, probe_steps, restore
from thinwire_tools.compare.train import digest, gradient_bytes, ring_factor

_BATCHES = 4
_ONE_BUCKET_MB = 1e6
_STAGES = ("encode_s", "wire_s", "reduce_s", "decode_s")


class ScoredTask(Task, Protocol):
    """A task with a learning rate schedule of its own, and right answers to be counted."""

    def rate(self, step: int) -> float:
        """Learning rate of ``step`` (from 0)."""
        ...

    def score(self, model: nn.Module, rank: int, num_ranks: int, *, probe: bool) -> tuple[float, int, int]:
        """Sum of the loss over this rank's share of the held-out data, how many answers are right, and of how many."""
        ...


class TimedModel:
    """One model, and the method that sends its gradients."""

    def __init__(self, task: GPTTask | ImageTask | Any, method: Method, batches: Iterator[Any]) -> None:
        self.task = replace(task, bucket_cap_mb=_ONE_BUCKET_MB) if method.one_bucket else task
        self.group = method.group()
        model = self.task.build(0)
        if self.group is None:
            self.ddp = self.task.distribute(model)
        else:
            self.ddp = DistributedDataParallel(
                model, process_group=self.group, bucket_cap_mb=task.bucket_cap_mb, broadcast_buffers=False
            )
        self.optimizer = self.task.optimizer(self.ddp.module)
        self.plain: TimedReduction | None = None
        if method.kind in ("all-reduce", "all-gather"):
            self.plain = TimedReduction(self.ddp, gather=method.kind == "all-gather")
        self.wire = method.attach(self.ddp, self.optimizer)
        self.batches = batches
        self.train(method.warm_up_steps)
        if method.adapt and self.wire is not None and not self.wire.decisions:
            raise RuntimeError(f"{method.title}: {method.adapt} has chosen no plan after {method.warm_up_steps} steps")

    def train(self, steps: int) -> None:
        for batch in islice(self.batches, steps):
            self._backward(batch)
            self.optimizer.step()

    def stages(self) -> dict[str, float]:
        """Seconds in each stage of communication until now."""
        if self.plain is not None:
            return {"wire_s": self.plain.seconds}
        stats = self.wire.stats.to_dict() if self.wire else {}
        return {stage: stats[stage] for stage in _STAGES if stage in stats}

    def layers(self) -> list[dict[str, Any]]:
        """What each layer has, which bucket it is in, and what it sends; nothing where there is no Wire."""
        rows = self.wire.engine.plan_rows() if self.wire else ()
        return [
            {"name": r.name, "bucket": r.bucket, "spec": str(r.compressor), "sent_bytes": r.sent_bytes} for r in rows
        ]

    def syncs(self, steps: int) -> list[tuple[tuple[int, ...], float]]:
        """Bytes of the buckets and seconds of communication of ``steps`` further steps but the last."""
        assert self.wire is not None, "only a Wire times its buckets"
        self.train(steps)
        # The last step's is noted when the next one begins, the first one's was that of the warm-up.
        return [(tuple(sync.bucket_bytes), sync.seconds) for sync in list(self.wire.engine.syncs)[1 - steps :]]

    def errors(self, steps: int) -> list[float]:
        """``‖arrived − mean‖ / ‖mean‖`` of ``steps`` gradients at the same weights; ``mean`` is gloo's, in fp32."""
        errors = []
        for batch in islice(self.batches, steps):
            with self.ddp.no_sync():
                self._backward(batch)
            mean = self._gradient()
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
            self._backward(batch)
            errors.append(float((self._gradient() - mean).norm() / mean.norm()))
        return errors

    def _backward(self, batch: Any) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.task.loss(self.ddp, batch).backward()

    def _gradient(self) -> Tensor:
        return torch.cat([p.grad.flatten() for p in self.ddp.parameters() if p.grad is not None])


class Rank:
    """What stays alive over all commands: the process group, and the models that are timed."""

    def __init__(self, setup: dict[str, Any], channel: Channel) -> None:
        self.channel = channel
        self.rank, self.num_ranks = join(setup)
        self.timed: list[TimedModel] = []
        self.slowdown, self.clock = 1, Clock(1)

    def record(self, task_described: dict[str, Any]) -> dict[str, Any]:
        """Seconds that the first rank computes in a step while all others wait."""
        compute = asdict(record(restore(task_described))) if self.rank == 0 else None
        dist.barrier()
        return {"compute": compute}

    def enter(
        self, task_described: dict[str, Any], methods: Sequence[dict[str, Any]], compute: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Build a model for each of ``methods`` and train it for a few steps; bytes that each hands to the network.

        ``compute``: what `record` found, to be replayed instead of computing.
        """
        task: Any = restore(task_described)
        parsed = [Method.from_dict(method) for method in methods]
        # A policy's first plan is made of gradients that differ.
        count = max([_BATCHES, *(method.warm_up_steps for method in parsed if method.adapt)])
        batches = list(islice(task.batches(0, self.rank, self.num_ranks), count))
        if compute is not None:
            self.clock = Clock(self.slowdown)
            batches = gradients_along(task, batches)
            task = ReplayedTask(task, Compute.from_json(compute), self.clock, task.bucket_cap_mb)
        for method in parsed:
            self.timed.append(TimedModel(task, method, cycle(batches)))
        return {
            "payload_bytes": [c.wire.sent_bytes() if c.wire else None for c in self.timed],
            "layers": [c.layers() for c in self.timed],
        }

    def turn(self, which: int, steps: int) -> dict[str, Any]:
        """Train ``steps`` steps; the mean seconds of one, those in each stage of communication, and the processor's."""
        timed, count = self.timed[which], steps * self.slowdown
        before = timed.stages()
        self.channel.hold("turn")
        self.clock.start()
        started, cpu = time.perf_counter(), time.process_time()
        timed.train(steps)
        seconds, cpu_s = (time.perf_counter() - started) / count, (time.process_time() - cpu) / steps
        stages = {key: (value - before[key]) / count for key, value in timed.stages().items()}
        return {"seconds": seconds, "stages": stages, "cpu_s": cpu_s}

    def leave(self) -> dict[str, Any]:
        for timed in self.timed:
            if timed.wire is not None:
                timed.wire.detach()
        groups = [timed.group for timed in self.timed if timed.group is not None]
        self.timed.clear()
        gc.collect()
        for group in groups:
            dist.destroy_process_group(group)
        return {}

    def train(self, task: ScoredTask, method: Method, seed: int, measure: int) -> dict[str, Any]:
        """Train ``task`` from ``seed`` with gradients sent by ``method``.

        ``measure``: reduce the exact mean as well every so many steps, for its error alpha; 0 never does. ``scores``
        are this rank's sums of loss, right answers and items at each probe, ``held_out`` those over the whole held-out
        set.
        """
        model = task.build(seed)
        ddp = task.distribute(model)
        optimizer = task.optimizer(model)
        wire = method.attach(ddp, optimizer, seed=seed, measure=measure)
        dense_bytes = 0.0 if method.kind == "nothing" else gradient_bytes(model) * ring_factor(self.num_ranks)
        steps = self._steps(task, ddp, optimizer, seed)
        scores, payload_bytes, step_s, losses = [self._score(task, model, probe=True)], [0.0], [], []
        for until in probe_steps(task):
            self.channel.hold("train")
            for seconds, loss in islice(steps, until - len(step_s)):
                step_s.append(seconds)
                losses.append(loss)
            self.channel.hold("trained")
            payload_bytes.append(wire.stats.payload_sent_bytes if wire else dense_bytes * until)
            scores.append(self._score(task, model, probe=True))
        result = {
            "step_s": step_s,
            "losses": losses,
            "scores": scores,
            "payload_bytes": payload_bytes,
            "held_out": self._score(task, model, probe=False),
            "digest": digest(model),
            "alpha": wire.stats.alpha if wire else [],
        }
        if wire:
            wire.detach()
        del ddp, wire, optimizer, steps
        gc.collect()
        return result

    def gradients(self, task: ScoredTask, seed: int, at: Collection[int], path: Path) -> dict[str, Any]:
        """Train uncompressed and write this rank's own gradients at the steps ``at`` to ``path``: fp32 ``[steps,
        parameters]``, layer after layer."""
        model = task.build(seed)
        recorded: list[Tensor] = []
        for _ in self._steps(task, task.distribute(model), task.optimizer(model), seed, record=(at, recorded)):
            pass
        np.save(path, torch.stack(recorded).numpy(), allow_pickle=False)
        return {}

    def _steps(
        self,
        task: ScoredTask,
        ddp: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        seed: int,
        record: tuple[Collection[int], list[Tensor]] | None = None,
    ) -> Iterator[tuple[float, float]]:
        """Train step by step; yields seconds and loss of each. ``record``: at which steps to append this rank's own
        gradient to which list."""
        parameters = list(ddp.module.parameters())
        # What a model draws while it trains (dropout) is the same for every method.
        torch.manual_seed(seed * self.num_ranks + self.rank)
        for step, batch in enumerate(task.batches(seed, self.rank, self.num_ranks)):
            if record and step in record[0]:
                own = torch.autograd.grad(task.loss(ddp.module, batch), parameters)
                record[1].append(torch.cat([gradient.flatten() for gradient in own]))
            started = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = task.rate(step)
            optimizer.zero_grad(set_to_none=True)
            loss = task.loss(ddp, batch)
            loss.backward()
            optimizer.step()
            seconds = time.perf_counter() - started
            self.channel.send("step", step=step + 1, loss=loss.item())
            yield seconds, loss.item()

    def _score(self, task: ScoredTask, model: nn.Module, *, probe: bool) -> tuple[float, int, int]:
        return task.score(model, self.rank, self.num_ranks, probe=probe)


def restore_scored(described: dict[str, Any]) -> ScoredTask:
    """The task of which `thinwire_tools.compare.tasks.describe` made ``described``."""
    task: Any = restore(described)
    return task


def _serve(channel: Channel) -> None:
    rank = Rank(channel.receive(), channel)
    channel.send("done")
    while True:
        command = channel.receive()
        match command["do"]:
            case "enter":
                answer = rank.enter(command["task"], command["methods"], command.get("compute"))
            case "pin":
                pin(int(command["cores"][rank.rank % len(command["cores"])]))
                rank.slowdown = int(command["slowdown"])
                answer = {}
            case "record":
                answer = rank.record(command["task"])
            case "train":
                method = Method.from_dict(command["method"])
                answer = rank.train(
                    restore_scored(command["task"]), method, int(command["seed"]), int(command["measure"])
                )
            case "gradients":
                path = Path(command["folder"]) / f"gradients-{rank.rank}.npy"
                answer = rank.gradients(restore_scored(command["task"]), int(command["seed"]), command["at"], path)
            case "turn":
                answer = rank.turn(int(command["which"]), int(command["steps"]))
            case "errors":
                answer = {"errors": rank.timed[int(command["which"])].errors(int(command["steps"]))}
            case "syncs":
                chosen = rank.timed[int(command["which"])]
                rank.clock.start()
                answer = {"syncs": chosen.syncs(int(command["steps"])), "layers": chosen.layers()}
            case _:
                answer = rank.leave()
        channel.send("done", **answer)


def main() -> None:
    run_rank(_serve)
