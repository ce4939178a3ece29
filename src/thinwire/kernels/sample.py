"""Distinct random indices from a key, so that ranks that share the key need not send them."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels import native
from thinwire.kernels.rng import derive_key, mix3

_ROUNDS = 6


def sample_indices(numel: int, k: int, key: int, like: Tensor | None = None) -> Tensor:
    """Return ``k`` distinct indices below ``numel`` (int64), the same on every machine, in O(k) work.

    They are on the device of ``like``, or on the CPU.

    They are the first k values of a random permutation: a Feistel network over the next power of four, whose values
    outside the range are permuted again until they fall inside.

    Raises ``ValueError`` unless 0 <= k <= numel.
    """
    if not 0 <= k <= numel:
        raise ValueError(f"cannot pick {k} distinct indices out of {numel}")
    half_bits = max(1, (max(numel - 1, 1).bit_length() + 1) // 2)
    keys = [derive_key(key, round) for round in range(_ROUNDS)]
    picked = _permute(torch.arange(k, dtype=torch.int64, device="cpu"), half_bits, keys)
    while bool((outside := picked >= numel).any()):
        picked[outside] = _permute(picked[outside], half_bits, keys)
    return picked if like is None else native.to_device(picked, like.device)


def _permute(values: Tensor, half_bits: int, keys: list[int]) -> Tensor:
    mask = (1 << half_bits) - 1
    left, right = values >> half_bits, values & mask
    for key in keys:
        left, right = right, left ^ (mix3(right, key & 0xFFFFFFFF, key >> 32) & mask)
    return left << half_bits | right
