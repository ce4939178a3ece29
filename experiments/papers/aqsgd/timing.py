"""Methods of sending activations timed against each other, and the parts of a step by themselves."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, Self

from experiments.framework.timing import TimedMethod, Timing
from experiments.papers.aqsgd import rank as rank_module
from experiments.papers.aqsgd.tasks import FineTuning
from experiments.papers.aqsgd.trainings import BURST_BYTES
from experiments.tasks.models import Model
from thinwire_tools import lab

_REPEATS, _WIRE_REPEATS = 12, 9


@dataclass(frozen=True)
class Computed:
    """Seconds of a micro-batch's passes through the slowest stage."""

    forward_s: float
    backward_s: float

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


class PipelineTiming(Timing):
    """A `Timing` of methods between stages, one on each rank."""

    _program: ClassVar[ModuleType] = rank_module

    def __init__(self, *, emulated: bool, num_ranks: int) -> None:
        super().__init__("links", emulated=emulated, num_ranks=num_ranks)

    def __enter__(self) -> Self:
        super().__enter__()
        # Stores on disk, of every timed model its own.
        self._folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="thinwire-aqsgd-"))
        self._entries = 0
        return self

    def compute(self, task: FineTuning) -> Computed:
        """What stages take by themselves.

        Raises:
            RankFailed: a rank did not make it.
        """
        command = {"do": "compute", "task": dataclasses.asdict(task), "repeats": _REPEATS}
        answers = self._ranks.run(command, _nothing, _nothing)
        return Computed(*(max(answer[name] for answer in answers) for name in ("forward_s", "backward_s")))

    def wire(self, num_bytes: int, rate: str | None) -> float:
        """Seconds that so many bytes take from the first stage to the second.

        Raises:
            RankFailed: a rank did not make it.
        """
        self._shape(rate)
        command = {"do": "wire", "bytes": num_bytes, "sender": 0, "receiver": 1, "repeats": _WIRE_REPEATS}
        return float(self._ranks.run(command, _nothing, _nothing)[0]["seconds"])

    def _made_network(self, ranks_per_node: int) -> lab.Network:
        return lab.Network(self._num_ranks, ranks_per_node=ranks_per_node, burst_bytes=BURST_BYTES)

    def _entering(self, model: Model, methods: Sequence[TimedMethod]) -> dict[str, Any]:
        self._entries += 1
        return {
            "do": "enter",
            "task": dataclasses.asdict(model.task),
            "methods": [dataclasses.asdict(method) for method in methods],
            "folder": f"{self._folder}/{self._entries}",
        }


def _nothing(*_: Any) -> None:
    """Ignore the arguments."""
