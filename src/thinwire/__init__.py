"""Train over thin wires: compressed gradients for distributed PyTorch."""

from thinwire.attach import compress
from thinwire.collectives import MessageError, PeerFailedError, TransportError
from thinwire.compressors import Cast, Compressor, MinMax, RandK, Raw, ef, parse, register
from thinwire.plan import Plan
from thinwire.wire import DisagreementError, ParityError, Stats, Wire

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
    "TransportError",
    "Wire",
    "compress",
    "ef",
    "parse",
    "register",
]
