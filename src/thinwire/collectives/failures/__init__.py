"""Which rank is to blame for a failure: heartbeats between ranks, and reports that outlive any of them.

A collective that fails says little about the cause. gloo reports a closed connection or a timeout, and names at most
the peer that it waited for, which may itself have waited for the rank that died. So every rank has a thread that
exchanges heartbeats and reports over TCP connections of its own, in a ring (`detector`): a rank is connected to the
next one and to the one before, and passes on what is new to it. Where a rank dies, its neighbours see their connections
close and report it; where several die, every part of the ring that is left lies beside one of them. No rank is special:
PyTorch's store, which lives on rank 0, is needed only to exchange the addresses (`rendezvous`). What a rank has heard
gives the cause (`evidence`).
"""

from thinwire.collectives.failures.detector import FailureDetector
from thinwire.collectives.failures.rendezvous import announce_error

__all__ = ["FailureDetector", "announce_error"]
