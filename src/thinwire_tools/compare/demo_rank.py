"""One rank of one variant of the demo.

It reads commands as JSON lines on standard input and answers with JSON lines on standard output: ``setup`` (first),
``begin`` (build the model and evaluate it), ``train`` (train until a step and evaluate) and ``finish`` (evaluate on all
held-out text). Before and after the steps of ``train`` it holds until the parent releases all ranks together, so that
the parent can read the link's counters while nothing is sent.
"""

from __future__ import annotations

import time
from statistics import fmean
from typing import Any

from thinwire_tools.compare.rank_program import Channel, join, run_rank
from thinwire_tools.compare.tasks import library_text
from thinwire_tools.compare.train import VARIANTS, Replica, Task, digest, distributed, train


class Rank:
    """The process group, the text, and the training of one variant."""

    def __init__(self, setup: dict[str, Any], channel: Channel) -> None:
        self.channel = channel
        self.task = Task.from_json(setup["task"])
        self.rank, self.num_ranks = join(setup)

    def begin(self, name: str) -> dict[str, Any]:
        """Build the model for variant ``name``."""
        variant, task = VARIANTS[name], self.task
        self.every = variant.every
        self.steps_done = 0
        self.replica = Replica(task, variant.optimizer)
        ddp = distributed(self.replica, variant)
        self.attached = variant.attach(ddp, self.replica)
        self.steps = train(
            task,
            ddp,
            self.replica.optimizer,
            task.batches(task.seed, self.rank, self.num_ranks),
            lambda step: variant.rate_factor * task.rate(step),
        )
        return {"probe": self._evaluate(probe=True)}

    def train(self, until: int) -> dict[str, Any]:
        """Train until step ``until``: the seconds of each step, the bytes sent so far, this rank's sum of the loss."""
        step_s = []
        self.channel.hold("train")
        for step in range(self.steps_done + 1, until + 1):
            started = time.perf_counter()
            loss, _ = next(self.steps)
            step_s.append(time.perf_counter() - started)
            self.channel.send("step", step=step, loss=loss)
        if until == self.task.steps:
            started = time.perf_counter()
            self.attached.finish()
            step_s[-1] += time.perf_counter() - started
        self.channel.hold("trained")
        self.steps_done = until
        payload_bytes = self.attached.payload_bytes(until)
        step_s = _mean_by_round(step_s, self.every)
        return {"step_s": step_s, "payload_bytes": payload_bytes, "probe": self._evaluate(probe=True)}

    def finish(self) -> dict[str, Any]:
        """Evaluate on all held-out windows, and hash the parameters."""
        return {
            "held_out": self._evaluate(probe=False),
            "formula_bytes": self.attached.formula_bytes(),
            "digest": digest(self.replica.model),
        }

    def _evaluate(self, *, probe: bool) -> float:
        """Sum of the loss over this rank's share of the held-out windows, or of the probe's."""
        return self.task.evaluate(self.replica.model, self.rank, self.num_ranks, probe=probe)[0]


def _mean_by_round(step_s: list[float], every: int) -> list[float]:
    """For each step the mean of the round of ``every`` steps that it is in: an exchange is paid for by all of them."""
    rounds = [step_s[first : first + every] for first in range(0, len(step_s), every)]
    return [fmean(steps) for steps in rounds for _ in steps]


def _serve(channel: Channel) -> None:
    rank, text = Rank(channel.receive(), channel), library_text()
    channel.send(
        "done",
        train_bytes=text.train.numel(),
        held_out_bytes=text.held_out.numel(),
        num_files=text.num_files,
        text_digest=text.digest,
        parameters=sum(parameter.numel() for parameter in Replica(rank.task).parameters),
    )
    while True:
        command = channel.receive()
        match command["do"]:
            case "begin":
                answer = rank.begin(command["name"])
            case "train":
                answer = rank.train(command["until"])
            case _:
                answer = rank.finish()
        channel.send("done", **answer)


def main() -> None:
    run_rank(_serve)
