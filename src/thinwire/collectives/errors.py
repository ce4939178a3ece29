"""Errors of communication, with the rank that is the cause."""

from __future__ import annotations


class CommunicationError(RuntimeError):
    """An error that another rank has caused: the base of `TransportError` and `PeerFailedError`.

    All three arguments are attributes, None where they are not known.
    """

    def __init__(
        self, message: str, *, rank: int | None = None, host: str | None = None, reason: str | None = None
    ) -> None:
        super().__init__(message)
        self.rank = rank
        """Rank that is the cause, in the default process group."""
        self.host = host
        """Name of that rank's machine."""
        self.reason = reason
        """Reason why that rank failed, such as "its process has ended"."""


class TransportError(CommunicationError):
    """The link to a rank is gone or silent. The collective cannot be finished, and the transport is unusable from now
    on."""


class PeerFailedError(CommunicationError):
    """Another rank failed and said so. Its own log has the whole error."""
