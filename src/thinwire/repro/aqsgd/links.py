"""Links that stand for the paper's: slower by as much as what is timed here has fewer values to send a second."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from thinwire.lab import parse_rate
from thinwire.repro.aqsgd.contest import Computed, PipelineContest
from thinwire.repro.aqsgd.tasks import FineTuning
from thinwire.repro.aqsgd.trainings import OnStep
from thinwire.repro.cgx.contest import rate_text, shown_rate
from thinwire.repro.cgx.models import Model
from thinwire.repro.parts import Parted

PAPER_VALUES = 1024 * 1600
"""Of the activation of a micro-batch of one sample of GPT2-1.5B (appendix C)."""
PAPER_COMPUTE_S = 0.045 + 0.135
"""Of a micro-batch, forward and backward (table 3)."""


class OverLinks(Parted):
    """A study with links of scaled rates; ``emulated``: they are really slow, so that times over them mean
    something."""

    scale: Any
    """Its ``seeds`` say how many trainings quality is judged of."""
    emulated: bool
    _computed: Computed | None = None

    @property
    @abstractmethod
    def timed(self) -> FineTuning:
        """What is timed, and what rates are scaled by."""

    @property
    def seeds(self) -> range:
        return range(self.scale.seeds)

    def shower(self, title: str) -> OnStep:
        """Shows steps of a training as steps of the part."""
        return lambda _, loss: self.advance(1, f"{title}: loss {loss:.2f}")

    @abstractmethod
    def contest(self) -> PipelineContest:
        """Ranks that are timed."""

    def verdict(self, holds: bool | None) -> bool | None:
        """``holds`` where it rests on times over links that are really slow."""
        return holds if self.emulated else None

    @property
    def model(self) -> Model:
        """What is timed, as contests take it."""
        return Model("gpt", "GPT", "GPT2-1.5B", self.timed, self.timed.batch, "sequences/s", 0)

    def computed(self) -> Computed:
        """Seconds of a micro-batch of what is timed, measured once."""
        if self._computed is None:
            self._computed = self.contest().compute(self.timed)
        return self._computed

    @property
    def slowdown(self) -> float:
        """What the paper's rates are divided by, so that a value travels as many times longer than it computes."""
        ours = self.timed.message_values / self.computed().seconds
        return (PAPER_VALUES / PAPER_COMPUTE_S) / ours

    def scaled(self, rate: str) -> str | None:
        """The rate of the links that stand for the paper's; None for loopback."""
        return rate_text(parse_rate(rate) / self.slowdown) if self.emulated else None

    def wire_s(self, rate: str) -> float:
        """Seconds that a micro-batch's activation and its gradient travel in 32 bits, one after the other."""
        return 64 * self.timed.message_values / (parse_rate(rate) / self.slowdown)

    def where(self, rate: str) -> str:
        """Both rates, for people."""
        link = self.scaled(rate)
        return f"{shown_rate(rate)} (here {'loopback' if link is None else shown_rate(link)})"
