"""Train over thin wires: compressed gradients for distributed PyTorch."""

from thinwire.attach import compress
from thinwire.collectives import MessageError, PeerFailedError, TransportError
from thinwire.compressors import Compressor, MinMax, Raw, parse, register
from thinwire.plan import Plan
from thinwire.wire import DisagreementError, Stats, Wire

__all__ = [
    "Compressor",
    "DisagreementError",
    "MessageError",
    "MinMax",
    "PeerFailedError",
    "Plan",
    "Raw",
    "Stats",
    "TransportError",
    "Wire",
    "compress",
    "parse",
    "register",
]
