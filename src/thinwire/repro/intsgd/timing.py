"""Part (b), the times: every way of sending gradients over the same slow links, in turns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import fmean, median
from types import TracebackType
from typing import Any, Self

from thinwire import lab
from thinwire.repro.crew import Nothing, crew_of
from thinwire.repro.intsgd import rank as rank_module
from thinwire.repro.intsgd.ways import Task, Way
from thinwire.repro.tasks import ScoredTask, describe

_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Times:
    """Mean seconds of a step by round: in all, of communication, and of encoding and decoding.

    Ranks share cores, and whoever is ready waits for the others: a step takes what it took the slowest rank, but
    communication, and encoding with decoding, what they took the rank that waited least.
    """

    total: tuple[float, ...]
    communication: tuple[float, ...]
    overhead: tuple[float, ...]

    def medians(self) -> dict[str, float]:
        return {name: median(values) for name, values in dataclasses.asdict(self).items()}


def over(times: Sequence[float], others: Sequence[float]) -> list[float]:
    """Ratios round by round, so that a machine that slows down slows both down."""
    return [mine / other for mine, other in zip(times, others, strict=True)]


OnTurn = Callable[[str], None]


class Contest:
    """Rank processes on links of ``rate`` (None: loopback); a context manager."""

    def __init__(self, num_ranks: int, rate: str | None) -> None:
        self._num_ranks, self._rate = num_ranks, rate
        self._stack = ExitStack()
        self.link: dict[str, Any] | str = "loopback"

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            network = lab.Network(self._num_ranks) if self._rate is not None else None
            self._network = stack.enter_context(network) if network is not None else None
            started = crew_of(rank_module, Nothing(), self._num_ranks, self._network, timeout_s=_TIMEOUT_S)
            self._crew, _ = stack.enter_context(started)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def times(
        self, task: ScoredTask, kind: Task, ways: Sequence[Way], *, rounds: int, steps: int, on_turn: OnTurn
    ) -> dict[str, Times]:
        """The times of ``ways`` by name: ``rounds`` turns of ``steps`` steps each, after one that does not count.

        Raises:
            RankFailed: a rank did not make it. The contest is of no more use then.
        """
        names = [way.name for way in ways]
        if self._network is not None:
            self._network.unshape()
        self._do({"do": "enter", "task": describe(task), "kind": kind, "ways": names})
        if self._network is not None and self._rate is not None:
            self._network.shape(self._rate)
            self.link = self._network.describe()
        found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        order = list(enumerate(names))
        for round_ in range(1 + rounds):
            # To and fro, so that none is always the first or the last.
            for which, name in order if round_ % 2 else reversed(order):
                answers = self._do({"do": "turn", "which": which, "steps": steps})
                if round_:
                    found[name].append(_turn(answers))
                on_turn(name)
        self._do({"do": "leave"})
        return {name: _times(rows) for name, rows in found.items()}

    def _do(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        return self._crew.run(command, _nothing, _nothing)


_PARTS = ("communication", "overhead")


def _turn(answers: Sequence[dict[str, Any]]) -> dict[str, float]:
    """One turn's means of steps, of what is the ranks' extreme in each."""
    pick = {"total": max, **dict.fromkeys(_PARTS, min)}
    return {
        key: fmean(extreme(by_rank) for by_rank in zip(*(answer[key] for answer in answers), strict=True))
        for key, extreme in pick.items()
    }


def _times(rows: Sequence[dict[str, float]]) -> Times:
    return Times(*(tuple(row[key] for row in rows) for key in ("total", *_PARTS)))


def _nothing(*_: Any) -> None:
    """For what need not be told."""
