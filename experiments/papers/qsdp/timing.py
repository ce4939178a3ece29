"""Methods of sending weights and gradients timed against each other, and the bytes that they put on a link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

from experiments.framework.timing import OnTurn, Place, TimedMethod, Timing
from experiments.papers.qsdp import rank as rank_module
from experiments.papers.qsdp.methods import Method
from experiments.tasks.models import Model

FULL_PACKET, FULL_PAYLOAD = 1514, 1448
"""Bytes of a full Ethernet frame, and of a message's in it: the rest are headers of Ethernet, IP and TCP."""


@dataclass(frozen=True)
class Counted:
    """Bytes of all ranks in some steps: on the nodes' interfaces, handed to the network, and by formula."""

    interface_bytes: int
    payload_bytes: float
    formula_bytes: float
    gathers: float
    reductions: float
    """Of a module, on a rank and in a step."""
    steps: int

    @property
    def without_headers(self) -> float:
        """On the interfaces, if all packets were full."""
        return self.interface_bytes * FULL_PAYLOAD / FULL_PACKET


class ShardedTiming(Timing):
    """A `Timing` of methods under FSDP2, in steps of ``num_micro`` micro-batches."""

    _program: ClassVar[ModuleType] = rank_module

    def __init__(self, place: Place, *, emulated: bool, num_ranks: int, num_micro: int) -> None:
        super().__init__(place, emulated=emulated, num_ranks=num_ranks)
        self._num_micro = num_micro

    def count(self, model: Model, method: Method, *, steps: int, num_modules: int, on_turn: OnTurn) -> Counted:
        """What ``steps`` steps put on links without a limit. ``num_modules``: those that are sharded by themselves.

        Raises:
            RankFailed: a rank did not make it.
            ValueError: there are no links, or nothing is counted of this method.
        """
        network, num_ranks = self._network, self._num_ranks
        if network is None or method.kind == "stock":
            raise ValueError(f"{method.title}: bytes are counted on emulated links, of methods that know their own")
        self._enter(model, (method,))
        seen: list[int] = []

        def on_hold(at: str) -> None:
            seen.append(sum(network.interface_bytes(rank)[0] for rank in range(num_ranks)))

        answers = self._ranks.run({"do": "turn", "which": 0, "steps": steps}, lambda *_: None, on_hold)
        on_turn(steps, method.title)
        self._leave()
        counted = [answer["counted"] for answer in answers]
        each = num_modules * steps * num_ranks
        return Counted(
            seen[-1] - seen[0],
            sum(row["payload_sent_bytes"] for row in counted),
            sum(answer["formula_bytes"] for answer in answers) * steps,
            sum(row["gathers"] for row in counted) / each,
            sum(row["reductions"] for row in counted) / each,
            steps,
        )

    def _entering(self, model: Model, methods: Sequence[TimedMethod]) -> dict[str, Any]:
        return {**super()._entering(model, methods), "num_micro": self._num_micro}
