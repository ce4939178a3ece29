"""The messages of one collective: senders, receivers and sizes, which every rank knows beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Outgoing(NamedTuple):
    """A message that a rank sends to one or several ranks."""

    phase: int
    """Number of the message among those of its sender. Receivers identify it by phase and sender."""
    num_bytes: int
    """Size of the message, or an upper bound if ``late``."""
    receivers: tuple[int, ...]
    late: bool = False
    """Whether the size is sent first, so that the receive is posted later (`Messages.expect`)."""
    source: int | None = None
    """Rank that made the message, if its sender forwards it unchanged; None if the sender made it."""


Traffic = Sequence[Sequence[Outgoing]]
"""Messages that each rank sends: a pure function of the layout."""


def arriving(traffic: Traffic, rank: int) -> dict[tuple[int, int], Outgoing]:
    """Return the messages that ``rank`` receives, by phase and sender."""
    everything = [(peer, message) for peer, messages in enumerate(traffic) for message in messages]
    return {(message.phase, peer): message for peer, message in everything if rank in message.receivers}


def sent_bytes(traffic: Traffic, rank: int) -> int:
    """Return the bytes that ``rank`` hands to its transport. An upper bound if sizes depend on the data."""
    return sum(message.num_bytes * len(message.receivers) for message in traffic[rank])


def num_phases(traffic: Traffic) -> int:
    """Return the number of tags that the traffic needs between any two ranks."""
    return 1 + max((message.phase for messages in traffic for message in messages), default=-1)
