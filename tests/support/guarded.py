"""Memory that ends where a page begins which nobody may touch: who reads or writes past it ends the process."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

_libc = ctypes.CDLL(None, use_errno=True)
_NOTHING = 0  # PROT_NONE


def guarded(num_bytes: int, fill: int = 0xA5) -> tuple[Tensor, Tensor]:
    """A uint8 tensor whose last byte is the last of a page, and the bytes of that mapping before it, all ``fill``."""
    page = mmap.PAGESIZE
    room = -(-max(num_bytes, 1) // page) * page
    memory = mmap.mmap(-1, room + page)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    whole[:room] = fill
    if _libc.mprotect(ctypes.c_void_p(whole.data_ptr() + room), ctypes.c_size_t(page), _NOTHING):
        raise OSError(ctypes.get_errno(), "mprotect")
    before = whole[: room - num_bytes]
    # A storage of its own: views as wider elements count from its start.
    mine = torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=room - num_bytes) if num_bytes else None
    return torch.empty(0, dtype=torch.uint8) if mine is None else mine, before


def guarded_copy(values: Tensor) -> Tensor:
    """A flat tensor's values in such memory."""
    mine, _ = guarded(values.numel() * values.element_size())
    mine.copy_(values.contiguous().view(torch.uint8))
    return mine.view(values.dtype)
