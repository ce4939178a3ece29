"""Counters in memory that several processes share: one of them increases a word, and others sleep until then."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels import native

LINE_BYTES = 64
"""Size of a cache line. Words that different processes write lie this far apart."""
_MASK32 = 0xFFFFFFFF
_MAX_WAIT_NS = 1 << 62


class Word:
    """A counter of 32 bits at ``offset`` in ``memory``, which it keeps alive. Values are taken modulo 2^32.

    ``memory``: (bytes,) uint8 on the CPU; shared by the processes that use the word, or by threads of one. Raises
    ``RuntimeError`` without the native core, ``ValueError`` for an invalid place.
    """

    __slots__ = ("_address", "_core", "_memory")

    def __init__(self, memory: Tensor, offset: int) -> None:
        self._core = native.core()
        if not memory.is_cpu or memory.dtype != torch.uint8 or memory.dim() != 1 or not memory.is_contiguous():
            raise ValueError("a word lies in a contiguous 1-D uint8 tensor of the CPU")
        address = native.address("memory", memory, torch.uint8, memory.numel()) + offset
        if not 0 <= offset <= memory.numel() - 4 or address % 4:
            raise ValueError(f"offset {offset} of {memory.numel()} bytes is no place for a word of 4 bytes")
        self._memory = memory
        self._address = address

    @property
    def value(self) -> int:
        return self._core.shared_read(self._address)

    def post(self, value: int) -> None:
        """Set the counter and wake waiting threads. Readers of the value see what this thread wrote before."""
        self._core.shared_post(self._address, value & _MASK32)

    def wait(self, value: int, *, timeout_s: float, spin_s: float = 0.0) -> bool:
        """Return whether the counter reaches ``value`` (is less than 2^31 past it) within ``timeout_s``.

        Polls for ``spin_s``, then sleeps in the kernel. Other Python threads run meanwhile.
        """
        timeout_ns, spin_ns = (min(max(0, int(s * 1e9)), _MAX_WAIT_NS) for s in (timeout_s, spin_s))
        return self._core.shared_wait(self._address, value & _MASK32, timeout_ns, spin_ns)
