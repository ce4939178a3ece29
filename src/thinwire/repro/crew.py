"""Rank processes as their parent sees them: started, spoken to in JSON lines, ended.

Nothing that a rank says is evaluated; a rank that ends, fails or falls silent becomes a `RankFailed` that carries the
last lines of its log.
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
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Protocol, Self

from thinwire.lab import Door
from thinwire.repro.forked import Forked

_LOG_LINES = 12
_START_TIMEOUT_S = 120.0
# After one rank's failure: how long the others may take to show whether theirs came first.
_AFTERMATH_S = 5.0
_CHUNK = 65536

OnEvent = Callable[[int, dict[str, Any]], None]


class Link(Protocol):
    """What the demo needs of `thinwire.lab.Network`; `Loopback` is the other one."""

    def door(self, rank: int) -> Door: ...


class Loopback:
    """Ranks on this machine's loopback device, where no network can be emulated."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    def door(self, rank: int) -> Door:
        return Door((), {"OMP_NUM_THREADS": "1", **os.environ, "GLOO_SOCKET_IFNAME": "lo"})


class RankFailed(RuntimeError):
    """A rank ended, failed or fell silent: which, how, and the last lines of its log."""

    def __init__(self, rank: int, why: str, log: str) -> None:
        super().__init__(f"rank {rank}: {why}")
        self.rank, self.why, self.log = rank, why, log


class _Member:
    """One rank's process, its pipes and its log."""

    def __init__(self, module: str, link: Link, rank: int, log: Path) -> None:
        self.rank, self.log = rank, log
        log.write_bytes(b"")
        self.process = Forked(module, link.door(rank), log)
        self.held = False
        self.answer: dict[str, Any] | None = None
        self.failure: str | None = None
        self._partial = b""

    @property
    def answers(self) -> FileIO:
        return self.process.stdout

    def tell(self, command: dict[str, Any]) -> None:
        if not self.process.tell(command):
            self.failure = "it is gone"

    def hear(self) -> list[dict[str, Any]]:
        """Events that have arrived; notes the end of the process as a failure."""
        received = os.read(self.answers.fileno(), _CHUNK)
        if not received:
            self.failure = self.failure or "it ended"
        *lines, self._partial = (self._partial + received).split(b"\n")
        return [json.loads(line) for line in lines]

    def tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_LINES:])


class Crew:
    """``num_ranks`` rank processes, which run ``module``, that live until `close`; a context manager."""

    def __init__(
        self,
        link: Link,
        setup: Any,
        num_ranks: int,
        *,
        folder: Path,
        name: str,
        timeout_s: float,
        module: str = "thinwire.repro.demo_rank",
    ) -> None:
        self._timeout_s = timeout_s
        self._selector = selectors.DefaultSelector()
        self._members: list[_Member] = []
        told = {
            "do": "setup",
            "task": dataclasses.asdict(setup),
            "num_ranks": num_ranks,
            "rendezvous": str(folder / f"{name}.rendezvous"),
            "state": str(folder / "start.npy"),
            "timeout_s": timeout_s,
        }
        try:
            for rank in range(num_ranks):
                member = _Member(module, link, rank, folder / f"{name}-rank{rank}.log")
                self._members.append(member)
                self._selector.register(member.answers, selectors.EVENT_READ, member)
                member.tell({**told, "rank": rank})
            self.about = self._collect(_nothing, _nothing, _START_TIMEOUT_S)[0]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def run(self, command: dict[str, Any], on_event: OnEvent, on_hold: Callable[[str], None]) -> list[dict[str, Any]]:
        """Have all ranks do ``command``; the answers by rank.

        ``on_event(rank, event)`` is called for each thing a rank tells on the way, ``on_hold(at)`` when all ranks wait
        at a hold, before they are let go.

        Raises:
            RankFailed: a rank did not make it. The crew is of no more use then.
        """
        for member in self._members:
            member.tell(command)
        # A step may take as long as the process group waits, and ends with an error of its own then.
        return self._collect(on_event, on_hold, 2 * self._timeout_s)

    def close(self) -> None:
        """End all ranks. May be called again."""
        for member in self._members:
            member.process.close()
        self._members.clear()
        self._selector.close()

    def _collect(self, on_event: OnEvent, on_hold: Callable[[str], None], silence_s: float) -> list[dict[str, Any]]:
        for member in self._members:
            member.answer = None
        while any(member.answer is None for member in self._members):
            ready = self._selector.select(silence_s)
            if not ready:
                silent = next(member for member in self._members if member.answer is None)
                raise RankFailed(silent.rank, f"said nothing for {silence_s:.0f} s", silent.tail())
            for key, _ in ready:
                self._take(key.data, on_event)
            broken = next((member for member in self._members if member.failure), None)
            if broken is not None:
                raise self._failed(broken, on_event)
            self._let_go(on_hold)
        return [member.answer for member in self._members if member.answer is not None]

    def _take(self, member: _Member, on_event: OnEvent) -> None:
        for event in member.hear():
            if event["event"] == "hold":
                member.held, self._at = True, event["at"]
            elif event["event"] == "done":
                member.answer = event
            elif event["event"] == "failed":
                member.failure = event["message"]
            else:
                on_event(member.rank, event)

    def _let_go(self, on_hold: Callable[[str], None]) -> None:
        if not all(member.held for member in self._members):
            return
        on_hold(self._at)
        for member in self._members:
            member.held = False
            member.tell({"do": "go"})

    def _failed(self, first: _Member, on_event: OnEvent) -> RankFailed:
        """The failure to tell: that of a rank which a signal ended, if any, since it makes the others fail too. What
        the others still tell is heard."""
        until = time.monotonic() + _AFTERMATH_S
        ended = False
        while not ended and time.monotonic() < until:
            ended = all(member.process.poll() is not None for member in self._members)
            for key, _ in self._selector.select(0.0 if ended else 0.05):
                self._take(key.data, on_event)
                if key.data.failure:
                    self._selector.unregister(key.fileobj)
        killed = [member for member in self._members if (member.process.poll() or 0) < 0]
        member = killed[0] if killed else first
        code = member.process.poll()
        why = f"ended by signal {-code}" if code is not None and code < 0 else member.failure or "it ended"
        return RankFailed(member.rank, why, member.tail())


def _nothing(*_: Any) -> None:
    """For what need not be told."""


@dataclass(frozen=True)
class Nothing:
    """A setup for ranks that are told their task later."""


@contextmanager
def crew_of(
    module: ModuleType, setup: Any, num_ranks: int, network: Link | None, *, timeout_s: float, name: str = "rank"
) -> Iterator[tuple[Crew, Path]]:
    """Ranks that run ``module`` on ``network``, or else on loopback, and a folder that lives as long as they do.

    ``setup``: the dataclass that they are told first.
    """
    with tempfile.TemporaryDirectory(prefix="thinwire-repro-") as folder:
        options: dict[str, Any] = {"folder": Path(folder), "timeout_s": timeout_s, "module": module.__name__}
        with Crew(network or Loopback(), setup, num_ranks, name=name, **options) as crew:
            yield crew, Path(folder)
