"""Replicas under DDP: one model on each rank, its gradients sent by a method, and what is probed of it."""

# No `from __future__ import annotations` here: DDP checks the annotations of a communication hook as objects.

import gc
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from experiments.framework import replay
from experiments.framework.rank import Attached, Rank
from thinwire_tools.compare.tasks import Task
from thinwire_tools.compare.train import digest, gradient_bytes, ring_factor

if TYPE_CHECKING:
    from experiments.framework.methods import Method

_ONE_BUCKET_MB = 1e6


class ScoredTask(Task, Protocol):
    """A task with a learning rate schedule of its own, and right answers to be counted."""

    def rate(self, step: int) -> float:
        """Return the learning rate of ``step`` (from 0)."""
        ...

    def score(self, model: nn.Module, rank: int, num_ranks: int, *, probe: bool) -> tuple[float, int, int]:
        """Return the sum of the loss over this rank's share of the held-out data, the right answers, and all."""
        ...


class Replica(Attached):
    """One model, and the method that sends its gradients. ``measure``: reduce the exact mean as well every so many
    steps, for its error alpha; 0 never does."""

    def __init__(self, task: Any, method: "Method", seed: int, measure: int = 0) -> None:
        super().__init__()
        self.method = method
        self.task = replace(task, bucket_cap_mb=_ONE_BUCKET_MB) if method.one_bucket else task
        self.group, self.model = method.group(), self.task.build(seed)
        if self.group is None:
            self.ddp = self.task.distribute(self.model)
        else:
            options: dict[str, Any] = {"bucket_cap_mb": task.bucket_cap_mb, "broadcast_buffers": False}
            self.ddp = DistributedDataParallel(self.model, process_group=self.group, **options)
        self.optimizer = self.task.optimizer(self.model)
        self.plain: TimedReduction | None = None
        if method.kind in ("all-reduce", "all-gather"):
            self.plain = TimedReduction(self.ddp, gather=method.kind == "all-gather")
        self.wire = method.attach(self.ddp, self.optimizer, seed=seed, measure=measure)
        self._dense_bytes = (
            0.0 if method.kind == "nothing" else gradient_bytes(self.model) * ring_factor(self.num_ranks)
        )
        self._steps = 0

    def step(self, batch: Any) -> float:
        loss = self._backward(batch)
        self.optimizer.step()
        self._steps += 1
        return loss.item()

    def score(self, *, probe: bool = True) -> tuple[float, int, int]:
        return self.task.score(self.model, self.rank, self.num_ranks, probe=probe)

    @property
    def sent_bytes(self) -> float:
        return super().sent_bytes if self.wire else self._steps * self._dense_bytes

    def result(self) -> dict[str, Any]:
        """Return the score over all held-out data, and alpha by step."""
        return {
            "held_out": self.score(probe=False),
            "digests": {} if self.method.kind == "nothing" else {"parameters": digest(self.model.parameters())},
            "alpha": self.wire.stats.alpha if self.wire else [],
        }

    def counters(self) -> dict[str, Any]:
        if self.plain is not None:
            return {"wire_s": self.plain.seconds}
        return super().counters()

    def settled(self) -> dict[str, Any]:
        if self.wire is None:
            return super().settled()
        if self.method.adapt and not self.wire.decisions:
            raise RuntimeError(f"{self.method.title}: {self.method.adapt} has chosen no plan after {self._steps} steps")
        return {"payload_bytes": self.wire.sent_bytes(), "layers": self.layers()}

    def layers(self) -> list[dict[str, Any]]:
        """Return each layer's compressor, bucket and bytes."""
        rows = self.wire.engine.plan_rows() if self.wire else ()
        return [
            {"name": r.name, "bucket": r.bucket, "spec": str(r.compressor), "sent_bytes": r.sent_bytes} for r in rows
        ]

    def errors(self, batches: Iterator[Any]) -> list[float]:
        """Return ``‖received − mean‖ / ‖mean‖`` of gradients at equal weights; ``mean``: by gloo, fp32."""
        errors = []
        for batch in batches:
            with self.ddp.no_sync():
                self._backward(batch)
            mean = self._gradient()
            dist.all_reduce(mean)
            mean /= self.num_ranks
            self._backward(batch)
            errors.append(float((self._gradient() - mean).norm() / mean.norm()))
        return errors

    def close(self) -> None:
        super().close()
        # A group that the Wire or DDP still references cannot be freed.
        del self.ddp, self.optimizer, self.wire
        gc.collect()
        if self.group is not None:
            dist.destroy_process_group(self.group)

    def _backward(self, batch: Any) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.task.loss(self.ddp, batch)
        loss.backward()
        return loss

    def _gradient(self) -> Tensor:
        return torch.cat([p.grad.flatten() for p in self.ddp.parameters() if p.grad is not None])


class TimedReduction:
    """A communication hook's state: plain fp32 by an all-reduce or an all-gather, and the ``seconds`` that took."""

    def __init__(self, ddp: DistributedDataParallel, *, gather: bool) -> None:
        self.seconds, self._gather = 0.0, gather
        ddp.register_comm_hook(self, _reduce_timed)

    def reduce(self, buffer: Tensor) -> Tensor:
        """Replace the buffer by the mean of all ranks' buffers."""
        started, num_ranks = time.perf_counter(), dist.get_world_size()
        if self._gather:
            gathered = [torch.empty_like(buffer) for _ in range(num_ranks)]
            dist.all_gather(gathered, buffer)
        else:
            gathered = [buffer]
            dist.all_reduce(buffer)
        self.seconds += time.perf_counter() - started
        return buffer.copy_(torch.stack(gathered).sum(0).div_(num_ranks))


# No annotations: those that DDP accepts are private names.
def _reduce_timed(state, bucket):
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(state.reduce(bucket.buffer()))
    return future


# --- further functions that ranks call


def record(rank: Rank, task: Any) -> dict[str, Any]:
    """Return the seconds that the first rank computes in a step while all others wait."""
    compute = asdict(replay.record(task)) if rank.rank == 0 else None
    dist.barrier()
    return {"compute": compute}


def errors(rank: Rank, which: int, steps: int) -> dict[str, Any]:
    """Return `Replica.errors` of one of the models that take turns."""
    return {"errors": _replica(rank, which).errors(islice(rank.batches[which], steps))}


def syncs(rank: Rank, which: int, steps: int) -> dict[str, Any]:
    """Return the bytes of the buckets and seconds of communication of ``steps`` further steps but the last, of one of
    the models, and each layer's last compressor and bytes."""
    replica = _replica(rank, which)
    assert replica.wire is not None, "only a Wire times its buckets"
    rank.clock.start()
    rank.take(which, steps)
    # The last step's is noted when the next one begins, the first one's was that of the warm-up.
    timed = list(replica.wire.engine.syncs)[1 - steps :]
    return {"syncs": [(tuple(sync.bucket_bytes), sync.seconds) for sync in timed], "layers": replica.layers()}


def _replica(rank: Rank, which: int) -> Replica:
    chosen = rank.timed[which]
    assert isinstance(chosen, Replica)
    return chosen
