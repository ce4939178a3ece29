"""What a rank has heard of the others, and which one it takes to be the cause of a failure."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

BEAT, ENDED, FAILED, LEFT, ERROR, CALLING = range(6)
"""Kinds of what a rank sends: a heartbeat; its own or another one's process has ended; an operation failed because of
a rank; it communicates no more; an error that it met; the call that it is in."""

_SILENT_BEATS = 6
_UNDER_WAY = 2
"""Collectives that may be under way at a time."""
_MAX_REPORTS = 8
"""Of each rank."""


def printable(raw: bytes) -> str:
    """Text that a peer has sent, without control characters."""
    text = raw.rstrip(b"\0").decode(errors="replace")
    return "".join(c if c.isprintable() else " " for c in text)


@dataclass(frozen=True)
class Report:
    """What ``sender`` has said of the rank ``about``; ``progress`` is the sender's, ``at`` when it came."""

    kind: int
    sender: int
    about: int
    sequence: int
    progress: int
    reason: str
    at: float


class Heartbeat(NamedTuple):
    """The last one of a rank, by its sequence number; its progress, and when it came."""

    sequence: int
    progress: int
    at: float


class Evidence:
    """Reports and heartbeats that one rank has, its own among them. It has no lock of its own.

    Args:
        rank: this rank's place among ``ranks``, which is how ranks are numbered here.
        ranks: their numbers in the default process group, for people.
        beat_s: seconds between two heartbeats of a rank.
    """

    def __init__(self, rank: int, ranks: Sequence[int], beat_s: float) -> None:
        self._rank, self._ranks, self._size, self._beat_s = rank, ranks, len(ranks), beat_s
        self.progress = 0
        """Collectives that this rank has begun."""
        self.heard: dict[int, Heartbeat] = {}
        self._reports: dict[tuple[int, int, int], Report] = {}
        """By kind, sender and the rank that it is about, the last one; in the order in which the first ones came."""
        self._awake = time.monotonic()

    def beat(self, sender: int, sequence: int, progress: int) -> bool:
        """Take in a heartbeat; returns whether it is new."""
        if sender in self.heard and self.heard[sender].sequence >= sequence:
            return False
        self.heard[sender] = Heartbeat(sequence, progress, time.monotonic())
        return True

    def note(self, report: Report) -> bool:
        """Take in a report; returns whether it is new and not one too many of its sender."""
        key = report.kind, report.sender, report.about
        before = self._reports.get(key)
        if before is not None and before.sequence >= report.sequence:
            return False
        if before is None and sum(r.sender == report.sender for r in self._reports.values()) >= _MAX_REPORTS:
            return False
        self._reports[key] = report
        return True

    def stay_awake(self) -> None:
        """Must be called at each heartbeat of this rank. After a pause its process itself was stopped: others were not
        silent, they were not heard."""
        now = time.monotonic()
        if now - self._awake > self._beat_s * 3:
            self.heard = {rank: beat._replace(at=now) for rank, beat in self.heard.items()}
        self._awake = now

    def cause(self, suspect: int | None = None, *, guess: bool = False) -> tuple[int, str] | None:
        """The rank that has caused a failure, and why.

        Args:
            suspect: the rank that the failed operation was for, if it was for one.
            guess: return the most likely rank where none is certainly gone.
        """
        return self._gone() or (self._circumstance(suspect) if guess else None)

    def ended(self, *, certain: bool = True) -> tuple[int, str] | None:
        """A rank that has certainly ended, or says that it communicates no more, which no other rank has caused.

        If not ``certain``: one that any of its neighbours takes to have ended.
        """
        reports = self._reports.values()
        ended = [r for r in reports if r.kind in (ENDED, LEFT) and r.about != self._rank and self._holds(r)]
        caused = {r.sender for r in reports if r.kind == FAILED and r.about != r.sender}
        first = next((r for r in ended if r.about not in caused and (not certain or self._confirmed(r, ended))), None)
        if first is None:
            return None
        own = [r.reason for r in ended if r.about == r.sender == first.about]
        return first.about, own[0] if own else first.reason

    def _gone(self) -> tuple[int, str] | None:
        """A rank that has `ended`, or is silent."""
        if (ended := self.ended()) is not None:
            return ended
        now = time.monotonic()
        reports = self._reports.values()
        accused = next((r for r in reports if r.kind == FAILED and r.about == self._rank != r.sender), None)
        if accused is not None and "heartbeat" in accused.reason:
            return self._rank, accused.reason
        if now - self._awake > self._beat_s * 3:
            # This process itself was stopped, and has not yet read what came meanwhile.
            return None
        for distance in range(1, self._size):
            for rank in ((self._rank + distance) % self._size, (self._rank - distance) % self._size):
                if rank in self.heard and now - self.heard[rank].at > self._beat_s * _SILENT_BEATS:
                    silence = now - self.heard[rank].at
                    return rank, f"no heartbeat has come from it for {silence:.1f} s: it is stopped, or cut off"
        return None

    def _confirmed(self, report: Report, ended: Sequence[Report]) -> bool:
        """Whether the rank itself, or both of its neighbours in the ring that are left, say that it has ended: one that
        loses its own connections takes its neighbours to be gone."""
        if report.about == report.sender:
            return True
        neighbours = {(report.about + side) % self._size for side in (1, -1)} - {r.about for r in ended}
        return neighbours <= {r.sender for r in ended if r.about == report.about}

    def _holds(self, report: Report) -> bool:
        """Whether nothing has come since from the rank that is said to have ended."""
        return report.kind == LEFT or report.about not in self.heard or self.heard[report.about].at <= report.at

    def _circumstance(self, suspect: int | None) -> tuple[int, str] | None:
        """The most likely cause where no rank is certainly gone."""
        if (unconfirmed := self.ended(certain=False)) is not None:
            return unconfirmed
        progress = {rank: beat.progress for rank, beat in self.heard.items()} | {self._rank: self.progress}
        failed = [r for r in self._reports.values() if r.kind == FAILED]
        # Who accuses another one was waiting for it.
        accusers = {r.sender for r in failed if r.about != r.sender}
        last = min(progress, key=lambda rank: (progress[rank], rank in accusers, rank))
        calls = [r for r in self._reports.values() if r.kind == CALLING and r.reason]
        others = progress.keys() - {r.sender for r in calls}
        # Ranks that have gone on to something else will not come; ones that are behind may.
        if calls and others and 2 * len(calls) <= self._size and all(progress[r] > calls[0].progress for r in others):
            missing = ", ".join(str(self._ranks[rank]) for rank in sorted(others))
            return calls[0].sender, f"it is in {calls[0].reason}, which all ranks must call, and rank {missing} has not"
        if len(progress) == self._size and progress[last] < max(progress.values()):
            return last, (
                f"it is alive, and has begun {progress[last]} collectives where others have begun "
                f"{max(progress.values())}: it is stuck or late"
            )
        accused = [r.about for r in failed if r.about != r.sender]
        votes = Counter([rank for rank in accused if rank not in accusers] or accused)
        if votes:
            about = votes.most_common(1)[0][0]
            return about, "it is alive, and its connections are broken"
        return None if suspect is None else (suspect, "it did not answer")

    def accusation(self) -> Report | None:
        """The first report of a rank that failed because of another one, which has not failed because of a third."""
        accusations = [r for r in self._reports.values() if r.kind == FAILED and r.about != r.sender]
        accusers = {r.sender for r in accusations}
        return next((r for r in accusations if r.about not in accusers), None)

    def present_error(self) -> Report | None:
        """The first error that a rank has met in the collectives that are under way."""
        errors = [r for r in self._reports.values() if r.kind == ERROR and r.sender != self._rank]
        return min((r for r in errors if r.progress >= self.progress - _UNDER_WAY), key=lambda r: r.at, default=None)
