"""The header of a message: the step and layout that it belongs to, what its sender did to it, and a checksum.

A message is one contiguous uint8 tensor: a header of 64 bytes, then the payloads of its layers in order. Both sides
know its size beforehand, so the header has no sizes: it is compared with what the receiver expects, and nothing is
read according to it.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from thinwire.collectives.errors import PeerFailedError
from thinwire.kernels import FORMAT_VERSION, checksum

HEADER_BYTES = 64
SIZE_BYTES = HEADER_BYTES + 64
"""Size of a message that contains only the size of another one."""
_MAGIC = b"thin"
_FIELDS = struct.Struct("<4sHHIIIQQ")
_OK, _FAILED, _DIVIDED = 0, 1, 2
_DIVIDED_MASK = 0xFFFFFFFFFFFFFFFF
"""Mask of the checksum of divided values, so that no damage makes them valid as others."""


class MessageError(ValueError):
    """A message is not the one that its receiver expects: it is of another step or layout, or damaged."""


def seal(
    message: Tensor, *, source: int, phase: int, step: int, digest: int, failed: bool = False, divided: bool = False
) -> None:
    """Write the header of a message whose payloads are in place. ``divided``: see `verify`."""
    total = 0 if failed else checksum(message[HEADER_BYTES:]) ^ (_DIVIDED_MASK if divided else 0)
    head = _FIELDS.pack(
        _MAGIC,
        FORMAT_VERSION,
        _FAILED if failed else _DIVIDED if divided else _OK,
        source,
        phase,
        step & 0xFFFFFFFF,
        digest,
        total,
    )
    message[: _FIELDS.size].copy_(torch.frombuffer(bytearray(head), dtype=torch.uint8))


def verify(message: Tensor, *, peer: int, source: int, phase: int, step: int, digest: int) -> bool:
    """Check that a message received from rank ``peer`` is the expected one, which rank ``source`` made.

    Returns:
        Whether its values were multiplied by `thinwire.kernels.before_sum` of the factor of the sum, because partial
        sums might overflow.

    Raises:
        PeerFailedError: The sender failed.
        MessageError: The message is too short, damaged, or belongs to another step, layout or format.
    """
    if message.dtype != torch.uint8 or message.dim() != 1 or message.numel() < HEADER_BYTES or message.numel() % 4:
        raise MessageError(f"a message is a 1-D uint8 tensor of at least {HEADER_BYTES} bytes and whole 32-bit words")
    magic, version, status, sent_source, sent_phase, sent_step, sent_digest, total = _FIELDS.unpack(
        message[: _FIELDS.size].numpy().tobytes()
    )
    if magic != _MAGIC:
        raise MessageError(f"rank {peer} sent bytes that are not a thinwire message")
    if version != FORMAT_VERSION:
        raise MessageError(f"rank {peer} has wire format {version}, this rank {FORMAT_VERSION}: install one version")
    failed, divided = status not in (_OK, _DIVIDED), status == _DIVIDED
    # A rank that failed seals the message as its own, also where it would have forwarded another rank's.
    expected = sent_source if failed else source
    if (sent_source, sent_phase, sent_step, sent_digest) != (expected, phase, step & 0xFFFFFFFF, digest):
        raise MessageError(
            f"rank {peer} is out of step: its message is of step {sent_step} phase {sent_phase} layout "
            f"{sent_digest:016x} by rank {sent_source}, expected step {step} phase {phase} layout {digest:016x} "
            f"by rank {source}. Every rank must run the same number of backward passes on the same model"
        )
    if failed:
        text = f"rank {peer} failed in step {step}; its own error is in its log"
        raise PeerFailedError(text, rank=peer)
    if checksum(message[HEADER_BYTES:]) ^ (_DIVIDED_MASK if divided else 0) != total:
        raise MessageError(f"a message from rank {peer} arrived damaged in step {step} (checksum differs)")
    return divided
