"""Links that stand for the paper's: slower by as much as what is timed here has fewer values to send a second."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from experiments.framework.study import ScaleT, Study
from experiments.framework.timing import rate_text, shown_rate
from experiments.papers.aqsgd.tasks import FineTuning
from experiments.papers.aqsgd.timing import Computed, PipelineTiming
from experiments.tasks.models import Model
from thinwire_tools.lab import parse_rate

PAPER_VALUES = 1024 * 1600
"""Of the activation of a micro-batch of one sample of GPT2-1.5B (appendix C)."""
PAPER_COMPUTE_S = 0.045 + 0.135
"""Of a micro-batch, forward and backward (table 3)."""


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
