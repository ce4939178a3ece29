"""One rank of the demo: reads commands as JSON lines on standard input, answers with JSON lines on standard output.

Commands: ``setup`` (first; what all later ones need), ``base`` (train the common start and save it) and ``variant``
(train one variant from it). Whenever a rank answers ``hold`` it waits for a ``go``: the parent lets all ranks go
together, so that they can read the link's counters and start their clocks at the same moment without sending a byte.
When standard input ends, because the parent did, so does the rank.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TextIO

import torch
import torch.distributed as dist

from thinwire.repro.data import Text, draw_offsets, even_offsets, standard_library
from thinwire.repro.forked import conversation
from thinwire.repro.train import VARIANTS, Replica, Task, distributed, evaluate, train

# The batches of the common start and those of the comparison are different draws.
_BASE_DRAW, _VARIANT_DRAW = 0, 1


class ParentGone(Exception):
    """Standard input ended."""


class Channel:
    """JSON lines to and from the parent."""

    def __init__(self, commands: TextIO, answers: TextIO) -> None:
        self._commands, self._answers = commands, answers

    def receive(self) -> dict[str, Any]:
        line = self._commands.readline()
        if not line:
            raise ParentGone
        return json.loads(line)

    def send(self, event: str, **more: Any) -> None:
        self._answers.write(json.dumps({"event": event, **more}) + "\n")
        self._answers.flush()

    def hold(self, at: str) -> None:
        """Wait until the parent lets all ranks go."""
        self.send("hold", at=at)
        self.receive()


def join(setup: dict[str, Any]) -> tuple[int, int]:
    """Make the process group that the parent's first words describe, on one thread; rank and number of ranks."""
    rank, num_ranks = int(setup["rank"]), int(setup["num_ranks"])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{setup['rendezvous']}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=setup["timeout_s"]),
    )
    return rank, num_ranks


class Rank:
    """What stays alive over all variants: the text, the process group, the batches."""

    def __init__(self, setup: dict[str, Any], channel: Channel) -> None:
        self.channel = channel
        self.task = Task.from_json(setup["task"])
        self.state = Path(setup["state"])
        self.text: Text = standard_library()
        self.rank, self.num_ranks = join(setup)

    def base(self) -> dict[str, Any]:
        """Train the common start in plain DDP; rank 0 saves it."""
        replica = Replica(self.task)
        ddp = distributed(replica, VARIANTS["fp32"])
        offsets = self._offsets(self.task.base_steps, self.task.base_batch, _BASE_DRAW)
        rate, context = self.task.base_rate, self.task.model.context
        for step, loss in enumerate(train(ddp, replica.optimizer, self.text.train, offsets, rate, context), 1):
            self.channel.send("step", step=step, loss=loss)
        if self.rank == 0:
            replica.save(self.state)
        return {"held_out": self._evaluate(replica, self.task.held_out_windows)}

    def variant(self, name: str) -> dict[str, Any]:
        """Train ``name`` from the common start.

        ``step_s`` has the seconds of every step, without the evaluations between them; ``payload_bytes`` those sent
        until each probe, and ``probes`` the sum of this rank's share of the probe's loss at each.
        """
        variant, task = VARIANTS[name], self.task
        replica = Replica(task)
        replica.load(self.state, task.base_steps)
        ddp = distributed(replica, variant)
        attached = variant.attach(ddp, task)
        offsets = self._offsets(task.steps, task.batch, _VARIANT_DRAW)
        steps = train(ddp, replica.optimizer, self.text.train, offsets, task.rate, task.model.context)
        probes, payload_bytes, step_s = [self._evaluate(replica, task.probe_windows)], [0.0], []
        for until in task.probe_steps:
            self.channel.hold("train")
            step_s += self._timed(steps, first=len(step_s), last=until)
            self.channel.hold("trained")
            payload_bytes.append(attached.payload_bytes(until))
            probes.append(self._evaluate(replica, task.probe_windows))
        result = {
            "step_s": step_s,
            "probes": probes,
            "payload_bytes": payload_bytes,
            "formula_bytes": attached.formula_bytes(),
            "held_out": self._evaluate(replica, task.held_out_windows),
            "digest": replica.digest(),
        }
        attached.detach()
        del ddp, attached, steps
        gc.collect()
        return result

    def _timed(self, steps: Iterator[float], *, first: int, last: int) -> list[float]:
        seconds = []
        for step in range(first + 1, last + 1):
            started = time.perf_counter()
            loss = next(steps)
            seconds.append(time.perf_counter() - started)
            self.channel.send("step", step=step, loss=loss, seconds=seconds[-1])
        return seconds

    def _offsets(self, steps: int, batch: int, draw: int) -> torch.Tensor:
        drawn = draw_offsets(
            self.text.train.numel(),
            steps=steps,
            num_ranks=self.num_ranks,
            batch=batch,
            context=self.task.model.context,
            seed=2 * self.task.seed + draw,
        )
        return drawn[:, self.rank]

    def _evaluate(self, replica: Replica, count: int) -> float:
        """Sum of the loss over this rank's share of ``count`` held-out windows."""
        context = self.task.model.context
        offsets = even_offsets(self.text.held_out.numel(), count=count, context=context)
        return evaluate(replica.model, self.text.held_out, offsets[self.rank :: self.num_ranks], context)


def _serve(channel: Channel) -> None:
    setup = channel.receive()
    rank = Rank(setup, channel)
    text = rank.text
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
        result = rank.base() if command["do"] == "base" else rank.variant(command["name"])
        channel.send("done", **result)


def run_rank(serve: Callable[[Channel], None]) -> NoReturn:
    """Answer the parent through ``serve`` until it is gone, tell it every failure, and end this process."""
    # Ctrl-C in the terminal is the parent's to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(*conversation())
    code = 0
    try:
        serve(channel)
    except (ParentGone, BrokenPipeError):
        pass
    except Exception as error:  # noqa: BLE001 - every failure is the parent's to tell
        traceback.print_exc()
        channel.send("failed", message=f"{type(error).__name__}: {error}")
        code = 1
    sys.stderr.flush()
    # Threads of a broken process group must not hold the process back.
    os._exit(code)


def main() -> None:
    run_rank(_serve)
