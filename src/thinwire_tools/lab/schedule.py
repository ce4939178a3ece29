"""Events of ranks and links while a command runs in the lab: ranks die, stand still and join, links break."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, cast, get_args

from thinwire_tools.lab.units import parse_time

Kind = Literal["kill", "pause", "cut", "join"]
_FORM = re.compile(r"(\d+)@([\d.]+\s*[a-z]+)(?:\.\.([\d.]+\s*[a-z]+))?")
_SPANS = ("pause", "cut")


@dataclass(frozen=True)
class Event:
    """One event of a rank.

    ``"kill"`` ends it with SIGKILL, ``"pause"`` stops its processes from ``at_s`` to ``until_s``, ``"cut"`` takes the
    link of its node down for as long, and ``"join"`` starts it, for the first time or again.
    """

    kind: Kind
    rank: int
    at_s: float
    """Seconds after the first rank was started."""
    until_s: float | None = None

    @classmethod
    def parse(cls, kind: Kind, text: str) -> Event:
        """Parse ``"1@60s"``, or ``"1@30s..45s"`` for one that lasts.

        Raises:
            ValueError: ``text`` is not of this form, or a time is not one.
        """
        match, lasts = _FORM.fullmatch(text.strip()), kind in _SPANS
        if match is None or lasts != (match[3] is not None):
            example = "1@30s..45s, a rank and two times" if lasts else "1@60s, a rank and a time"
            raise ValueError(f"{kind} {text!r} is not of the form {example}")
        at_s = parse_time(match[2])
        until_s = parse_time(match[3]) if lasts else None
        if until_s is not None and until_s <= at_s:
            raise ValueError(f"{kind} {text!r} ends before it begins")
        return cls(kind, int(match[1]), at_s, until_s)


def read_schedule(lines: Iterable[str]) -> list[Event]:
    """Return the events of a file: one a line, as ``kill 1@60s``; what follows ``#`` is a comment.

    Raises:
        ValueError: a line is not an event; names the line.
    """
    events = []
    for number, line in enumerate(lines, 1):
        words = line.split("#")[0].split(maxsplit=1)
        if not words:
            continue
        if words[0] not in get_args(Kind) or len(words) < 2:
            raise ValueError(f"line {number} of the schedule is {line.strip()!r}, not an event as in: kill 1@60s")
        events.append(Event.parse(cast("Kind", words[0]), words[1]))
    return events


def check_schedule(events: Iterable[Event], num_ranks: int) -> list[Event]:
    """Return the events in their order in time.

    Raises:
        ValueError: there is no such rank, or a rank joins while it runs.
    """
    events = sorted(events, key=lambda event: event.at_s)
    absent = late_ranks(events)
    for event in events:
        if event.rank >= num_ranks:
            raise ValueError(f"{event.kind} of rank {event.rank}: there are ranks 0 to {num_ranks - 1}")
        if event.kind == "join" and event.rank not in absent:
            raise ValueError(f"rank {event.rank} joins at {event.at_s:g} s, and runs already: kill it before")
        if event.kind in ("kill", "pause") and event.rank in absent:
            raise ValueError(f"{event.kind} of rank {event.rank} at {event.at_s:g} s, when it does not run")
        if event.kind == "join":
            absent.discard(event.rank)
        elif event.kind == "kill":
            absent.add(event.rank)
    return events


def late_ranks(events: Iterable[Event]) -> set[int]:
    """Return ranks that are not there from the beginning: their first event, of starts and ends, is to join."""
    first: dict[int, Kind] = {}
    for event in sorted(events, key=lambda event: event.at_s):
        if event.kind in ("kill", "join"):
            first.setdefault(event.rank, event.kind)
    return {rank for rank, kind in first.items() if kind == "join"}
