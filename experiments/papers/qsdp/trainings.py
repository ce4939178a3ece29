"""Trainings of the chapter's tables: rank processes, their link, and every run they have made."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from types import TracebackType
from typing import Any, Self

from experiments.framework.run_cache import RunCache
from experiments.papers.qsdp import rank as rank_module
from experiments.papers.qsdp.methods import Method
from thinwire_tools import lab
from thinwire_tools.compare.rank_processes import launch_ranks
from thinwire_tools.compare.tasks import GPTTask, describe, probe_steps

_TIMEOUT_S = 180.0

OnStep = Callable[[int, float], None]
"""Called with every step's number and loss."""


@dataclass(frozen=True)
class Trained:
    """One training. ``probes`` are perplexities on a part of the held-out text, at the start and after each of
    ``probe_steps``; ``step_s`` the slowest rank's seconds of every step."""

    probe_steps: tuple[int, ...]
    probes: tuple[float, ...]
    step_s: tuple[float, ...]
    perplexity: float
    """On all held-out text, of the network that ranks compute with: of weights as they are gathered."""
    master_perplexity: float
    """Of weights as the optimizer keeps them."""
    learn_s: float
    """Seconds that learning levels took, on the slowest rank."""
    step_bytes: tuple[int, ...] = ()
    """Sent by rank 0 in every step, where something counts."""
    plan: Mapping[str, str] = field(default_factory=dict)
    """The compressor of each layer's weights and gradients in the end."""

    @property
    def learn_share(self) -> float:
        """Of the training without it, at the median step's pace."""
        return self.learn_s / (median(self.step_s) * len(self.step_s))


class Trainings:
    """Rank processes on a link of ``rate`` (None: loopback), and what they have trained; a context manager.

    What is in ``cache`` is not trained again.
    """

    def __init__(self, num_ranks: int, rate: str | None = None, cache: RunCache | None = None) -> None:
        self.num_ranks, self._rate = num_ranks, rate
        self.link: dict[str, Any] | str = "loopback"
        self._cache = cache or RunCache()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            network = None
            if self._rate is not None:
                network = stack.enter_context(lab.Network(self.num_ranks, rate=self._rate))
                self.link = network.describe()
            started = launch_ranks(rank_module, None, self.num_ranks, network, timeout_s=_TIMEOUT_S)
            self._ranks, _ = stack.enter_context(started)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def train(self, task: GPTTask, method: Method, seed: int, on_step: OnStep, *, num_micro: int = 1) -> Trained:
        """Train, unless it has been; ``num_micro``: micro-batches of a step.

        Raises:
            RankFailed: a rank did not make it.
        """
        command = {"do": "train", "task": describe(task), "method": dataclasses.asdict(method), "seed": seed}
        command["num_micro"] = num_micro
        key = {**command, "num_ranks": self.num_ranks, "rate": self._rate}
        known = self._cache.get(key)
        if known is None:
            known = {"answers": list(self._ranks.run(command, _reporter(on_step), _nothing))}
            self._cache.put(key, known)
        return _trained(task, known["answers"])


def _trained(task: GPTTask, answers: Sequence[dict[str, Any]]) -> Trained:
    count = len(answers[0]["probes"])
    return Trained(
        probe_steps=tuple(probe_steps(task)),
        probes=tuple(_perplexity([answer["probes"][at] for answer in answers]) for at in range(count)),
        step_s=tuple(max(seconds) for seconds in zip(*(answer["step_s"] for answer in answers), strict=True)),
        perplexity=_perplexity([answer["held_out"] for answer in answers]),
        master_perplexity=_perplexity([answer["master"] for answer in answers]),
        learn_s=max(answer["learn_s"] for answer in answers),
        step_bytes=tuple(answers[0]["step_bytes"]),
        plan=answers[0]["plan"],
    )


def _perplexity(parts: Sequence[tuple[float, int]]) -> float:
    """Of every rank's sum of the loss and number of tokens; infinite where training diverged."""
    loss = math.fsum(total for total, _ in parts) / sum(count for _, count in parts)
    return math.exp(loss) if math.isfinite(loss) else math.inf


def _reporter(on_step: OnStep) -> Callable[[int, dict[str, Any]], None]:
    def show(rank: int, event: dict[str, Any]) -> None:
        if rank == 0 and event["event"] == "step":
            on_step(event["step"], event["loss"])

    return show


def _nothing(*_: Any) -> None:
    """Ignore the arguments."""
