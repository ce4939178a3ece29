"""What is known of a training under FSDP2."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Self

from experiments.framework.training import by_rank, slowest
from thinwire_tools.compare.tasks import GPTTask, probe_steps


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

    @classmethod
    def of(cls, task: GPTTask, answers: Sequence[dict[str, Any]]) -> Self:
        """Return what shards told of their training (`Rank.train`)."""
        first = answers[0]
        return cls(
            probe_steps=tuple(probe_steps(task)),
            probes=tuple(map(_perplexity, by_rank(answers, "scores"))),
            step_s=slowest(answers),
            perplexity=_perplexity([answer["held_out"] for answer in answers]),
            master_perplexity=_perplexity([answer["master"] for answer in answers]),
            learn_s=max(answer["learn_s"] for answer in answers),
            step_bytes=tuple(first["step_bytes"]) if first["plan"] else (),
            plan=first["plan"],
        )

    @property
    def learn_share(self) -> float:
        """Of the training without it, at the median step's pace."""
        return self.learn_s / (median(self.step_s) * len(self.step_s))


def _perplexity(parts: Sequence[tuple[float, int]]) -> float:
    """Of every rank's sum of the loss and number of tokens; infinite where training diverged."""
    loss = math.fsum(total for total, _ in parts) / sum(count for _, count in parts)
    return math.exp(loss) if math.isfinite(loss) else math.inf
