"""Methods of sending activations timed against each other, and the parts of a step by themselves."""

from __future__ import annotations

import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

from experiments.framework.rank import Rank
from experiments.framework.study import Scale, Study
from experiments.framework.timing import Timing, rate_text, shown_rate
from experiments.papers.aqsgd.methods import Method
from experiments.papers.aqsgd.stages import Part, build
from experiments.papers.aqsgd.tasks import TIMED, FineTuning
from experiments.papers.aqsgd.trainings import FirstTraining, Trained
from experiments.tasks.images import Model
from thinwire_tools import plots
from thinwire_tools.lab import parse_rate

_REPEATS, _WIRE_REPEATS = 12, 9
_WARM_UP_STEPS = 2

# --- on a rank


def compute(rank: Rank, task: FineTuning, num_stages: int) -> dict[str, Any]:
    """Median seconds of this stage's forward and backward pass over a micro-batch, as in a step: all micro-batches
    forward, then all back, all stages at once; without messages, but with as many cores for each."""
    index = rank.rank % num_stages
    part = Part(build(task, None), index, num_stages, half=task.half)
    tokens, _ = task.tuned_on(torch.arange(task.micro_batch))
    first = index == 0
    x = tokens if first else torch.randn(*tokens.shape, task.model.width)
    seconds: list[tuple[float, float]] = []
    for _ in range(_WARM_UP_STEPS + _REPEATS):
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


def wire(rank: Rank, num_bytes: int) -> dict[str, Any]:
    """Median seconds, on the first rank, by which a message of so many bytes to the second one and its answer take
    longer than a message of one byte and its answer: processes that wake up are no communication."""
    answer = torch.zeros(1, dtype=torch.uint8)
    seconds: dict[int, list[float]] = {num_bytes: [], 1: []}
    rank.channel.hold("wire")
    for _ in range(1 + _WIRE_REPEATS):
        for size, times in seconds.items():
            message = torch.zeros(size, dtype=torch.uint8)
            started = time.perf_counter()
            if rank.rank == 0:
                dist.send(message, 1)
                dist.recv(answer, 1)
            elif rank.rank == 1:
                dist.recv(message, 0)
                dist.send(answer, 0)
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

    def __init__(self, *, emulated: bool, num_ranks: int, num_stages: int | None = None) -> None:
        # The burst of a slow link is two full frames, so that no part of a message is free.
        super().__init__("links", emulated=emulated, num_ranks=num_ranks, links={"burst_bytes": 2 * 1514})
        self._num_stages = num_stages or num_ranks

    def compute(self, task: FineTuning) -> Computed:
        """What stages take by themselves.

        Raises:
            RankFailedError: a rank did not make it.
        """
        answers = self.call(compute, task=task, num_stages=self._num_stages)
        return Computed(*(max(answer[name] for answer in answers) for name in ("forward_s", "backward_s")))

    def wire(self, num_bytes: int, rate: str | None) -> float:
        """Seconds that so many bytes take from the first stage to the second.

        Raises:
            RankFailedError: a rank did not make it.
        """
        self.shape(rate)
        return float(self.call(wire, num_bytes=num_bytes)[0]["seconds"])

    def _entering(self, model: Model) -> dict[str, Any]:
        return {"folder": self.folder}


# --- links that stand for the paper's

PAPER_VALUES = 1024 * 1600
"""Of the activation of a micro-batch of one sample of GPT2-1.5B (appendix C)."""
PAPER_COMPUTE_S = 0.045 + 0.135
"""Of a micro-batch, forward and backward (table 3)."""


@dataclass(frozen=True, kw_only=True)
class LinkedScale(Scale):
    """``rounds`` turns of every method that is timed, over links of ``rates``: the paper's, the slowest first, which
    links have scaled (`OverLinks.scaled`)."""

    timed: FineTuning = TIMED
    rounds: int = 6
    rates: tuple[str, ...] = ("100mbit", "300mbit", "500mbit", "1gbit", "10gbit")

    def adapted(self, **options: Any) -> Self:
        if options.get("rate") is not None:
            raise ValueError("--rate: links have the paper's rates, scaled")
        return super().adapted(**options)


LinkedScaleT = TypeVar("LinkedScaleT", bound=LinkedScale)


@dataclass
class OverLinks(Study[LinkedScaleT], ABC):
    """A study with links of scaled rates."""

    _computed: Computed | None = None

    @property
    def timed(self) -> FineTuning:
        """What is timed, and what rates are scaled by."""
        return self.scale.timed

    @abstractmethod
    def timing(self) -> PipelineTiming:
        """Ranks that are timed."""

    def first(self) -> FirstTraining:
        """Weights that trainings start from."""
        folder = self.kept("folder", lambda: tempfile.TemporaryDirectory(prefix="thinwire-aqsgd-"))
        return self.kept("first", lambda: nullcontext(FirstTraining(Path(folder))))

    def run(
        self, num_ranks: int, task: FineTuning, method: Method, title: str, *, completions: bool = False
    ) -> list[Trained]:
        """A training from every seed, unless it has been.

        Raises:
            RankFailedError: a rank did not make it.
            ParityError: both sides of a boundary, or replicas, do not hold the same.
        """
        on_step, trainings = self.reporter(title), self.trainings(num_ranks)
        options: dict[str, Any] = {"on_step": on_step, "teller": num_ranks - 1, "completions": completions}
        options["more"] = lambda: {"weights": self.first().weights(task, on_step)}
        answers = (trainings.train(task, method, seed, **options) for seed in self.seeds)
        return [Trained.of(task, one) for one in answers]

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
