"""One rank of a comparison: reads commands as JSON lines on standard input, answers with JSON lines on standard output.

Commands: ``setup`` (first) and ``run`` (train one variant from one seed). The conversation is that of the demo's ranks:
whenever a rank answers ``hold`` it waits for a ``go``, and when standard input ends, so does the rank.
"""

# No `from __future__ import annotations` here: DDP checks the annotations of a communication hook as objects.

import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.local import send_nothing
from thinwire.plan import Plan, sent_bytes
from thinwire.policies import parse_policy
from thinwire_tools.compare.rank_program import Channel, join, run_rank
from thinwire_tools.compare.tasks import probe_steps, restore
from thinwire_tools.compare.train import digest, gradient_bytes, learning_rate, ring_factor, train
from thinwire_tools.compare.variants import ALONE, Variant


class Rank:
    """What stays alive over all runs: the process group and the task."""

    def __init__(self, setup: dict[str, Any], channel: Channel) -> None:
        self.channel = channel
        self.task = restore(setup["task"])
        self.rank, self.num_ranks = join(setup)

    def run(self, rules: str | None, seed: int, highest: float, measure: int = 0) -> dict[str, Any]:
        """Train from ``seed`` with gradients compressed by ``rules``, a `Variant`'s text (None: plain DDP).

        Ranks that train alone each evaluate their share of the held-out set with weights of their own.

        ``step_s`` has the seconds of every step, without the evaluations between them; ``payload_bytes`` those sent
        until each probe, without those of ``measure``, which takes the exact mean every so many steps; ``probes`` and
        ``held_out`` are this rank's sums of the loss with their numbers of terms, ``right`` the number of right answers
        of a task that counts them.
        """
        model = self.task.build(seed)
        ddp = self.task.distribute(model)
        optimizer = self.task.optimizer(ddp.module)
        if rules == ALONE:
            send_nothing(ddp)
        wire = _compress(ddp, rules, optimizer, seed, measure) if rules not in (None, ALONE) else None
        asked = wire.plan if wire else None
        if wire and wire.plan.all_raw:
            measure = 0
        dense_bytes = gradient_bytes(model) * ring_factor(self.num_ranks) if rules != ALONE else 0.0
        # What a model draws while it trains (dropout) is the same for every variant, too.
        torch.manual_seed(seed * self.num_ranks + self.rank)
        steps = self._train(ddp, optimizer, seed, highest)
        probes, payload_bytes, step_s = [self._evaluate(model, probe=True)], [0.0], []
        for until in probe_steps(self.task):
            self.channel.hold("train")
            step_s += list(islice(steps, until - len(step_s)))
            self.channel.hold("trained")
            exact_bytes = dense_bytes * math.ceil(until / measure) if measure else 0.0
            payload_bytes.append(wire.stats.payload_sent_bytes - exact_bytes if wire else dense_bytes * until)
            probes.append(self._evaluate(model, probe=True))
        held_out, right = self._held_out(model)
        result = {
            "alpha": wire.stats.alpha if wire else [],
            "plans": decided(wire, asked, ddp.module, self.num_ranks) if wire and asked else [],
            "adapt_s": wire.stats.adapt_s if wire else 0.0,
            "step_s": step_s,
            "probes": probes,
            "payload_bytes": payload_bytes,
            "formula_bytes": wire.wire_bytes_per_step() if wire and not wire.plan.all_raw else dense_bytes,
            "held_out": held_out,
            "right": right,
            "digest": digest(model),
        }
        if wire:
            wire.detach()
        del ddp, wire, steps
        gc.collect()
        return result

    def _train(
        self, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, seed: int, highest: float
    ) -> Iterator[float]:
        """Train step by step; yields the seconds of each."""
        batches = self.task.batches(seed, self.rank, self.num_ranks)
        steps = train(self.task, ddp, optimizer, batches, lambda step: learning_rate(highest, step, self.task.steps))
        for step, (loss, seconds) in enumerate(steps, 1):
            self.channel.send("step", step=step, loss=loss, seconds=seconds)
            yield seconds

    @torch.no_grad()
    def _evaluate(self, model: nn.Module, *, probe: bool) -> tuple[float, int]:
        model.eval()
        loss = self.task.evaluate(model, self.rank, self.num_ranks, probe=probe)
        model.train()
        return loss

    @torch.no_grad()
    def _held_out(self, model: nn.Module) -> tuple[tuple[float, int], int | None]:
        """The loss over the whole held-out set as `_evaluate`, and how many answers are right, where that counts."""
        score = getattr(self.task, "score", None)
        if score is None:
            return self._evaluate(model, probe=False), None
        model.eval()
        total, right, count = score(model, self.rank, self.num_ranks, probe=False)
        model.train()
        return (total, count), right


def _compress(
    ddp: DistributedDataParallel, rules: str, optimizer: torch.optim.Optimizer, seed: int, measure: int
) -> thinwire.Wire:
    variant = Variant.parse(rules)
    adapted: dict[str, Any] = {}
    if variant.policy is not None:
        # With the optimizer, whose learning rate Accordion looks at.
        adapted = {"adapt": parse_policy(variant.policy), "optimizer": optimizer}
    checks = thinwire.Checks(measure_every=measure)
    return thinwire.compress(ddp, variant.spec, seed=seed, skip_if_slower=False, checks=checks, **adapted)


def plan_bytes(plan: Plan, shapes: Mapping[str, Sequence[int]], num_ranks: int) -> float:
    """Bytes that a rank sends for all layers of a plan in one step, without the messages' headers."""
    return sum(sent_bytes(compressor, shapes[name], num_ranks) for name, compressor in plan.layers.items())


def decided(wire: thinwire.Wire, asked: Plan, model: nn.Module, num_ranks: int) -> list[dict[str, Any]]:
    """The plans that a policy chose: from which step on, bytes a step (and those of ``asked``, which the rules name),
    errors of plan and reference, each the sum of the layers' L2 norms (None where the policy takes none, or on another
    rank), and seconds."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    reference_bytes = plan_bytes(asked, shapes, num_ranks)
    return [
        {
            "step": decision.step,
            "wire_bytes": plan_bytes(decision.plan, shapes, num_ranks),
            "reference_wire_bytes": reference_bytes,
            "error": _norms(decision.errors),
            "reference_error": _norms(decision.reference_errors),
            "errors_s": decision.errors_s,
            "solve_s": decision.solve_s,
            "waited_s": decision.waited_s,
            "note": decision.note,
        }
        for decision in wire.decisions
    ]


def _norms(squared: Mapping[str, float]) -> float | None:
    """The sum of the layers' error norms, from their squared errors; None where there are none."""
    return math.fsum(math.sqrt(error) for error in squared.values()) if squared else None


def _serve(channel: Channel) -> None:
    rank = Rank(channel.receive(), channel)
    channel.send("done")
    while True:
        command = channel.receive()
        asked = command["rules"], int(command["seed"]), float(command["learning_rate"]), int(command["measure"])
        channel.send("done", **rank.run(*asked))


def main() -> None:
    run_rank(_serve)
