"""Checks of parameters and tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

GRADIENT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that compressors take. They compute in fp32."""


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


def check_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Raise an error unless a parameter is an integer in [low, high]."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{name} must be {bounds}, not {value}")


def check_share(name: str, value: Any) -> None:
    """Raise an error unless a parameter is a number in (0, 1]."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, not {value!r}")
    if not 0 < value <= 1:
        raise ValueError(f"{name} must be above 0 and at most 1, not {value!r}")


def check_choice(name: str, value: Any, choices: Sequence[str | int]) -> None:
    """Raise an error unless a parameter is one of a few values."""
    if value not in choices:
        raise ValueError(f"{name} must be {' or '.join(map(str, choices))}, not {value!r}")
