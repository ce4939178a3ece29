"""Detection of compressors' state that makes every later mean non-finite."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from thinwire.collectives import Transport
from thinwire.compressors import not_finite
from thinwire.runtime.executor import AsyncReadback

_SUSPECT_AFTER = 3


class PoisonMonitor:
    """Detects that the state of compressors, rather than a gradient, makes means non-finite.

    A gradient of 1e38 is finite, and so may be the residual or the factor that it leaves behind. Yet what later steps
    compute with it may overflow, in every one of them: steps that are not finite leave slots as they were. All ranks
    see the same means, so they count alike. After `_SUSPECT_AFTER` steps in a row without a finite mean they compare
    whether their own gradients were finite in them; each rank looks at its own only while it counts.
    """

    def __init__(self) -> None:
        self._nonfinite_steps = 0
        self._finite_gradients = True
        self._gradients = AsyncReadback()

    def note_gradients(self, flat: Tensor) -> None:
        """Note whether this rank's gradients are finite, before anything is added to them, if the last mean was not."""
        if self._nonfinite_steps:
            self._gradients.note(not_finite(flat))

    def end_step(self, *, finite: bool) -> None:
        """Count a step whose means are known."""
        noted = [bool(torch.isfinite(value)) for value in self._gradients.read()]
        if finite:
            self._nonfinite_steps, self._finite_gradients = 0, True
            return
        self._nonfinite_steps += 1
        self._finite_gradients &= all(noted)

    @property
    def suspected(self) -> bool:
        """Whether ranks should compare what they know. The answer is the same on all of them."""
        return self._nonfinite_steps >= _SUSPECT_AFTER

    def take_finite_gradients(self) -> bool:
        """Return whether this rank's gradients were finite while it looked at them, and restart counting."""
        mine, self._finite_gradients, self._nonfinite_steps = self._finite_gradients, True, 1
        return mine

    def confirmed(self, transport: Transport) -> bool:
        """Return whether all ranks' gradients were finite: then the state is the cause. A collective call."""
        return bool(
            transport.all_gather(torch.tensor([self.take_finite_gradients()], dtype=torch.bool, device="cpu")).all()
        )

    def warn(self, step: int) -> None:
        """Warn that the state is reset."""
        warnings.warn(
            f"before step {step}, {_SUSPECT_AFTER} means in a row were not finite although all ranks' gradients were: "
            "a large gradient has left residuals or factors with which sums overflow. They start anew on all ranks "
            "(wire.stats.state_resets counts it)",
            stacklevel=2,
        )
