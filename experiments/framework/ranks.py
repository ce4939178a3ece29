"""Rank processes of experiments: on a link or on loopback, called together, their findings kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import TracebackType
from typing import Any, Self

from experiments.framework.rank import Call, Rank
from experiments.framework.run_cache import RunCache
from thinwire_tools import lab
from thinwire_tools.ranks import launch_ranks

_TIMEOUT_S = 180.0

OnStep = Callable[[int, float], None]
"""A function that is called with every step's number and loss."""
AnyNetwork = AbstractContextManager[lab.Network | None]


class Ranks:
    """A context manager of ``num_ranks`` processes on ``network``, or on loopback. ``cache``: keeps their findings, in
    memory by default."""

    def __init__(
        self, num_ranks: int, network: AnyNetwork | None = None, cache: RunCache | None = None, name: str = "rank"
    ) -> None:
        self.num_ranks = num_ranks
        self.link: dict[str, Any] | str = "loopback"
        self.network: lab.Network | None = None
        self._made, self._name = network or nullcontext(), name
        self._cache = cache or RunCache()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.network = stack.enter_context(self._made)
            options: dict[str, Any] = {"name": self._name, "timeout_s": _TIMEOUT_S}
            started = launch_ranks(Rank, self.num_ranks, self.network, **options)
            self._ranks, self.folder = stack.enter_context(started)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def call(
        self,
        function: Call,
        *,
        hear: Callable[[dict[str, Any]], None] | None = None,
        teller: int | None = 0,
        **arguments: Any,
    ) -> list[dict[str, Any]]:
        """Return each rank's answer to a call of ``function``; ``hear`` takes the steps of rank ``teller``, or of all.

        Raises:
            RankFailed: a rank failed.
        """

        def on_event(rank: int, event: dict[str, Any]) -> None:
            if hear is not None and event["event"] == "step" and teller in (None, rank):
                hear(event)

        return self._ranks.run(function, arguments, on_event)

    def kept(self, key: dict[str, Any], make: Callable[[], Any]) -> Any:
        """Return the result of ``make``, or the earlier one under the same key by as many ranks."""
        key = {"num_ranks": self.num_ranks, **key}
        known = self._cache.get(key)
        if known is None:
            known = {"answers": make()}
            self._cache.put(key, known)
        return known["answers"]

    def shape(self, rate: str | None) -> None:
        """Set the rate of all links, or none."""
        if self.network is None:
            return
        if rate is None:
            self.network.unshape()
        else:
            self.network.shape(rate)
            self.link = self.network.describe()


def described(task: Any) -> dict[str, Any]:
    """Return a task, or a method, as a part of a key."""
    return {"kind": type(task).__qualname__, **dataclasses.asdict(task)}


def telling(on_step: OnStep) -> Callable[[dict[str, Any]], None]:
    """Return a function that tells steps of training."""
    return lambda event: on_step(event["step"], event["loss"])
