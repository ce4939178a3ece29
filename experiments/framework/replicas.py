"""Replicas under DDP in rank processes: trained from a seed, timed in turns, and their gradients probed."""

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

from experiments.framework import replay
from experiments.framework.methods import Method, TimedReduction
from experiments.framework.rank import Rank, Timed
from experiments.framework.replay import Clock, Compute, ReplayedTask, gradients_along
from experiments.tasks.images import ImageTask
from thinwire_tools.compare.tasks import GPTTask, Task, probe_steps
from thinwire_tools.compare.train import digest, gradient_bytes, ring_factor

_BATCHES = 4
_ONE_BUCKET_MB = 1e6


class ScoredTask(Task, Protocol):
    """A task with a learning rate schedule of its own, and right answers to be counted."""

    def rate(self, step: int) -> float:
        """Return the learning rate of ``step`` (from 0)."""
        ...

    def score(self, model: nn.Module, rank: int, num_ranks: int, *, probe: bool) -> tuple[float, int, int]:
        """Return the sum of the loss over this rank's share of the held-out data, the right answers, and all."""
        ...


class Replica(Timed):
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

    def counters(self) -> dict[str, Any]:
        if self.plain is not None:
            return {"wire_s": self.plain.seconds}
        return self.wire.stats.to_dict() if self.wire else {}

    def payload_bytes(self) -> float | None:
        return self.wire.sent_bytes() if self.wire else None

    def layers(self) -> list[dict[str, Any]]:
        rows = self.wire.engine.plan_rows() if self.wire else ()
        return [
            {"name": r.name, "bucket": r.bucket, "spec": str(r.compressor), "sent_bytes": r.sent_bytes} for r in rows
        ]

    def syncs(self, steps: int) -> list[tuple[tuple[int, ...], float]]:
        """Return the bytes of the buckets and seconds of communication of ``steps`` further steps but the last."""
        assert self.wire is not None, "only a Wire times its buckets"
        self.train(steps)
        # The last step's is noted when the next one begins, the first one's was that of the warm-up.
        return [(tuple(sync.bucket_bytes), sync.seconds) for sync in list(self.wire.engine.syncs)[1 - steps :]]

    def errors(self, steps: int) -> list[float]:
        """Return ``‖received − mean‖ / ‖mean‖`` of ``steps`` gradients at equal weights; ``mean``: by gloo, fp32."""
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

    def close(self) -> None:
        if self.wire is not None:
            self.wire.detach()
        # A group that the Wire or DDP still references cannot be freed.
        del self.ddp, self.optimizer, self.wire
        gc.collect()
        if self.group is not None:
            dist.destroy_process_group(self.group)

    def _backward(self, batch: Any) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.task.loss(self.ddp, batch).backward()

    def _gradient(self) -> Tensor:
        return torch.cat([p.grad.flatten() for p in self.ddp.parameters() if p.grad is not None])


def record(rank: Rank, task: Any) -> dict[str, Any]:
    """Return the seconds that the first rank computes in a step while all others wait."""
    compute = asdict(replay.record(task)) if rank.rank == 0 else None
    dist.barrier()
    return {"compute": compute}


def enter(rank: Rank, task: Any, methods: Sequence[Method], compute: Compute | None = None) -> dict[str, Any]:
    """Build a model for each of ``methods`` and train it for a few steps; return the bytes that each sends.

    ``compute``: the result of `record`, to be replayed instead of computing.
    """
    # A policy's first plan needs gradients that differ.
    count = max([_BATCHES, *(method.warm_up_steps for method in methods if method.adapt)])
    batches = list(islice(task.batches(0, rank.rank, rank.num_ranks), count))
    if compute is not None:
        rank.clock = Clock(rank.slowdown)
        batches = gradients_along(task, batches)
        task = ReplayedTask(task, compute, rank.clock, task.bucket_cap_mb)
    return rank.entered([Replica(task, method, cycle(batches)) for method in methods])


def errors(rank: Rank, which: int, steps: int) -> dict[str, Any]:
    """Return `Replica.errors` of one of the models that take turns."""
    return {"errors": _replica(rank, which).errors(steps)}


def syncs(rank: Rank, which: int, steps: int) -> dict[str, Any]:
    """Return `Replica.syncs` of one of the models, and each layer's last compressor and bytes."""
    rank.clock.start()
    return {"syncs": _replica(rank, which).syncs(steps), "layers": rank.timed[which].layers()}


def _replica(rank: Rank, which: int) -> Replica:
    chosen = rank.timed[which]
    assert isinstance(chosen, Replica)
    return chosen


def train(rank: Rank, task: ScoredTask, method: Method, seed: int, measure: int) -> dict[str, Any]:
    """Train ``task`` from ``seed`` with gradients sent by ``method``.

    ``measure``: reduce the exact mean as well every so many steps, for its error alpha; 0 never does. ``scores``
    are this rank's sums of loss, right answers and items at each probe, ``held_out`` those over the whole held-out
    set.
    """
    model = task.build(seed)
    ddp = task.distribute(model)
    optimizer = task.optimizer(model)
    wire = method.attach(ddp, optimizer, seed=seed, measure=measure)
    dense_bytes = 0.0 if method.kind == "nothing" else gradient_bytes(model) * ring_factor(rank.num_ranks)
    steps = _steps(rank, task, ddp, optimizer, seed)
    scores, payload_bytes, step_s, losses = [_score(rank, task, model, probe=True)], [0.0], [], []
    for until in probe_steps(task):
        rank.channel.hold("train")
        for seconds, loss in islice(steps, until - len(step_s)):
            step_s.append(seconds)
            losses.append(loss)
        rank.channel.hold("trained")
        payload_bytes.append(wire.stats.payload_sent_bytes if wire else dense_bytes * until)
        scores.append(_score(rank, task, model, probe=True))
    result = {
        "step_s": step_s,
        "losses": losses,
        "scores": scores,
        "payload_bytes": payload_bytes,
        "held_out": _score(rank, task, model, probe=False),
        "digest": digest(model),
        "alpha": wire.stats.alpha if wire else [],
    }
    if wire:
        wire.detach()
    del ddp, wire, optimizer, steps
    gc.collect()
    return result


def gradients(rank: Rank, task: ScoredTask, seed: int, at: Collection[int], folder: Path) -> dict[str, Any]:
    """Train uncompressed and write this rank's own gradients at the steps ``at`` to ``folder``: fp32 ``[steps,
    parameters]``, layer after layer."""
    model = task.build(seed)
    recorded: list[Tensor] = []
    for _ in _steps(rank, task, task.distribute(model), task.optimizer(model), seed, record=(at, recorded)):
        pass
    np.save(folder / f"gradients-{rank.rank}.npy", torch.stack(recorded).numpy(), allow_pickle=False)
    return {}


def _steps(
    rank: Rank,
    task: ScoredTask,
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    seed: int,
    record: tuple[Collection[int], list[Tensor]] | None = None,
) -> Iterator[tuple[float, float]]:
    """Train step by step; yield seconds and loss of each. ``record``: the steps at which this rank's own gradient is
    appended, and the list."""
    parameters = list(ddp.module.parameters())
    # Random draws of training (dropout) are the same for every method.
    torch.manual_seed(seed * rank.num_ranks + rank.rank)
    for step, batch in enumerate(task.batches(seed, rank.rank, rank.num_ranks)):
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
        rank.channel.send("step", step=step + 1, loss=loss.item())
        yield seconds, loss.item()


def _score(rank: Rank, task: ScoredTask, model: nn.Module, *, probe: bool) -> tuple[float, int, int]:
    return task.score(model, rank.rank, rank.num_ranks, probe=probe)
