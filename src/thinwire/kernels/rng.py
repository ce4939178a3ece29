"""Counter-based random bits: a draw is a pure function of its key and of the element it is for.

Keys are made on the host by a chain of splitmix64 steps; the draws of a row come from :func:`mix3`, a 32-bit
counter hash with a 64-bit key, which is cheap on vector units that lack 64-bit multiplication.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from thinwire.kernels import native
from thinwire.kernels.format import GROUP

MASK64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xED5AD4BB, 0xAC4C1B51, 0x31848BAB)
SHIFTS = (17, 11, 15, 14)


def splitmix64(value: int) -> int:
    """Apply the finalizer of splitmix64 (Steele, Lea, Flood 2014): a bijection of 64-bit integers."""
    value &= MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)


def derive_key(*parts: int) -> int:
    """Return a 64-bit key from any number of integers (seed, step, rank, stream …); their order matters.

    Each part is taken modulo 2^64. Returns an unsigned 64-bit integer.
    """
    key = GOLDEN
    for part in parts:
        key = splitmix64((key ^ (part & MASK64)) + GOLDEN)
    return key


def site_id(name: str) -> int:
    """Return the 63-bit number of a name (a layer's, say), the same on every machine; it fits an int64 tensor."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def row_key(key: int, site: int) -> tuple[int, int]:
    """Return the two 32-bit key words of one row: the operation's key, separated by the row's site."""
    mixed = splitmix64(key + site * GOLDEN)
    return mixed & 0xFFFFFFFF, mixed >> 32


def mix3(counter: Tensor, k0: int, k1: int) -> Tensor:
    """Return 32 random bits for every 32-bit counter (int64 tensor in, int64 tensor out).

    The rounds are those of triple32 (Wellons 2018); ``k0`` goes in before the first and ``k1`` before the second,
    so that two keys do not merely permute each other's draws.
    """
    low32 = 0xFFFFFFFF
    x = (counter ^ k0) & low32
    x = x ^ (x >> SHIFTS[0])
    x = (x * MULTIPLIERS[0] + k1) & low32
    x = x ^ (x >> SHIFTS[1])
    x = (x * MULTIPLIERS[1]) & low32
    x = x ^ (x >> SHIFTS[2])
    x = (x * MULTIPLIERS[2]) & low32
    return x ^ (x >> SHIFTS[3])


def random16(index0: int, numel: int, k0: int, k1: int, device: torch.device) -> Tensor:
    """Return 16 random bits (int32, 0..65535) for each of the layer's elements ``index0 .. index0 + numel``.

    Within each group of 128 elements one hash serves two: its low half the element at position p < 64, its high half
    the one at p + 64. ``index0`` is a multiple of 128.
    """
    half = GROUP // 2
    groups = -(-numel // GROUP)
    counter = torch.arange(groups * half, dtype=torch.int64, device=device) + index0 // 2
    bits = mix3(counter & 0xFFFFFFFF, k0, k1).view(groups, half)
    both = torch.stack((bits & 0xFFFF, bits >> 16), dim=1)
    return both.reshape(-1)[:numel].to(torch.int32)


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
