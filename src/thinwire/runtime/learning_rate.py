"""Drops of the learning rate: the steps of a schedule, which start a critical regime (thesis, section 4.6.3)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_DROP = 0.5
_ABRUPT = 2.0


class LearningRates:
    """Watches the learning rate from step to step.

    The rate *drops* where it falls to half or less in one step, and by at least twice what it fell by in the step
    before. So a schedule in steps drops, and a cosine or a line does not, even at its end: their last steps halve the
    rate, too, but each falls by about as much as the one before it.
    """

    def __init__(self, rate: float = math.nan, fall: float = 0.0, *, dropped: bool = False) -> None:
        self._rate, self._fall = rate, fall
        self.dropped = dropped
        """Whether it dropped since this was last set to False."""

    def observe(self, rate: float | None) -> None:
        """Take in the rate of the next step; None where it is not known."""
        if rate is None:
            return
        fall = max(0.0, self._rate - rate) if math.isfinite(self._rate) else 0.0
        if fall and rate <= _DROP * self._rate and fall >= _ABRUPT * self._fall:
            self.dropped = True
        self._rate, self._fall = rate, fall

    def to_tensor(self) -> Tensor:
        """For a checkpoint: three float64 values."""
        return torch.tensor([self._rate, self._fall, float(self.dropped)], dtype=torch.float64, device="cpu")

    @staticmethod
    def from_tensor(state: Tensor | None) -> LearningRates:
        """What `to_tensor` returned; a new one if there is none.

        Raises:
            ValueError: it is not three float64 values.
        """
        if state is None:
            return LearningRates()
        if not isinstance(state, Tensor) or state.dtype != torch.float64 or state.numel() != 3:
            raise ValueError("adapt/rates in the state is not three float64 values")
        rate, fall, dropped = state.reshape(-1).tolist()
        return LearningRates(rate, max(0.0, fall) if math.isfinite(fall) else 0.0, dropped=bool(dropped))
