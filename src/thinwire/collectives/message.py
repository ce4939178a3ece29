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
_FIELDS = struct.Struct("<4sHHIIQQ")
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
        (source << 8 | phase) & 0xFFFFFFFF,
        step & 0xFFFFFFFF,
        digest,
        total,
    )
    message[: _FIELDS.size].copy_(torch.frombuffer(bytearray(head), dtype=torch.uint8))


def verify(message: Tensor, *, source: int, phase: int, step: int, digest: int) -> None:
    """Check that a received message is the one expected from rank ``source``.

    Raises:
        PeerFailedError: the sender could not do its part.
        MessageError: the message is too short, damaged, or belongs to another step, layout or format.
    """
    if message.dtype != torch.uint8 or message.dim() != 1 or message.numel() < HEADER_BYTES:
        raise MessageError(f"a message is a 1-D uint8 tensor of at least {HEADER_BYTES} bytes")
    magic, version, status, sender, its_step, its_digest, total = _FIELDS.unpack(
        message[: _FIELDS.size].numpy().tobytes()
    )
    if magic != _MAGIC:
        raise MessageError(f"what came from rank {source} is not a thinwire message")
    if version != FORMAT_VERSION:
        raise MessageError(f"rank {source} has wire format {version}, this rank {FORMAT_VERSION}: install one version")
    if sender != (source << 8 | phase) or its_step != step & 0xFFFFFFFF or its_digest != digest:
        raise MessageError(
            f"rank {source} is out of step: its message is of step {its_step} phase {sender & 255} layout "
            f"{its_digest:016x}, expected step {step} phase {phase} layout {digest:016x}. "
            "Every rank must run the same number of backward passes on the same model"
        )
    if status != _OK:
        raise PeerFailedError(f"rank {source} failed in step {step} and said so; its own error is in its log")
    if checksum(message[HEADER_BYTES:]) != total:
        raise MessageError(f"a message from rank {source} arrived damaged in step {step} (checksum differs)")
