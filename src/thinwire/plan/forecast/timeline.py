"""Arrival times of messages that queue on a link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Transfer:
    """The time that the communication of one bucket takes."""

    alone_s: float
    """Seconds from ready to arrived, if nothing else is sent."""
    after_s: float
    """At least, after the bucket before it has arrived: bytes queue, latencies do not."""
    cpu_s: float = 0.0
    """Processor time, part of both."""
    codec_s: float = 0.0
    """The part of ``cpu_s`` that nothing overlaps with: encoding and decoding."""


def finish(
    ready: Sequence[float], transfers: Sequence[Transfer], *, shared: float = 0.0, depth: int | None = None
) -> list[float]:
    """The time at which each bucket has arrived.

    Args:
        ready: seconds since the step began at which each would be ready if nothing were sent.
        transfers: what each takes.
        shared: share of the transfers' processor time that backward loses, as of `Pace`.
        depth: how many may be under way at once; any number if None.
    """
    done: list[float] = []
    spans: list[tuple[float, float, float]] = []
    for i, (at, transfer) in enumerate(zip(ready, transfers, strict=True)):
        begins = at + _lost(at, spans, shared)
        if depth is not None and i >= depth:
            begins = max(begins, done[i - depth])
        # A core that backward uses, too, encodes at half its speed as long as that lasts.
        slowed = shared * min(transfer.codec_s, max(0.0, ready[-1] - begins))
        before = done[-1] if done else 0.0
        done.append(max(begins + transfer.alone_s + slowed, before + transfer.after_s))
        spans.append((max(begins, before), done[-1], transfer.cpu_s))
    return done


def _lost(at: float, spans: Sequence[tuple[float, float, float]], shared: float) -> float:
    """Seconds by which what backward would have reached at ``at`` is late: transfers took the core for so long."""
    late = 0.0
    for _ in range(50 if shared and spans else 0):
        now = at + late
        spent = sum(cpu * _part(now, start, end) for start, end, cpu in spans)
        if shared * spent - late < 1e-7:
            break
        late = shared * spent
    return late


def _part(now: float, start: float, end: float) -> float:
    return min(1.0, max(0.0, (now - start) / (end - start))) if end > start else float(now >= end)
