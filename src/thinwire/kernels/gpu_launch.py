"""Launch options of the Triton kernels."""

# Triton is not installed everywhere, and its language has types of its own.
# pyright: reportMissingImports=false
from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

TILE = 2048
"""Number of elements of one program."""


def options(bits: int) -> dict[str, int | bool]:
    """Return launch options; the narrow parts of odd widths need fewer warps for loads of 128 bits a thread."""
    return {"enable_fp_fusion": False, "num_warps": 2 if bits % 2 else 4}


def on(tensor: Tensor) -> AbstractContextManager[None]:
    """Make the tensor's device the current one, on which Triton launches."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def words(key: int) -> tuple[int, int]:
    """Return the two halves of a key, less 2^31 each: int32, whatever the key."""
    return (key & 0xFFFFFFFF) - 2**31, (key >> 32 & 0xFFFFFFFF) - 2**31


def check_aligned(message: Tensor) -> None:
    """Raise ``ValueError`` unless the kernels can read 32-bit words of a message."""
    if message.data_ptr() % 4:
        raise ValueError("a message on a GPU must start at a multiple of 4 bytes: slice it at a multiple of 64")
