"""Slots with one value for each element of a flat tensor: as they are, or in 8 bits between steps."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from thinwire.compressors import CodecCall, Coded, Compressor, Key, MaxAbs, Piece, Segments, Slot
from thinwire.runtime.placement import LayerSpan, Placement

_PACKED_BITS = 8
_PACKED = MaxAbs(bits=_PACKED_BITS, bucket=128, rounding="stochastic")
_EXACT = MaxAbs(bits=_PACKED_BITS, bucket=128, rounding="nearest")
"""Coder with the same levels: what was packed once is packed again without an error, as a resumed run needs it."""


def returned_zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros whose memory goes back to the system when they are freed.

    An allocator keeps freed memory for later, and puts smaller tensors that stay into it: a whole model's state, once
    or several times more, until the process ends.
    """
    num_bytes = numel * dtype.itemsize
    if device.type != "cpu" or num_bytes < 1 << 20:
        return torch.zeros(numel, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE), dtype=dtype)


class Scratch:
    """Memory in fp32 for packed slots while they are open, which those that open next use again."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._lock = threading.Lock()

    def take(self, numel: int, device: torch.device) -> Tensor:
        """Return a tensor of at least ``numel`` elements, which are zero."""
        with self._lock:
            fitting = [i for i, memory in enumerate(self._free) if memory.numel() >= numel and memory.device == device]
            memory = self._free.pop(min(fitting, key=lambda i: self._free[i].numel())) if fitting else None
        if memory is None:
            return returned_zeros(numel, torch.float32, device)  # memory that nobody writes takes none
        memory[:numel].zero_()
        return memory

    def give_back(self, memory: Tensor) -> None:
        """Keep a tensor that `take` has returned: the largest ones, of two buffers, present and next values of each.

        A device's allocator knows by itself which stream still uses it.
        """
        if memory.device.type != "cpu":
            return
        with self._lock:
            self._free = sorted([*self._free, memory], key=Tensor.numel)[-4:]

    def free(self) -> None:
        """Free what is kept: DDP's first bucket has all layers, and those that take its place are smaller."""
        with self._lock:
            self._free.clear()


class FlatSlot:
    """A slot's values in this step, and those that it leaves to the next one."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.now = torch.zeros(numel, dtype=dtype, device=device)
        self.next = torch.zeros(numel, dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory in use between two steps."""
        return self.now.nbytes + self.next.nbytes

    @property
    def opened_bytes(self) -> int:
        """Bytes of memory that are in use from `open` to `close` alone."""
        return 0

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

    def __init__(self, numel: int, pieces: Iterable[LayerSpan], device: torch.device, scratch: Scratch) -> None:
        placed, end = [], 0
        for name, start, count in pieces:
            placed.append(Piece(name, start, count, 0, end, (count,)))
            end += packed_bytes(count)
        self._segments = Segments.build(placed)
        self._numel, self._device, self._scratch = numel, device, scratch
        self._packed = [torch.zeros(end, dtype=torch.uint8, device=device) for _ in range(2)]
        self.write(self._zeros())
        self._packed[1].copy_(self._packed[0])
        self._is_zero = True
        self._forget_opened()

    @property
    def num_bytes(self) -> int:
        return sum(packed.nbytes for packed in self._packed)

    @property
    def opened_bytes(self) -> int:
        return self.now.nbytes + self.next.nbytes

    def open(self) -> None:
        self._opened = tuple(self._scratch.take(self._numel, self._device) for _ in range(2))
        # Under FSDP2 nothing writes what a rank owns itself: it stays zero.
        self.now, self.next = (memory[: self._numel] for memory in self._opened)
        if not self._is_zero:
            self._decode(self.now)

    def close(self, key: int) -> None:
        if not self.next.numel():  # nothing was opened: a step before compression starts
            return
        self._pack(_PACKED, self.next, self._packed[1], key)
        for memory in self._opened:
            self._scratch.give_back(memory)
        self._forget_opened()

    def swap(self) -> None:
        self._packed.reverse()
        self._is_zero = False

    def forget_next(self) -> None:
        self._packed[1] = self._packed[0]

    def read(self, *, after: bool = False) -> Tensor:
        values = self._zeros()
        self._decode(values, after=after)
        return values

    def write(self, values: Tensor, *, after: bool = False) -> None:
        self._is_zero = False
        self._pack(_EXACT, values, self._packed[after], 0)

    def _forget_opened(self) -> None:
        self._opened: tuple[Tensor, ...] = ()
        self.now = self.next = torch.empty(0, dtype=torch.float32, device=self._device)

    def _decode(self, values: Tensor, *, after: bool = False) -> None:
        _PACKED.decode(self._packed[after], values, CodecCall(self._segments))

    def _pack(self, coder: Coded, values: Tensor, message: Tensor, key: int) -> None:
        coder.encode(values, message, CodecCall(self._segments, Key(key, key)))

    def _zeros(self) -> Tensor:
        return returned_zeros(self._numel, torch.float32, self._device)


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
    slot: Slot, placement: Placement, compressors: Mapping[str, Compressor], device: torch.device, scratch: Scratch
) -> FlatSlot:
    """Return a slot of zeros for a buffer in which the layers with these compressors have it.

    ``scratch`` is memory that packed slots share while they are open.
    """
    if not is_packed(slot, compressors.values()):
        return FlatSlot(placement.numel, slot.dtype, device)
    return PackedSlot(placement.numel, [s for name in compressors for s in placement.spans(name)], device, scratch)
