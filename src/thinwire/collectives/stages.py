"""What a collective is made of beside its messages: stages that can be timed, and a way to run it to its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Clock(Protocol):
    """Times the stages of a collective."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Time what runs inside as stage ``encode``, ``reduce``, ``decode`` or ``wire``."""
        ...


class NoClock:
    """Times nothing."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()


def complete(collective: Iterator[None]) -> None:
    """Run a collective to its end."""
    for _ in collective:
        pass
