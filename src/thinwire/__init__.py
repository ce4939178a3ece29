"""Train over thin wires: compressed gradients for distributed PyTorch."""

from thinwire.attach import compress
from thinwire.collectives import MessageError, PeerFailedError, TransportError
from thinwire.compressors import Cast, Compressor, MinMax, RandK, Raw, ef, parse, register
from thinwire.plan import Plan
from thinwire.wire import DisagreementError, ParityError, Stats, StatsLogger, Timeline, Wire, merge_timelines

__all__ = [
    "Cast",
    "Compressor",
    "DisagreementError",
    "MessageError",
    "MinMax",
    "ParityError",
    "PeerFailedError",
    "Plan",
    "RandK",
    "Raw",
    "Stats",
    "StatsLogger",
    "Timeline",
    "TransportError",
    "Wire",
    "compress",
    "ef",
    "merge_timelines",
    "parse",
    "register",
]
