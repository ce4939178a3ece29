"""Methods of sending weights and gradients timed against each other, and the bytes that they put on a link."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, ClassVar

from experiments.framework.timing import Place, TimedMethod, Timing
from experiments.papers.qsdp import rank as rank_module
from experiments.tasks.models import Model


class ShardedTiming(Timing):
    """A `Timing` of methods under FSDP2, in steps of ``num_micro`` micro-batches."""

    _program: ClassVar[ModuleType] = rank_module

    def __init__(self, place: Place, *, emulated: bool, num_ranks: int, num_micro: int) -> None:
        super().__init__(place, emulated=emulated, num_ranks=num_ranks)
        self._num_micro = num_micro

    def _entering(self, model: Model, methods: Sequence[TimedMethod]) -> dict[str, Any]:
        return {**super()._entering(model, methods), "num_micro": self._num_micro}
