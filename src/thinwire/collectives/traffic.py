"""What goes from whom to whom in one collective: known to every rank beforehand, and the sizes of all its messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Outgoing(NamedTuple):
    """A message that one rank sends to one rank or to several."""

    phase: int
    """Tells its sender's messages apart; receivers know it by sender and phase."""
    num_bytes: int
    """Its size, at most."""
    receivers: tuple[int, ...]
    late: bool = False
    """Whether its size is told first, so that its receive is posted later (`Exchange.expect`)."""
    maker: int | None = None
    """The rank whose message it hands on, verbatim; None if it is its own."""


Traffic = Sequence[Sequence[Outgoing]]
"""By rank, what it sends: a pure function of the layout."""


def arriving(traffic: Traffic, rank: int) -> dict[tuple[int, int], Outgoing]:
    """By phase and sender, what ``rank`` receives."""
    found = [(peer, message) for peer, messages in enumerate(traffic) for message in messages]
    return {(message.phase, peer): message for peer, message in found if rank in message.receivers}


def sent_bytes(traffic: Traffic, rank: int) -> int:
    """Bytes that ``rank`` hands to its transport, at most."""
    return sum(message.num_bytes * len(message.receivers) for message in traffic[rank])


def num_phases(traffic: Traffic) -> int:
    """Tags that it takes between any two ranks."""
    return 1 + max((message.phase for messages in traffic for message in messages), default=-1)
