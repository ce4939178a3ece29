"""The frame around a message's payloads: what it belongs to, whether its sender failed, and a checksum.

A message is one contiguous uint8 tensor: 64 bytes of header, then the payloads of its layers in order. Its size is
known to both sides beforehand, so nothing in it says how much to read. The header is compared, never obeyed.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from thinwire.kernels import FORMAT_VERSION, checksum

HEADER_BYTES = 64
SIZE_BYTES = HEADER_BYTES + 64
"""A message that holds nothing but the size of another one."""
_MAGIC = b"thin"
_FIELDS = struct.Struct("<4sHHIIIQQ")
_OK, _FAILED = 0, 1


class MessageError(ValueError):
    """A message is not what its receiver must expect: another step, another layout, damaged bytes."""


class PeerFailedError(RuntimeError):
    """Another rank said that it could not do its part of this step. Its own error is in its own log."""


def seal(message: Tensor, *, source: int, phase: int, step: int, digest: int, failed: bool = False) -> None:
    """Write the header of a message whose payloads are in place."""
    total = 0 if failed else checksum(message[HEADER_BYTES:])
    head = _FIELDS.pack(
        _MAGIC,
        FORMAT_VERSION,
        _FAILED if failed else _OK,
        source,
        phase,
        step & 0xFFFFFFFF,
        digest,
        total,
    )
    message[: _FIELDS.size].copy_(torch.frombuffer(bytearray(head), dtype=torch.uint8))


def verify(message: Tensor, *, peer: int, source: int, phase: int, step: int, digest: int) -> None:
    """Check that a message received from rank ``peer`` is the one expected, which rank ``source`` made.

    Raises:
        PeerFailedError: the sender could not do its part.
        MessageError: the message is too short, damaged, or belongs to another step, layout or format.
    """
    if message.dtype != torch.uint8 or message.dim() != 1 or message.numel() < HEADER_BYTES or message.numel() % 4:
        raise MessageError(f"a message is a 1-D uint8 tensor of at least {HEADER_BYTES} bytes and whole 32-bit words")
    magic, version, status, its_source, its_phase, its_step, its_digest, total = _FIELDS.unpack(
        message[: _FIELDS.size].numpy().tobytes()
    )
    if magic != _MAGIC:
        raise MessageError(f"what came from rank {peer} is not a thinwire message")
    if version != FORMAT_VERSION:
        raise MessageError(f"rank {peer} has wire format {version}, this rank {FORMAT_VERSION}: install one version")
    failed = status != _OK
    # Whoever could not do its part says so in its own name, also where it would have handed on another's message.
    expected = its_source if failed else source
    if (its_source, its_phase, its_step, its_digest) != (expected, phase, step & 0xFFFFFFFF, digest):
        raise MessageError(
            f"rank {peer} is out of step: its message is of step {its_step} phase {its_phase} layout "
            f"{its_digest:016x} by rank {its_source}, expected step {step} phase {phase} layout {digest:016x} by rank "
            f"{source}. Every rank must run the same number of backward passes on the same model"
        )
    if failed:
        raise PeerFailedError(f"rank {peer} failed in step {step} and said so; its own error is in its log")
    if checksum(message[HEADER_BYTES:]) != total:
        raise MessageError(f"a message from rank {peer} arrived damaged in step {step} (checksum differs)")
