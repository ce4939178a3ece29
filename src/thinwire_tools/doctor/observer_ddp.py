"""Observation of the communication of a ``DistributedDataParallel`` model."""

# No `from __future__ import annotations` here: DDP checks the annotations of a communication hook as objects.

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from thinwire.plan import named_parameters
from thinwire.plan.forecast import Bucket, Pace
from thinwire.runtime import Follower, for_reducer
from thinwire.runtime.executor import mark
from thinwire_tools.doctor.watched import DoctorError, Step, check_size

if TYPE_CHECKING:
    from thinwire_tools.doctor.observer import Observer

GradBucket = dist.GradBucket  # pyright: ignore[reportPrivateImportUsage] - documented, yet not exported


class DDPObserver:
    """A communication hook that takes the mean of each bucket by stock DDP's all-reduce. Every other step it waits for
    each all-reduce on the spot, so that backward and communication take turns: such a step shows the time of computing
    and when buckets become ready, and the steps between show the training unchanged."""

    def __init__(self, watcher: "Observer", model: DistributedDataParallel) -> None:
        assert isinstance(model.process_group, dist.ProcessGroup)
        self.group = model.process_group
        check_size(self.group)
        try:
            model.register_comm_hook(self, _hook)
        except RuntimeError as error:
            raise DoctorError(
                "this model has a communication hook already, and doctor looks at training without one: take "
                f"thinwire.compress() or register_comm_hook() out of the script for now ({error})"
            ) from error
        self._watcher = watcher
        self._names: dict[torch.Tensor, str] = {p: name for name, p in named_parameters(model.module).items()}
        self._follower = Follower("thinwire doctor")
        self._device = next(model.parameters()).device

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Return the mean of a bucket, as stock DDP takes it."""
        flat, step = bucket.buffer(), self._watcher.present
        ready = mark(flat.device)
        future = for_reducer(self._follower.mean(flat, self.group))
        if bucket.is_last():
            self._watcher.synced()
        if step is None:
            return future
        layers = tuple((self._names[p], tuple(p.shape)) for p in bucket.parameters())
        step.buckets.append(Bucket(0.0, layers, flat.element_size()))
        if step.serial:
            # On a device its stream waits, and so does the rest of the backward pass.
            future.wait()
            step.moves.append((ready, mark(flat.device)))
        return future

    def watched(self, steps: Sequence[Step]) -> tuple[tuple[Pace, ...], list[float], list[list[float]]]:
        """Return paces of steps, seconds of unchanged steps, and those of each all-reduce: the same everywhere."""
        serial = [step for step in steps if step.serial]
        plain = [step.seconds for step in steps if not step.serial]
        rows, took, times = (
            torch.tensor(values, dtype=torch.float64, device=self._device)
            for values in ([[*s.ready, s.compute_s] for s in serial], [s.took for s in serial], plain)
        )
        dist.all_reduce(rows, op=dist.ReduceOp.MAX, group=self.group)
        dist.all_reduce(times, op=dist.ReduceOp.MAX, group=self.group)
        # The last rank waited only for the others' bytes.
        dist.all_reduce(took, op=dist.ReduceOp.MIN, group=self.group)
        paces = tuple(
            Pace(
                tuple(replace(bucket, ready_s=at) for at, bucket in zip(row[:-1], steps[-1].buckets, strict=True)),
                row[-1],
            )
            for row in rows.tolist()
        )
        return paces, times.tolist(), took.tolist()


def _hook(state: DDPObserver, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state.reduce(bucket)
