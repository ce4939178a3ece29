"""Checks of parameters and tensors."""

from __future__ import annotations

import torch
from torch import Tensor

GRADIENT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of the gradients that compressors take. They compute in fp32."""


def not_finite(values: Tensor) -> Tensor:
    """Return NaN if any of ``values`` is NaN or Inf, else 0. Added to a result, it keeps NaN from being lost."""
    if not values.numel():
        return torch.zeros((), dtype=torch.float32, device=values.device)
    low, high = torch.aminmax(values)  # a tenth of the time that a norm takes
    return low.float() * 0.0 + high.float() * 0.0


def check_dtype(dtype: torch.dtype, compressor: object) -> None:
    """Raise a TypeError if gradients of ``dtype`` cannot be compressed."""
    if dtype not in GRADIENT_DTYPES:
        raise TypeError(
            f"{compressor} takes float32, bfloat16 or float16, not {dtype}. "
            "Leave such layers raw with exclude=[...], or train them in one of these dtypes."
        )
