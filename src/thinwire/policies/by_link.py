"""Compressors for the stage boundaries of a pipeline: as many bits as cost no time, by the rate of each link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from thinwire.arguments import check_int
from thinwire.compressors import Compressor, parse

_FORWARD = (
    *(f"delta(gaussian(bits={bits}))" for bits in (2, 3)),
    *(f"delta(maxabs(bits={bits}))" for bits in (4, 6, 8)),
)
_BACKWARD = tuple(f"maxabs(bits={bits})" for bits in (4, 6, 8))


@dataclass(frozen=True)
class ByLink:
    """A policy for stage boundaries by the measured rates of their links: ``compress_stage(..., adapt=ByLink())``.

    A pipeline is as fast as the slowest of its stages and links. So the slowest link gets the fewest bytes there are to
    choose from, unless more take no longer than a stage computes, and each other one as many as take no longer than
    that. Forward and backward are chosen apart.

    Args:
        forward, backward: the choices, in any order. Either all of ``forward`` are ``delta(...)`` or none.
        after: training steps before the first choice, with the stages' own ``forward=`` and ``backward=``; in
            them computing is timed. Links are measured in between two steps, which takes a tenth of a second or so for
            each, more where one is slower than 10 Mbit/s.
        every: steps between later choices; None: there are none.

    Raises:
        TypeError, ValueError: an option is invalid.
    """

    forward: Sequence[str | Compressor] = _FORWARD
    backward: Sequence[str | Compressor] = _BACKWARD
    after: int = 4
    every: int | None = None

    def __post_init__(self) -> None:
        for name in ("forward", "backward"):
            given = getattr(self, name)
            if isinstance(given, str | Compressor) or not given:
                raise ValueError(f"{name} must be a list of compressors to choose from, not {given!r}")
            object.__setattr__(self, name, tuple(parse(spec) for spec in given))
        check_int("after", self.after, 1)
        if self.every is not None:
            check_int("every", self.every, 1)

    def __str__(self) -> str:
        lists = (", ".join(map(str, listed)) for listed in (self.forward, self.backward))
        return "; ".join((*lists, f"after={self.after}", f"every={self.every}"))


class LinkChoice(NamedTuple):
    """The choice for one direction of a stage boundary, and the measurements behind it."""

    compressor: str
    message_bytes: float
    """Bytes of a micro-batch's message."""
    rate: float
    """Rate of the link in bytes per second."""
    compute_s: float
    """Seconds that the slowest stage computes for a micro-batch."""

    @property
    def wire_s(self) -> float:
        """Seconds of a micro-batch's message."""
        return self.message_bytes / self.rate


def choose_by_link(
    message_bytes: Sequence[Sequence[float]], rates: Sequence[float], compute_s: float
) -> tuple[int, ...]:
    """Choose for each boundary the most bytes that do not make the pipeline slower.

    Args:
        message_bytes: the bytes of a micro-batch's message, by boundary and choice.
        rates: the rate of each boundary's link, in bytes per second.
        compute_s: seconds of a micro-batch in the slowest stage.

    Returns:
        An index into the choices of each boundary.
    """
    seconds = [[size / rate for size in sizes] for sizes, rate in zip(message_bytes, rates, strict=True)]
    allowed = max([compute_s, *(min(times) for times in seconds)])
    chosen = []
    for sizes, times in zip(message_bytes, seconds, strict=True):
        fitting = [i for i, took in enumerate(times) if took <= allowed]
        chosen.append(max(fitting, key=lambda i: sizes[i]))
    return tuple(chosen)
