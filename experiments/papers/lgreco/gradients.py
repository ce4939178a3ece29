"""Gradients along a training in this process, and what policies make of them: the same ones for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from thinwire.compressors import Compressor, Raw
from thinwire.plan import Plan, sent_bytes
from thinwire.policies import Evidence, Policy, Sync
from thinwire_tools.compare.train import learning_rate, train

NUM_RANKS = 2
"""For whose training batches are drawn, and bytes are counted."""


@dataclass(frozen=True)
class Snapshot:
    """Sums of one rank's gradients over some steps, by layer, in the layers' shapes."""

    step: int
    gradients: Mapping[str, Tensor]
    learning_rate: float


@dataclass(frozen=True)
class Training:
    """An uncompressed training and its snapshots, in the order of their steps."""

    title: str
    bucket_cap_mb: float
    """The size up to which DDP fills a bucket."""
    snapshots: tuple[Snapshot, ...]

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(snapshot.step for snapshot in self.snapshots)

    @property
    def bucket_of(self) -> dict[str, int]:
        """By layer, the index of its DDP bucket in the order in which buckets are sent: the last layers fill the first
        one."""
        buckets, bucket, filled = {}, 0, 0
        for name, gradient in reversed(list(self.snapshots[0].gradients.items())):
            buckets[name] = bucket
            filled += 4 * gradient.numel()
            if filled >= self.bucket_cap_mb * 2**20:
                bucket, filled = bucket + 1, 0
        return buckets


@dataclass(frozen=True)
class Extent:
    """How much is recorded: trainings a task, snapshots of each, and the steps whose gradients a snapshot sums."""

    seeds: int = 5
    snapshots: int = 7
    window: int = 20

    def record(self, task: Any, title: str, on_step: Callable[[], None]) -> list[Training]:
        """Return a training from each seed."""
        snapshots = (tuple(self._along(task, seed, on_step)) for seed in range(self.seeds))
        return [Training(title, task.bucket_cap_mb, taken) for taken in snapshots]

    def _along(self, task: Any, seed: int, on_step: Callable[[], None]) -> Iterator[Snapshot]:
        """Yield snapshots spread evenly over an uncompressed training on one rank's batches; the last one ends with
        it."""
        model, sums = task.build(seed), {}
        ends = {task.steps * (i + 1) // self.snapshots for i in range(self.snapshots)}
        rate = partial(learning_rate, task.learning_rate, steps=task.steps)
        steps = train(task, model, task.optimizer(model), task.batches(seed, 0, NUM_RANKS), rate)
        for step, _ in enumerate(steps, 1):
            if any(end - self.window < step <= end for end in ends):
                gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
                sums = {name: gradient + sums.get(name, 0.0) for name, gradient in gradients.items()}
            if step in ends:
                yield Snapshot(step, sums, rate(step - 1))
                sums = {}
            on_step()


def choose(
    policy: Policy, spec: str, snapshots: Sequence[Snapshot], bucket_of: Mapping[str, int], syncs: Sequence[Sync] = ()
) -> list[Mapping[str, Compressor]]:
    """The plan that a policy makes of each snapshot in turn, remembering what it notes."""
    memory: Mapping[str, tuple[float, ...]] = {}
    plans = []
    for snapshot in snapshots:
        whole = Plan.build({name: tuple(g.shape) for name, g in snapshot.gradients.items()}, spec).layers
        reference = {name: c for name, c in whole.items() if not isinstance(c, Raw)}
        shown = Evidence(
            reference,
            reference,
            snapshot.gradients,
            num_ranks=NUM_RANKS,
            step=snapshot.step,
            learning_rate=snapshot.learning_rate,
            bucket_of=bucket_of,
            syncs=syncs,
            memory=memory,
        )
        proposal = policy.propose(shown)
        memory = proposal.memory
        plans.append({**whole, **proposal.layers})
    return plans


def plan_bytes(plan: Mapping[str, Compressor], snapshot: Snapshot) -> float:
    """Bytes that a rank sends in a step."""
    return sum(sent_bytes(plan[name], tuple(g.shape), NUM_RANKS) for name, g in snapshot.gradients.items())
