"""One rank of the thesis's timings: holds a model for every way of sending gradients and trains each when told to.

Commands: ``setup`` (first), ``enter`` (build models, attach ways, warm up), ``turn`` (some steps of one of them),
``errors`` (of what arrives of some gradients), ``syncs`` (times of buckets while a policy tries plans), ``leave``. The
conversation is that of the demo's ranks.
"""

# No `from __future__ import annotations` here: DDP checks the annotations of a communication hook as objects.

import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from thinwire.repro.cgx.ways import Way
from thinwire.repro.demo_rank import Channel, join, run_rank
from thinwire.repro.fft.task import ImageTask
from thinwire.repro.tasks import GPTTask, restore

_BATCHES = 4
_ONE_BUCKET_MB = 1e6
_STAGES = ("encode_s", "wire_s", "reduce_s", "decode_s")


class Contestant:
    """One model and the way its gradients travel."""

    def __init__(self, task: GPTTask | ImageTask, way: Way, batches: Iterator[Any]) -> None:
        self.task = replace(task, bucket_cap_mb=_ONE_BUCKET_MB) if way.one_bucket else task
        self.group = way.group()
        model = self.task.build(0)
        if self.group is None:
            self.ddp = self.task.distribute(model)
        else:
            self.ddp = DistributedDataParallel(
                model, process_group=self.group, bucket_cap_mb=task.bucket_cap_mb, broadcast_buffers=False
            )
        self.optimizer = self.task.optimizer(self.ddp.module)
        self.wire = way.attach(self.ddp, self.optimizer)
        self.batches = batches
        self.train(way.warm_up_steps)
        if way.adapt and self.wire is not None and not self.wire.decisions:
            raise RuntimeError(f"{way.title}: {way.adapt} has chosen no plan after {way.warm_up_steps} steps")

    def train(self, steps: int) -> None:
        for batch in islice(self.batches, steps):
            self._backward(batch)
            self.optimizer.step()

    def stages(self) -> dict[str, float]:
        """Seconds in each stage of communication until now."""
        stats = self.wire.stats.to_dict() if self.wire else {}
        return {stage: stats[stage] for stage in _STAGES if stage in stats}

    def layers(self) -> list[dict[str, Any]]:
        """What each layer has, which bucket it is in, and what it sends; nothing where there is no Wire."""
        rows = self.wire.plan_record().rows if self.wire else ()
        return [{"name": r.name, "bucket": r.bucket, "spec": r.compressor, "sent_bytes": r.sent_bytes} for r in rows]

    def syncs(self, steps: int) -> list[tuple[tuple[int, ...], float]]:
        """Bytes of the buckets and seconds of communication of ``steps`` further steps but the last."""
        assert self.wire is not None, "only a Wire times its buckets"
        self.train(steps)
        # The last step's is noted when the next one begins, the first one's was that of the warm-up.
        return [(tuple(sync.bucket_bytes), sync.seconds) for sync in list(self.wire.syncs)[1 - steps :]]

    def errors(self, steps: int) -> list[float]:
        """``‖arrived − mean‖ / ‖mean‖`` of ``steps`` gradients at the same weights; ``mean`` is gloo's, in fp32."""
        found = []
        for batch in islice(self.batches, steps):
            with self.ddp.no_sync():
                self._backward(batch)
            mean = self._gradient()
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
            self._backward(batch)
            found.append(float((self._gradient() - mean).norm() / mean.norm()))
        return found

    def _backward(self, batch: Any) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.task.loss(self.ddp, batch).backward()

    def _gradient(self) -> Tensor:
        return torch.cat([p.grad.flatten() for p in self.ddp.parameters() if p.grad is not None])


class Rank:
    """What stays alive over all contests: the process group."""

    def __init__(self, setup: dict[str, Any], channel: Channel) -> None:
        self.channel = channel
        self.rank, self.num_ranks = join(setup)
        self.contestants: list[Contestant] = []

    def enter(self, task_described: dict[str, Any], ways: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Build a model for each of ``ways`` and train it for a few steps; bytes that each hands to the network."""
        task: Any = restore(task_described)
        for way in ways:
            told = Way(**way)
            # A policy's first plan is made of gradients that differ.
            count = max(_BATCHES, told.warm_up_steps if told.adapt else 0)
            batches = cycle(list(islice(task.batches(0, self.rank, self.num_ranks), count)))
            self.contestants.append(Contestant(task, told, batches))
        return {
            "payload_bytes": [c.wire.wire_bytes_per_step() if c.wire else None for c in self.contestants],
            "layers": [c.layers() for c in self.contestants],
        }

    def turn(self, which: int, steps: int) -> dict[str, Any]:
        """Train ``steps`` steps; the mean seconds of one, and those in each stage of communication."""
        contestant = self.contestants[which]
        before = contestant.stages()
        self.channel.hold("turn")
        started = time.perf_counter()
        contestant.train(steps)
        seconds = (time.perf_counter() - started) / steps
        return {"seconds": seconds, "stages": {k: (v - before[k]) / steps for k, v in contestant.stages().items()}}

    def leave(self) -> dict[str, Any]:
        for contestant in self.contestants:
            if contestant.wire is not None:
                contestant.wire.detach()
        groups = [contestant.group for contestant in self.contestants if contestant.group is not None]
        self.contestants.clear()
        gc.collect()
        for group in groups:
            dist.destroy_process_group(group)
        return {}


def _serve(channel: Channel) -> None:
    rank = Rank(channel.receive(), channel)
    channel.send("done")
    while True:
        command = channel.receive()
        match command["do"]:
            case "enter":
                answer = rank.enter(command["task"], command["ways"])
            case "turn":
                answer = rank.turn(int(command["which"]), int(command["steps"]))
            case "errors":
                answer = {"errors": rank.contestants[int(command["which"])].errors(int(command["steps"]))}
            case "syncs":
                chosen = rank.contestants[int(command["which"])]
                answer = {"syncs": chosen.syncs(int(command["steps"])), "layers": chosen.layers()}
            case _:
                answer = rank.leave()
        channel.send("done", **answer)


def main() -> None:
    run_rank(_serve)
