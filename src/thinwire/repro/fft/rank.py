"""One rank of the FFT paper's trainings: as `thinwire.repro.compare_rank`, with the paper's learning rates and what its
figures need: accuracy, alpha, gradients.

Commands: ``setup`` (first), ``train`` (one method from one seed) and ``record`` (local gradients along a training).
"""

# No `from __future__ import annotations` here: DDP checks the annotations of a communication hook as objects.

import gc
import time
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.repro import compare_rank
from thinwire.repro.compare_rank import digest, probe_steps
from thinwire.repro.demo_rank import Channel, run_rank
from thinwire.repro.fft.methods import NOTHING
from thinwire.repro.tasks import ScoredTask
from thinwire.repro.train import VARIANTS, gradient_bytes, ring_factor
from thinwire.repro.train import Task as DemoTask


class Rank(compare_rank.Rank):
    """What stays alive over all trainings: the process group and the task."""

    task: ScoredTask

    def train(
        self, spec: str | None, exclude: Sequence[str], seed: int, measure: int, topology: str = "sra"
    ) -> dict[str, Any]:
        """Train from ``seed`` with gradients compressed by ``spec`` (None: plain DDP; `NOTHING`: none sent).

        ``measure``: take the exact mean as well every so many steps, for alpha (assumption 3.2); 0 never does.
        ``scores`` are this rank's sums of loss, right answers and images at each probe, ``held_out`` over all images.
        """
        model = self.task.build(seed)
        ddp = self.task.distribute(model)
        wire = None
        if spec == NOTHING:
            VARIANTS["noop"].attach(ddp, DemoTask())
        elif spec is not None:
            wire = thinwire.compress(
                ddp, spec, exclude=exclude, seed=seed, decline=False, measure=measure, topology=topology
            )
        dense_bytes = 0.0 if spec == NOTHING else gradient_bytes(model) * ring_factor(self.num_ranks)
        steps = self._steps(ddp, seed)
        scores, payload_bytes, step_s, losses = [self._score(model, probe=True)], [0.0], [], []
        for until in probe_steps(self.task):
            self.channel.hold("train")
            for seconds, loss in islice(steps, until - len(step_s)):
                step_s.append(seconds)
                losses.append(loss)
            self.channel.hold("trained")
            payload_bytes.append(wire.stats.payload_sent_bytes if wire else dense_bytes * until)
            scores.append(self._score(model, probe=True))
        alpha = wire.stats.alpha if wire else []
        result = {
            "step_s": step_s,
            "losses": losses,
            "scores": scores,
            "payload_bytes": payload_bytes,
            "held_out": self._score(model, probe=False),
            "digest": digest(model),
            "alpha": alpha,
        }
        if wire:
            wire.detach()
        del ddp, wire, steps
        gc.collect()
        return result

    def record(self, seed: int, at: Collection[int], path: Path) -> dict[str, Any]:
        """Train uncompressed and write this rank's own gradients at the steps ``at`` to ``path``: fp32 ``[steps,
        parameters]``, layer after layer."""
        ddp = self.task.distribute(self.task.build(seed))
        found: list[Tensor] = []
        for _ in self._steps(ddp, seed, record=(at, found)):
            pass
        np.save(path, torch.stack(found).numpy(), allow_pickle=False)
        return {}

    def _steps(
        self, ddp: DistributedDataParallel, seed: int, record: tuple[Collection[int], list[Tensor]] | None = None
    ) -> Iterator[tuple[float, float]]:
        """Train step by step; yields seconds and loss of each. ``record``: at which steps to add this rank's own
        gradient to which list."""
        optimizer = self.task.optimizer(ddp.module)
        parameters = list(ddp.module.parameters())
        # What a model draws while it trains (dropout) is the same for every method.
        torch.manual_seed(seed * self.num_ranks + self.rank)
        for step, batch in enumerate(self.task.batches(seed, self.rank, self.num_ranks)):
            if record and step in record[0]:
                own = torch.autograd.grad(self.task.loss(ddp.module, batch), parameters)
                record[1].append(torch.cat([gradient.flatten() for gradient in own]))
            started = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = self.task.rate(step)
            optimizer.zero_grad(set_to_none=True)
            loss = self.task.loss(ddp, batch)
            loss.backward()
            optimizer.step()
            seconds = time.perf_counter() - started
            self.channel.send("step", step=step + 1, loss=loss.item())
            yield seconds, loss.item()

    def _score(self, model: nn.Module, *, probe: bool) -> tuple[float, int, int]:
        return self.task.score(model, self.rank, self.num_ranks, probe=probe)


def _serve(channel: Channel) -> None:
    rank = Rank(channel.receive(), channel)
    channel.send("done")
    while True:
        command = channel.receive()
        if command["do"] == "record":
            path = Path(command["folder"]) / f"gradients-{rank.rank}.npy"
            channel.send("done", **rank.record(int(command["seed"]), command["at"], path))
        else:
            spec, exclude = command["spec"], command["exclude"]
            numbers = int(command["seed"]), int(command["measure"])
            channel.send("done", **rank.train(spec, exclude, *numbers, topology=command["topology"]))


def main() -> None:
    run_rank(_serve)
