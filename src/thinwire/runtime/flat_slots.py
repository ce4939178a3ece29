"""Slots with one value for each element of a flat tensor: as they are, or in 8 bits between steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from thinwire.compressors import CodecCall, Coded, Compressor, Key, MaxAbs, Piece, Segments, Slot
from thinwire.runtime.placement import LayerSpan, Placement

_PACKED_BITS = 8
_PACKED = MaxAbs(bits=_PACKED_BITS, bucket=128, rounding="stochastic")
_EXACT = MaxAbs(bits=_PACKED_BITS, bucket=128, rounding="nearest")
"""Coder with the same levels: what was packed once is packed again without an error, as a resumed run needs it."""


class FlatSlot:
    """A slot's values in this step, and those that it leaves to the next one."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.now = torch.zeros(numel, dtype=dtype, device=device)
        self.next = torch.zeros(numel, dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory in use between two steps."""
        return self.now.nbytes + self.next.nbytes

    def open(self) -> None:
        """Make ``now`` and ``next`` usable, until `close`."""

    def close(self, key: int) -> None:
        """Keep what was written to ``next``. ``key`` is that of random draws."""

    def swap(self) -> None:
        """Make the next values the present ones."""
        self.now, self.next = self.next, self.now

    def forget_next(self) -> None:
        """Free the memory of the next values, between two steps. The slot can only be read from then on."""
        self.next = self.now

    def read(self, *, after: bool = False) -> Tensor:
        """Return all present values, or with ``after`` the next ones. They may share memory with the slot."""
        return self.next if after else self.now

    def write(self, values: Tensor, *, after: bool = False) -> None:
        """Replace all present values, or with ``after`` the next ones."""
        held = self.read(after=after)
        if values is not held:
            held.copy_(values)


class PackedSlot(FlatSlot):
    """A slot that keeps values in 8 bits an element and a scale for 128 of them, rather than in 32 bits.

    Values are rounded at random, so that those that are much smaller than their neighbors are kept on average. Draws
    and scales are those of a piece, wherever it is in the tensor. Elements of no piece are zero. ``now`` and ``next``
    are in memory from `open` to `close` only.
    """

    def __init__(self, numel: int, pieces: Iterable[LayerSpan], device: torch.device) -> None:
        placed, end = [], 0
        for name, start, count in pieces:
            placed.append(Piece(name, start, count, 0, end, (count,)))
            end += packed_bytes(count)
        self._segments = Segments.build(placed)
        self._numel, self._device = numel, device
        self._packed = [torch.zeros(end, dtype=torch.uint8, device=device) for _ in range(2)]
        for after in (False, True):
            self.write(self._zeros(), after=after)
        self.now = self.next = torch.empty(0, dtype=torch.float32, device=device)

    @property
    def num_bytes(self) -> int:
        return sum(packed.nbytes for packed in self._packed)

    def open(self) -> None:
        # Under FSDP2 nothing writes what a rank owns itself: it stays zero.
        self.now, self.next = self.read(), self._zeros()

    def close(self, key: int) -> None:
        if not self.next.numel():  # nothing was opened: a step before compression starts
            return
        self._pack(_PACKED, self.next, self._packed[1], key)
        self.now = self.next = torch.empty(0, dtype=torch.float32, device=self._device)

    def swap(self) -> None:
        self._packed.reverse()

    def forget_next(self) -> None:
        self._packed[1] = self._packed[0]

    def read(self, *, after: bool = False) -> Tensor:
        values = self._zeros()
        _PACKED.decode(self._packed[after], values, CodecCall(self._segments))
        return values

    def write(self, values: Tensor, *, after: bool = False) -> None:
        self._pack(_EXACT, values, self._packed[after], 0)

    def _pack(self, coder: Coded, values: Tensor, message: Tensor, key: int) -> None:
        coder.encode(values, message, CodecCall(self._segments, Key(key, key)))

    def _zeros(self) -> Tensor:
        return torch.zeros(self._numel, dtype=torch.float32, device=self._device)


def opened(slots: Mapping[str, FlatSlot]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Open slots for a step; return their present and their next values, by name."""
    for slot in slots.values():
        slot.open()
    return {name: slot.now for name, slot in slots.items()}, {name: slot.next for name, slot in slots.items()}


def packed_bytes(numel: int) -> int:
    """Return the bytes of a piece's values in 8 bits."""
    return _PACKED.payload_bytes(numel, torch.float32)


def is_packed(slot: Slot, compressors: Iterable[Compressor]) -> bool:
    """Whether all of these compressors that have ``slot`` keep it in 8 bits."""
    kept = [mine.bits for compressor in compressors for mine in compressor.slots if mine == slot]
    return bool(kept) and all(bits == _PACKED_BITS for bits in kept)


def flat_slot(
    slot: Slot, placement: Placement, compressors: Mapping[str, Compressor], device: torch.device
) -> FlatSlot:
    """Return a slot of zeros for a buffer in which the layers with these compressors have it."""
    if not is_packed(slot, compressors.values()):
        return FlatSlot(placement.numel, slot.dtype, device)
    return PackedSlot(placement.numel, [span for name in compressors for span in placement.spans(name)], device)
