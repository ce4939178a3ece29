"""One rank of the AQ-SGD paper's experiments: has a stage of a pipeline, trains on command, and is timed.

Commands: ``setup`` (first), ``train`` (one method from one seed), ``enter`` (build pipelines, warm up), ``turn`` (some
steps of one of them), ``compute`` (of a stage alone), ``wire`` (of a message alone), ``leave``. The conversation is
that of the demo's ranks.
"""

# No `from __future__ import annotations` here: methods and tasks are made of plain values.

import gc
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from experiments.papers.aqsgd.methods import Method
from experiments.papers.aqsgd.stages import Part, Pipe, build
from experiments.papers.aqsgd.tasks import FineTuning
from thinwire_tools.compare.rank_program import Channel, join, run_rank

_WARM_UP_STEPS = 2
_STAGES = ("encode_s", "decode_s", "store_s", "agree_s")
_PROMPTS, _PROMPT_SHARE = 8, 0.5


@dataclass(frozen=True)
class Asked:
    """Of a training, what is wanted beside it: loss on what is held out, at both ends; completions; checkpoints in a
    folder every so many steps, going on from the last of them, and rank and step at which a process kills itself."""

    held_out: bool = True
    completions: bool = False
    save_every: int = 0
    resume: bool = False
    dies: tuple[int, int] | None = None


class Rank:
    """What stays alive over all trainings and timings: the process group."""

    task_type: type[FineTuning] = FineTuning
    method_type: type[Method] = Method
    pipe_type: type[Pipe] = Pipe

    def __init__(self, setup: dict[str, Any], channel: Channel) -> None:
        self.channel = channel
        self.rank, self.num_ranks = join(setup)
        self.timed: list[tuple[Pipe, Any]] = []

    @property
    def place(self) -> tuple[int, int]:
        """This rank's stage, and of how many."""
        return self.rank, self.num_ranks

    def train(
        self, task: FineTuning, method: Method, seed: int, weights: Path | None, folder: Path, asked: Asked
    ) -> Any:
        """Losses of every step and on what is held out (where the last stage is), seconds of every step, what the
        stage counted, hashes of what it keeps at each boundary."""
        pipe = self.pipe_type(task, method, seed, weights, folder / "store")
        checkpoint = folder / f"state{self.rank}"
        start = _load(pipe, checkpoint) if asked.resume else 0
        record: dict[str, Any] = {"losses": [], "held_out": [], "right": [], "step_s": []}
        if asked.held_out:
            _look(pipe, record)
        self.channel.hold("train")
        batches = [ids for epoch in range(task.epochs) for ids in pipe.order(seed, epoch)]
        for step in range(start, len(batches)):
            if asked.dies == (self.rank, step):
                os.kill(os.getpid(), signal.SIGKILL)
            started = time.perf_counter()
            loss = pipe.step(batches[step], task.rate(step))
            record["step_s"].append(time.perf_counter() - started)
            record["losses"].append(loss)
            self.channel.send("step", step=step + 1, loss=loss)
            if asked.save_every and (step + 1) % asked.save_every == 0:
                _save(pipe, checkpoint, step + 1)
        if asked.held_out:
            _look(pipe, record)
        record["stats"] = pipe.stats()
        record["kept"] = pipe.kept()
        record["links"] = [{name: link._asdict() for name, link in row.items()} for row in pipe.stage.links]
        record["start"] = start
        if asked.completions:
            tokens, at = _prompts(task)
            record["completions"] = pipe.complete(tokens, at)[:_PROMPTS].tolist()
            record["prompted"] = at
            record["text"] = tokens[:_PROMPTS].tolist()
        pipe.close()
        del pipe
        gc.collect()
        return record

    def enter(self, task: FineTuning, methods: Sequence[dict[str, Any]], folder: Path) -> dict[str, Any]:
        """Build a pipeline for each of ``methods`` and train it for a few steps."""
        for number, method in enumerate(methods):
            pipe = self.pipe_type(task, self.method_type(**method), 0, None, folder / f"timed{number}")
            batches = cycle([ids for epoch in range(4) for ids in pipe.order(0, epoch)])
            _train(pipe, batches, _WARM_UP_STEPS)
            self.timed.append((pipe, batches))
        return {"payload_bytes": [self._step_bytes(*timed) for timed in self.timed], "layers": [[] for _ in methods]}

    def turn(self, which: int, steps: int) -> dict[str, Any]:
        """Train ``steps`` steps; the mean seconds of one, and those in each stage of communication."""
        pipe, batches = self.timed[which]
        before = pipe.stage.stats.to_dict()
        self.channel.hold("turn")
        started = time.perf_counter()
        _train(pipe, batches, steps)
        seconds = (time.perf_counter() - started) / steps
        self.channel.hold("turned")
        after: dict[str, Any] = pipe.stage.stats.to_dict()
        return {"seconds": seconds, "stages": {name: (after[name] - before[name]) / steps for name in _STAGES}}

    def compute(self, task: FineTuning, repeats: int) -> dict[str, Any]:
        """Median seconds of this stage's forward and backward pass over a micro-batch, as in a step: all micro-batches
        forward, then all back, all stages at once; without messages, but with as many cores for each."""
        index, num_stages = self.place
        part = Part(build(task, None), index, num_stages, half=task.half)
        tokens, _ = task.tuned_on(torch.arange(task.micro_batch))
        first = index == 0
        x = tokens if first else torch.randn(*tokens.shape, task.model.width)
        seconds: list[tuple[float, float]] = []
        for _ in range(_WARM_UP_STEPS + repeats):
            self.channel.hold("compute")
            begun = time.perf_counter()
            outs = [part(x if first else x.detach().requires_grad_()) for _ in range(task.num_micro)]
            between = time.perf_counter()
            for out in outs:
                out.float().square().mean().backward()
            ended = time.perf_counter()
            seconds.append(((between - begun) / task.num_micro, (ended - between) / task.num_micro))
        forward, backward = zip(*seconds[_WARM_UP_STEPS:], strict=True)
        return {"forward_s": median(forward), "backward_s": median(backward)}

    def wire(self, num_bytes: int, sender: int, receiver: int, repeats: int) -> dict[str, Any]:
        """Median seconds, on the sender, by which a message of so many bytes and its answer take longer than a message
        of one byte and its answer: processes that wake up are no communication."""
        answer = torch.zeros(1, dtype=torch.uint8)
        seconds: dict[int, list[float]] = {num_bytes: [], 1: []}
        self.channel.hold("wire")
        for _ in range(1 + repeats):
            for size, times in seconds.items():
                message = torch.zeros(size, dtype=torch.uint8)
                started = time.perf_counter()
                if self.rank == sender:
                    dist.send(message, receiver)
                    dist.recv(answer, receiver)
                elif self.rank == receiver:
                    dist.recv(message, sender)
                    dist.send(answer, sender)
                times.append(time.perf_counter() - started)
        return {"seconds": max(0.0, median(seconds[num_bytes][1:]) - median(seconds[1][1:]))}

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Do what one command says."""
        task = self.task_type.from_json(command["task"]) if "task" in command else self.task_type()
        match command["do"]:
            case "train":
                fields = command["asked"]
                asked = Asked(**{**fields, "dies": tuple(fields["dies"]) if fields["dies"] else None})
                method, seed = self.method_type(**command["method"]), int(command["seed"])
                return self.train(task, method, seed, _path(command["weights"]), Path(command["folder"]), asked)
            case "enter":
                return self.enter(task, command["methods"], Path(command["folder"]))
            case "turn":
                return self.turn(int(command["which"]), int(command["steps"]))
            case "compute":
                return self.compute(task, int(command["repeats"]))
            case "wire":
                return self.wire(*(int(command[name]) for name in ("bytes", "sender", "receiver", "repeats")))
            case _:
                return self.leave()

    def leave(self) -> dict[str, Any]:
        for pipe, _ in self.timed:
            pipe.close()
        self.timed.clear()
        gc.collect()
        return {}

    def _step_bytes(self, pipe: Pipe, batches: Any) -> float:
        """That this rank sends in a step of a method that is past its first visits."""
        before = pipe.sent_bytes
        _train(pipe, batches, 1)
        return float(pipe.sent_bytes - before)


def _train(pipe: Pipe, batches: Any, steps: int) -> None:
    for ids in islice(batches, steps):
        pipe.step(ids, pipe.task.learning_rate)


def _look(pipe: Pipe, record: dict[str, Any]) -> None:
    score = pipe.held_out()
    if score is not None:
        record["held_out"].append(score[0])
        record["right"].append(score[1])


def _save(pipe: Pipe, path: Path, step: int) -> None:
    """All that a stage needs to go on bit by bit; the file is there whole or not at all."""
    new = path.with_suffix(".new")
    torch.save({"step": step, **pipe.state_dict()}, new)
    new.replace(path)


def _load(pipe: Pipe, path: Path) -> int:
    state = torch.load(path, weights_only=True)
    pipe.load_state_dict(state)
    return int(state["step"])


def _prompts(task: FineTuning) -> tuple[Tensor, int]:
    """Windows that are held out, and from where on they are to be completed."""
    tokens, _ = next(task.held_out())
    return tokens, round(_PROMPT_SHARE * task.model.context)


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def serve(channel: Channel, kind: type[Rank] = Rank) -> None:
    """Do what the parent says, as a rank of this kind."""
    rank = kind(channel.receive(), channel)
    channel.send("done")
    while True:
        channel.send("done", **rank.answer(channel.receive()))


def main() -> None:
    run_rank(serve)
