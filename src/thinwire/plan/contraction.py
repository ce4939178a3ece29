"""The share of its input that a compressor loses: the constant c_Q of AQ-SGD's Theorem 3.1, and error feedback."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

from thinwire.arguments import warn_caller
from thinwire.compressors import Coded, Compressor, Raw, Wrapper

LARGEST = math.sqrt(0.5)
"""Upper bound of c_Q (Theorem 3.1). Beyond 1, messages run away from activations; in between, they follow, but the
theorem does not say how fast."""


def lost_share(coder: Coded, x: Tensor) -> float:
    """Return ``‖x − Q(x)‖ / ‖x‖`` of a change (samples, elements), its elements in the order of coding."""
    return float(torch.linalg.vector_norm(coder.roundtrip(x) - x) / torch.linalg.vector_norm(x))


@lru_cache
def gaussian_lost_share(coder: Coded) -> float:
    """Return the share that a compressor loses of normally distributed values, of samples of 256."""
    if isinstance(coder, Raw):
        return 0.0
    return lost_share(
        coder, torch.randn(64, 256, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
    )


def check_contraction(coder: Coded) -> None:
    """Warn of a Q that loses more of Gaussian changes than Theorem 3.1 admits, ``E‖x − Q(x)‖ < √½ ‖x‖``.

    The theorem asks this of every x, and a single large value among zeros is worse than Gaussian ones for every
    quantizer of few bits; a Q that fails here will not train.
    """
    lost = gaussian_lost_share(coder)
    if lost >= LARGEST:
        warnings.warn(
            f"{coder} loses {lost:.2f} of the norm of a Gaussian change, and AQ-SGD converges below {LARGEST:.2f} "
            "(Theorem 3.1), because what both sides keep must not move away from the activations: round to the "
            "nearest, share a scale among fewer values (bucket=), or take more bits",
            stacklevel=2,
        )


def check_feedback(compressors: Iterable[Compressor]) -> None:
    """Warn of each of ``compressors`` that has error feedback and an error that can exceed its input."""
    for compressor in dict.fromkeys(compressors):
        if isinstance(compressor, Wrapper) and not compressor.coder.traits.contracts:
            warn_caller(
                f"{compressor}: {compressor.inner} can err by more than its input, so that the residual of ef() "
                "grows from step to step and training diverges: give it more bits, or smaller buckets, or no ef()"
            )
