"""One rank of a comparison: reads commands as JSON lines on standard input, answers with JSON lines on standard output.

Commands: ``setup`` (first), and for each run ``begin`` (build the model and evaluate it), ``train`` (until a step, and
evaluate) and ``finish`` (evaluate on all held-out data). Before and after the steps of ``train`` it waits until the
parent releases all ranks together, so that the parent can read the link's counters while nothing is sent; when standard
input ends, so does the rank.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import nn

import thinwire
from thinwire.plan import Plan, sent_bytes
from thinwire_tools.compare.rank_program import Channel, join, run_rank
from thinwire_tools.compare.tasks import restore
from thinwire_tools.compare.train import digest, learning_rate, train
from thinwire_tools.compare.variants import Variant


class Rank:
    """One rank's process group, task, and run under way."""

    def __init__(self, setup: dict[str, Any], channel: Channel) -> None:
        self.channel = channel
        self.task = restore(setup["task"])
        self.rank, self.num_ranks = join(setup)

    def begin(self, variant: dict[str, Any], seed: int, measure: int) -> dict[str, Any]:
        """Start a run of the `Variant` from ``seed``."""
        chosen, task = Variant(**variant), self.task
        self.every, self.steps_done = chosen.every, 0
        self.model = task.build(seed)
        ddp, optimizer = chosen.prepare(task, self.model)
        self.attached = chosen.attach(ddp, optimizer, seed, measure)
        self.asked = self.attached.wire.plan if self.attached.wire else None
        # Random draws of training (dropout) are the same for every variant, too.
        torch.manual_seed(seed * self.num_ranks + self.rank)
        rate = task.learning_rate * chosen.rate_factor
        self.steps = train(
            task,
            ddp,
            optimizer,
            task.batches(seed, self.rank, self.num_ranks),
            lambda step: learning_rate(rate, step, task.steps),
        )
        return {"probe": self._evaluate(probe=True)}

    def train(self, until: int) -> dict[str, Any]:
        """Train until step ``until``: return the seconds of each step, the bytes sent so far, this rank's sum of the
        loss and its number of terms."""
        step_s = []
        self.channel.hold("train")
        for step in range(self.steps_done + 1, until + 1):
            loss, seconds = next(self.steps)
            step_s.append(seconds)
            self.channel.send("step", step=step, loss=loss)
        if until == self.task.steps:
            started = time.perf_counter()
            self.attached.finish()
            step_s[-1] += time.perf_counter() - started
        self.channel.hold("trained")
        self.steps_done = until
        # An exchange is paid for by all steps of its round.
        rounds = [step_s[first : first + self.every] for first in range(0, len(step_s), self.every)]
        return {
            "step_s": [fmean(steps) for steps in rounds for _ in steps],
            "payload_bytes": self.attached.sent(until),
            "probe": self._evaluate(probe=True),
        }

    def finish(self) -> dict[str, Any]:
        """End the run: evaluate on all held-out data, hash the parameters, and return a policy's decisions.

        Ranks that train alone each evaluate their share with weights of their own. ``right`` is the number of right
        answers of a task that counts them.
        """
        wire = self.attached.wire
        held_out, right = self._held_out()
        result = {
            "alpha": wire.stats.alpha if wire else [],
            "plans": decided(wire, self.asked, self.model, self.num_ranks) if wire and self.asked else [],
            "adapt_s": wire.stats.adapt_s if wire else 0.0,
            "formula_bytes": self.attached.formula(),
            "held_out": held_out,
            "right": right,
            "digest": digest(self.model),
        }
        self.attached.close()
        del self.model, self.steps, self.attached, wire
        gc.collect()
        return result

    @torch.no_grad()
    def _evaluate(self, *, probe: bool) -> tuple[float, int]:
        self.model.eval()
        loss = self.task.evaluate(self.model, self.rank, self.num_ranks, probe=probe)
        self.model.train()
        return loss

    @torch.no_grad()
    def _held_out(self) -> tuple[tuple[float, int], int | None]:
        """Return the loss over the whole held-out set as `_evaluate`, and the right answers, where they are counted."""
        score = getattr(self.task, "score", None)
        if score is None:
            return self._evaluate(probe=False), None
        self.model.eval()
        total, right, count = score(self.model, self.rank, self.num_ranks, probe=False)
        self.model.train()
        return (total, count), right


def plan_bytes(plan: Plan, shapes: Mapping[str, Sequence[int]], num_ranks: int) -> float:
    """Return the bytes that a rank sends for all layers of a plan in one step, without the messages' headers."""
    return sum(sent_bytes(compressor, shapes[name], num_ranks) for name, compressor in plan.layers.items())


def decided(wire: thinwire.Wire, asked: Plan, model: nn.Module, num_ranks: int) -> list[dict[str, Any]]:
    """Return the plans that a policy chose: from which step on, bytes a step (and those of ``asked``, which the rules
    name), errors of plan and reference, each the sum of the layers' L2 norms (None where the policy takes none, or on
    another rank), and seconds."""
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
    """Return the sum of the layers' error norms, from their squared errors; None where there are none."""
    return math.fsum(math.sqrt(error) for error in squared.values()) if squared else None


def _serve(channel: Channel) -> None:
    rank = Rank(channel.receive(), channel)
    commands = {"begin": rank.begin, "train": rank.train, "finish": rank.finish}
    answer: dict[str, Any] = {}
    while True:
        channel.send("done", **answer)
        command = channel.receive()
        answer = commands[command.pop("do")](**command)


def main() -> None:
    run_rank(_serve)
