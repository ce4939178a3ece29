"""Methods of sending activations timed against each other, and the parts of a step by themselves."""
# No `from __future__ import annotations` here: methods and tasks are made of plain values.

import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist

from experiments.framework.rank import Call, Rank, Timed
from experiments.framework.study import Scale, ScaleT, Study
from experiments.framework.timing import Timing, rate_text, shown_rate
from experiments.papers.aqsgd.methods import Method
from experiments.papers.aqsgd.stages import Part, Pipe, build
from experiments.papers.aqsgd.tasks import FineTuning
from experiments.papers.aqsgd.trainings import BURST_BYTES, FirstTraining
from experiments.tasks.images import Model
from thinwire_tools import plots
from thinwire_tools.lab import parse_rate

_REPEATS, _WIRE_REPEATS = 12, 9
_WARM_UP_STEPS = 2

# --- on a rank


class TimedPipe(Timed):
    """One pipeline, past its first visits of samples."""

    stages: ClassVar[tuple[str, ...]] = ("encode_s", "decode_s", "store_s", "agree_s")

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._batches = cycle([ids for epoch in range(4) for ids in pipe.order(0, epoch)])
        self.train(_WARM_UP_STEPS)
        before = pipe.sent_bytes
        self.train(1)
        self._step_bytes = float(pipe.sent_bytes - before)

    def train(self, steps: int) -> None:
        for ids in islice(self._batches, steps):
            self._pipe.step(ids, self._pipe.task.learning_rate)

    def counters(self) -> dict[str, Any]:
        return self._pipe.stage.stats.to_dict()

    def payload_bytes(self) -> float:
        return self._step_bytes

    def close(self) -> None:
        self._pipe.close()


def enter(rank: Rank, task: FineTuning, methods: Sequence[Method], kind: type[Pipe], folder: Path) -> dict[str, Any]:
    """Build a pipeline for each of ``methods`` and train it for a few steps."""
    folders = (folder / f"timed{number}" for number in range(len(methods)))
    pipes = (kind(task, method, 0, None, own) for method, own in zip(methods, folders, strict=True))
    return rank.entered([TimedPipe(pipe) for pipe in pipes])


def compute(rank: Rank, task: FineTuning, num_stages: int, repeats: int) -> dict[str, Any]:
    """Median seconds of this stage's forward and backward pass over a micro-batch, as in a step: all micro-batches
    forward, then all back, all stages at once; without messages, but with as many cores for each."""
    index = rank.rank % num_stages
    part = Part(build(task, None), index, num_stages, half=task.half)
    tokens, _ = task.tuned_on(torch.arange(task.micro_batch))
    first = index == 0
    x = tokens if first else torch.randn(*tokens.shape, task.model.width)
    seconds: list[tuple[float, float]] = []
    for _ in range(_WARM_UP_STEPS + repeats):
        rank.channel.hold("compute")
        begun = time.perf_counter()
        outs = [part(x if first else x.detach().requires_grad_()) for _ in range(task.num_micro)]
        between = time.perf_counter()
        for out in outs:
            out.float().square().mean().backward()
        ended = time.perf_counter()
        seconds.append(((between - begun) / task.num_micro, (ended - between) / task.num_micro))
    forward, backward = zip(*seconds[_WARM_UP_STEPS:], strict=True)
    return {"forward_s": median(forward), "backward_s": median(backward)}


def wire(rank: Rank, num_bytes: int, sender: int, receiver: int, repeats: int) -> dict[str, Any]:
    """Median seconds, on the sender, by which a message of so many bytes and its answer take longer than a message
    of one byte and its answer: processes that wake up are no communication."""
    answer = torch.zeros(1, dtype=torch.uint8)
    seconds: dict[int, list[float]] = {num_bytes: [], 1: []}
    rank.channel.hold("wire")
    for _ in range(1 + repeats):
        for size, times in seconds.items():
            message = torch.zeros(size, dtype=torch.uint8)
            started = time.perf_counter()
            if rank.rank == sender:
                dist.send(message, receiver)
                dist.recv(answer, receiver)
            elif rank.rank == receiver:
                dist.recv(message, sender)
                dist.send(answer, sender)
            times.append(time.perf_counter() - started)
    return {"seconds": max(0.0, median(seconds[num_bytes][1:]) - median(seconds[1][1:]))}


# --- in the parent


@dataclass(frozen=True)
class Computed:
    """Seconds of a micro-batch's passes through the slowest stage."""

    forward_s: float
    backward_s: float

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


class PipelineTiming(Timing):
    """A `Timing` of methods between stages, one on each rank, ``num_stages`` in a pipeline."""

    _enters: ClassVar[Call] = staticmethod(enter)
    _burst_bytes: ClassVar[int | None] = BURST_BYTES

    def __init__(
        self, *, emulated: bool, num_ranks: int, num_stages: int | None = None, pipe: type[Pipe] = Pipe
    ) -> None:
        super().__init__("links", emulated=emulated, num_ranks=num_ranks)
        self._num_stages, self._pipe = num_stages or num_ranks, pipe

    def __enter__(self) -> Self:
        super().__enter__()
        # Stores on disk, of every timed model its own.
        self._stores = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="thinwire-aqsgd-"))
        self._entries = 0
        return self

    def compute(self, task: FineTuning) -> Computed:
        """What stages take by themselves.

        Raises:
            RankFailedError: a rank did not make it.
        """
        answers = self.call(compute, task=task, num_stages=self._num_stages, repeats=_REPEATS)
        return Computed(*(max(answer[name] for answer in answers) for name in ("forward_s", "backward_s")))

    def wire(self, num_bytes: int, rate: str | None) -> float:
        """Seconds that so many bytes take from the first stage to the second.

        Raises:
            RankFailedError: a rank did not make it.
        """
        self.shape(rate)
        answers = self.call(wire, num_bytes=num_bytes, sender=0, receiver=1, repeats=_WIRE_REPEATS)
        return float(answers[0]["seconds"])

    def _entering(self, model: Model) -> dict[str, Any]:
        self._entries += 1
        return {"kind": self._pipe, "folder": Path(self._stores) / str(self._entries)}


# --- links that stand for the paper's

PAPER_VALUES = 1024 * 1600
"""Of the activation of a micro-batch of one sample of GPT2-1.5B (appendix C)."""
PAPER_COMPUTE_S = 0.045 + 0.135
"""Of a micro-batch, forward and backward (table 3)."""


@dataclass(frozen=True, kw_only=True)
class LinkedScale(Scale):
    """``rounds`` turns of every method that is timed, over links of ``rates``: the paper's, the slowest first, which
    links have scaled (`OverLinks.scaled`)."""

    rounds: int = 6
    rates: tuple[str, ...] = ("100mbit", "300mbit", "500mbit", "1gbit", "10gbit")

    def adapted(self, **options: Any) -> Self:
        if options.get("rate") is not None:
            raise ValueError("--rate: links have the paper's rates, scaled")
        return super().adapted(**options)


@dataclass
class OverLinks(Study[ScaleT], ABC):
    """A study with links of scaled rates."""

    _computed: Computed | None = None

    @property
    @abstractmethod
    def timed(self) -> FineTuning:
        """What is timed, and what rates are scaled by."""

    @abstractmethod
    def timing(self) -> PipelineTiming:
        """Ranks that are timed."""

    def first(self) -> FirstTraining:
        """Weights that trainings start from."""
        folder = self.kept("folder", lambda: tempfile.TemporaryDirectory(prefix="thinwire-aqsgd-"))
        return self.kept("first", lambda: nullcontext(FirstTraining(Path(folder))))

    @property
    def model(self) -> Model:
        """What is timed, as timings take it."""
        return Model("gpt", "GPT", "GPT2-1.5B", self.timed, self.timed.batch, "sequences/s", 0)

    def computed(self) -> Computed:
        """Seconds of a micro-batch of what is timed, measured once."""
        if self._computed is None:
            self._computed = self.timing().compute(self.timed)
        return self._computed

    @property
    def slowdown(self) -> float:
        """What the paper's rates are divided by, so that a value is sent for as many times longer than it computes."""
        ours = self.timed.message_values / self.computed().seconds
        return (PAPER_VALUES / PAPER_COMPUTE_S) / ours

    def scaled(self, rate: str) -> str | None:
        """The rate of the links that stand for the paper's; None for loopback."""
        return rate_text(parse_rate(rate) / self.slowdown) if self.emulated else None


def where(rate: str, link: str | None) -> str:
    """The paper's rate, and that of the link here, for people."""
    return f"{shown_rate(rate)} (here {'loopback' if link is None else shown_rate(link)})"


def draw_rates(
    study: OverLinks[Any], picture: str, title: str, methods: Sequence[Method], per_s: Mapping[str, Mapping[str, float]]
) -> None:
    """Draw the sequences a second of each method against the paper's rates."""
    figure, (axes,) = plots.canvas(1, titles=[title], x="the paper's rate", y="sequences/s")
    shown = study.scale.rates
    rates = [parse_rate(rate) / 1e9 for rate in shown]
    for method in methods:
        style = "--" if method.store == "disk" else "-"
        values = [per_s[method.name][rate] for rate in shown]
        axes.plot(rates, values, style, color=method.color, marker="o", label=method.title)
    axes.set(xscale="log")
    axes.set_xticks(rates, [shown_rate(rate) for rate in shown], rotation=30)
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    plots.save(figure, study.picture(picture))
