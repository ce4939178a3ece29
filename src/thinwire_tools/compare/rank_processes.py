"""Rank processes from their parent's side: it starts them, sends them commands as JSON lines, and ends them.

Nothing that a rank sends is evaluated. A rank that ends, fails or falls silent becomes a `RankFailed`, which carries
the last lines of its log.
"""

from __future__ import annotations

import dataclasses
import json
import os
import selectors
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from thinwire_tools.compare.forked import ForkedProcess
from thinwire_tools.exits import CommandError
from thinwire_tools.lab import Link, Loopback

_LOG_LINES = 12
_START_TIMEOUT_S = 120.0
# Time after one rank's failure in which the others may show that theirs was first.
_AFTERMATH_S = 5.0
_CHUNK = 65536

OnEvent = Callable[[int, dict[str, Any]], None]


class RankFailed(CommandError, RuntimeError):
    """A rank ended, failed or fell silent: the text names it, how, and the last lines of its log."""

    def __init__(self, rank: int, why: str, log: str) -> None:
        super().__init__(f"rank {rank}: {why}")
        self.rank, self.why, self.log = rank, why, log
        self.details = log


def _ignore(*_: Any) -> None:
    """Do nothing, for events and holds that need no action."""


class _Rank:
    """One rank's process, its pipes and its log."""

    def __init__(self, module: str, link: Link, rank: int, log: Path) -> None:
        self.rank, self.log = rank, log
        log.write_bytes(b"")
        self.process = ForkedProcess(module, link.namespaces(rank), log)
        self.held = False
        self.answer: dict[str, Any] | None = None
        self.failure: str | None = None
        self._partial = b""

    @property
    def answers(self) -> FileIO:
        return self.process.stdout

    def send(self, command: dict[str, Any]) -> None:
        if not self.process.send(command):
            self.failure = "it is gone"

    def receive(self) -> list[dict[str, Any]]:
        """Return the events received. The end of the process is noted as a failure."""
        received = os.read(self.answers.fileno(), _CHUNK)
        if not received:
            self.failure = self.failure or "it ended"
        *lines, self._partial = (self._partial + received).split(b"\n")
        return [json.loads(line) for line in lines]

    def tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_LINES:])


class RankProcesses:
    """``num_ranks`` processes that run ``module`` until `close`; a context manager.

    Args:
        link: the network of the ranks.
        setup: a dataclass that is sent to every rank first, as JSON; None where a later command suffices.
        num_ranks: number of ranks.
        folder: the folder of the logs and the rendezvous file.
        name: the name of these ranks within ``folder``.
        timeout_s: timeout of the ranks' process group. A rank that sends nothing for twice as long has failed.
        module: a module with a ``main()`` that answers commands (`thinwire_tools.compare.rank_program`).

    Raises:
        RankFailed: a rank did not start.
    """

    def __init__(
        self,
        link: Link,
        setup: Any,
        num_ranks: int,
        *,
        folder: Path,
        name: str,
        timeout_s: float,
        module: str = "thinwire_tools.compare.compare_rank",
    ) -> None:
        self.timeout_s = timeout_s
        self._selector = selectors.DefaultSelector()
        self._ranks: list[_Rank] = []
        command = {
            "do": "setup",
            "task": setup and dataclasses.asdict(setup),
            "num_ranks": num_ranks,
            "rendezvous": str(folder / f"{name}.rendezvous"),
            "timeout_s": timeout_s,
        }
        try:
            for number in range(num_ranks):
                rank = _Rank(module, link, number, folder / f"{name}-rank{number}.log")
                self._ranks.append(rank)
                self._selector.register(rank.answers, selectors.EVENT_READ, rank)
                rank.send({**command, "rank": number})
            self.about = self._collect(_ignore, _ignore, _START_TIMEOUT_S)[0]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def process(self, rank: int) -> ForkedProcess:
        """Return the process of ``rank``."""
        return self._ranks[rank].process

    def run(
        self, command: dict[str, Any], on_event: OnEvent = _ignore, on_hold: Callable[[str], None] = _ignore
    ) -> list[dict[str, Any]]:
        """Make all ranks carry out ``command``; return their answers, by rank.

        ``on_event(rank, event)`` is called for each event that a rank sends on the way, ``on_hold(at)`` when all ranks
        wait at a hold, before they are released.

        Raises:
            RankFailed: a rank failed. These processes are of no further use then.
        """
        for rank in self._ranks:
            rank.send(command)
        # A step may take as long as the process group waits, and ends with an error of its own then.
        return self._collect(on_event, on_hold, 2 * self.timeout_s)

    def close(self) -> None:
        """End all ranks. May be called again."""
        for rank in self._ranks:
            rank.process.close()
        self._ranks.clear()
        self._selector.close()

    def _collect(self, on_event: OnEvent, on_hold: Callable[[str], None], silence_s: float) -> list[dict[str, Any]]:
        for rank in self._ranks:
            rank.answer = None
        while any(rank.answer is None for rank in self._ranks):
            ready = self._selector.select(silence_s)
            if not ready:
                silent = next(rank for rank in self._ranks if rank.answer is None)
                raise RankFailed(silent.rank, f"sent nothing for {silence_s:.0f} s", silent.tail())
            for key, _ in ready:
                self._handle(key.data, on_event)
            failed = next((rank for rank in self._ranks if rank.failure), None)
            if failed is not None:
                raise self._root_failure(failed, on_event)
            self._release(on_hold)
        return [rank.answer for rank in self._ranks if rank.answer is not None]

    def _handle(self, rank: _Rank, on_event: OnEvent) -> None:
        for event in rank.receive():
            if event["event"] == "hold":
                rank.held, self._hold = True, event["at"]
            elif event["event"] == "done":
                rank.answer = event
            elif event["event"] == "failed":
                rank.failure = event["message"]
            else:
                on_event(rank.rank, event)

    def _release(self, on_hold: Callable[[str], None]) -> None:
        """Release the ranks from a hold once all have reached it."""
        if not all(rank.held for rank in self._ranks):
            return
        on_hold(self._hold)
        for rank in self._ranks:
            rank.held = False
            rank.send({"do": "go"})

    def _root_failure(self, first: _Rank, on_event: OnEvent) -> RankFailed:
        """Return the failure that caused the others: of a rank that a signal ended, if there is one, else ``first``'s.

        Events that the other ranks still send are handled meanwhile.
        """
        until = time.monotonic() + _AFTERMATH_S
        ended = False
        while not ended and time.monotonic() < until:
            ended = all(rank.process.poll() is not None for rank in self._ranks)
            for key, _ in self._selector.select(0.0 if ended else 0.05):
                self._handle(key.data, on_event)
                if key.data.failure:
                    self._selector.unregister(key.fileobj)
        killed = [rank for rank in self._ranks if (rank.process.poll() or 0) < 0]
        rank = killed[0] if killed else first
        code = rank.process.poll()
        why = f"ended by signal {-code}" if code is not None and code < 0 else rank.failure or "it ended"
        return RankFailed(rank.rank, why, rank.tail())


@contextmanager
def launch_ranks(
    module: ModuleType, setup: Any, num_ranks: int, network: Link | None, *, timeout_s: float, name: str = "rank"
) -> Iterator[tuple[RankProcesses, Path]]:
    """Start ranks that run ``module`` on ``network``, or else on loopback, and a folder that lives as long as they do.

    ``setup`` is the dataclass that they are sent first.
    """
    with tempfile.TemporaryDirectory(prefix="thinwire-compare-") as folder:
        options: dict[str, Any] = {"folder": Path(folder), "timeout_s": timeout_s, "module": module.__name__}
        with RankProcesses(network or Loopback(num_ranks), setup, num_ranks, name=name, **options) as ranks:
            yield ranks, Path(folder)
