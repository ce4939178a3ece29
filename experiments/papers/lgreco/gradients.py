"""Gradients along a training in this process, and what policies make of them: the same ones for all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.compressors import Compressor, Raw
from thinwire.plan import Plan, sent_bytes
from thinwire.policies import Evidence, Policy, Proposal, Sync
from thinwire.policies.candidates import squared_errors
from thinwire_tools.compare.train import learning_rate

NUM_RANKS = 2
"""For whose training batches are drawn, and bytes are counted."""


@dataclass(frozen=True)
class Snapshot:
    """Sums of one rank's gradients over some steps, by layer, in the layers' shapes."""

    step: int
    gradients: Mapping[str, Tensor]
    learning_rate: float


def along(task: Any, *, count: int, window: int, on_step: Callable[[], None], seed: int = 0) -> list[Snapshot]:
    """``count`` snapshots spread evenly over an uncompressed training on one rank's batches, each of ``window`` steps;
    the last one ends with it."""
    model = task.build(seed)
    optimizer = task.optimizer(model)
    ends = {task.steps * (i + 1) // count for i in range(count)}
    snapshots: list[Snapshot] = []
    sums: dict[str, Tensor] = {}
    for step, batch in enumerate(task.batches(seed, 0, NUM_RANKS), 1):
        rate = learning_rate(task.learning_rate, step - 1, task.steps)
        take_step(task, model, optimizer, batch, rate)
        if any(end - window < step <= end for end in ends):
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    before = sums.get(name)
                    sums[name] = parameter.grad.clone() if before is None else before + parameter.grad
        if step in ends:
            snapshots.append(Snapshot(step, sums, rate))
            sums = {}
        on_step()
    return snapshots


def take_step(
    task: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    rate: float,
    change: Callable[[nn.Module], None] | None = None,
) -> float:
    """One step of training; ``change`` may change the gradients before they are used. The loss before it."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)
    loss = task.loss(model, batch)
    loss.backward()
    if change is not None:
        change(model)
    optimizer.step()
    return float(loss.detach())


def first_batches(task: Any, count: int, *, after: int = 0, seed: int = 0) -> list[Any]:
    """Batches ``after`` to ``after + count`` of a training's rank 0."""
    return list(islice(task.batches(seed, 0, NUM_RANKS), after, after + count))


@dataclass(frozen=True)
class Chosen:
    """What a policy makes of a snapshot, beside what the rules name: bytes of all layers in a step, and errors
    as `error_of` adds them up."""

    step: int
    plan: Mapping[str, Compressor]
    sent_bytes: float
    reference_bytes: float
    error: float
    reference_error: float
    proposal: Proposal = field(repr=False)

    @property
    def gain(self) -> float:
        """How many times fewer bytes than the rules' plan sends."""
        return self.reference_bytes / self.sent_bytes

    @property
    def relative_error(self) -> float:
        """Error relative to that of the rules' plan; infinite where that has none and this plan has."""
        if not self.reference_error:
            return math.inf if self.error else 1.0
        return self.error / self.reference_error


def reference_of(spec: str, snapshot: Snapshot) -> Mapping[str, Compressor]:
    """What each layer has where ``spec`` is the rule."""
    return Plan.build({name: tuple(g.shape) for name, g in snapshot.gradients.items()}, spec).layers


def evidence(
    spec: str,
    snapshot: Snapshot,
    *,
    memory: Mapping[str, tuple[float, ...]] | None = None,
    bucket_of: Mapping[str, int] | None = None,
    syncs: Sequence[Sync] = (),
) -> Evidence:
    """What a policy is shown of a snapshot."""
    reference = {name: c for name, c in reference_of(spec, snapshot).items() if not isinstance(c, Raw)}
    return Evidence(
        reference,
        reference,
        snapshot.gradients,
        num_ranks=NUM_RANKS,
        step=snapshot.step,
        learning_rate=snapshot.learning_rate,
        bucket_of=bucket_of or {},
        syncs=syncs,
        memory=memory or {},
    )


def choose(
    policy: Policy,
    spec: str,
    snapshots: Sequence[Snapshot],
    *,
    bucket_of: Mapping[str, int] | None = None,
    syncs: Sequence[Sync] = (),
) -> list[Chosen]:
    """What a policy chooses on each snapshot in turn, remembering what it notes; errors are taken anew, also of
    policies that take none."""
    memory: Mapping[str, tuple[float, ...]] = {}
    choices = []
    for snapshot in snapshots:
        shown = evidence(spec, snapshot, memory=memory, bucket_of=bucket_of, syncs=syncs)
        proposal = policy.propose(shown)
        memory = proposal.memory
        reference = reference_of(spec, snapshot)
        plan = {**reference, **proposal.layers}
        choices.append(
            Chosen(
                snapshot.step,
                plan,
                plan_bytes(plan, snapshot),
                plan_bytes(reference, snapshot),
                error_of(plan, snapshot),
                error_of(reference, snapshot),
                proposal,
            )
        )
    return choices


def plan_bytes(plan: Mapping[str, Compressor], snapshot: Snapshot) -> float:
    """Bytes that a rank sends in a step."""
    return sum(sent_bytes(plan[name], tuple(g.shape), NUM_RANKS) for name, g in snapshot.gradients.items())


def error_of(plan: Mapping[str, Compressor], snapshot: Snapshot) -> float:
    """Sum over layers of the L2 norms of their errors, which is what policies keep within a budget (thesis, section
    4.4)."""
    lossy = {name: c for name, c in plan.items() if not isinstance(c, Raw)}
    return sum(math.sqrt(squared_errors(snapshot.gradients[name], [c])[0]) for name, c in lossy.items())
