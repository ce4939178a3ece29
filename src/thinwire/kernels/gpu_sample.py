"""Distinct random indices in Triton: :func:`thinwire.kernels.sample_indices`, each element on its own way."""

# Triton is not installed everywhere, and its language has types of its own.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.gpu_launch import TILE, on, options, words
from thinwire.kernels.gpu_tiles import mix3


@triton.jit
def round_key(key_low, key_high, number: tl.constexpr):
    """thinwire.kernels.derive_key of a key that went through its first step, and a number."""
    low, high = key_low.to(tl.int64) + 2147483648, key_high.to(tl.int64) + 2147483648
    z = (low | (high << 32)).to(tl.uint64, bitcast=True)
    z = (z ^ number) + tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    z = (z ^ (z >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    z = z ^ (z >> 31)
    return z.to(tl.uint32), (z >> 32).to(tl.uint32)


@triton.jit
def permute(values, half_bits, key_low, key_high):
    mask = (tl.full((), 1, tl.int64) << half_bits) - 1
    left, right = values >> half_bits, values & mask
    for number in tl.static_range(6):
        k0, k1 = round_key(key_low, key_high, number)
        mixed = mix3(right.to(tl.uint32), k0, k1).to(tl.int64) & mask
        left, right = right, left ^ mixed
    return (left << half_bits) | right


@triton.jit(do_not_specialize=["numel", "k", "half_bits", "key_low", "key_high"])
def put_sample(out, numel, k, half_bits, key_low, key_high, SIZE: tl.constexpr):
    """Permute each number until it falls inside, as all do in the end: a permutation returns to where it began."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    values = permute(at, half_bits, key_low, key_high)
    outside = (values >= numel) & (at < k)
    while tl.sum(outside.to(tl.int32)) > 0:
        values = tl.where(outside, permute(values, half_bits, key_low, key_high), values)
        outside = (values >= numel) & (at < k)
    tl.store(out + at, values, mask=at < k)


def sample_indices(numel: int, k: int, key: int, half_bits: int, like: Tensor) -> Tensor:
    """See :func:`thinwire.kernels.sample_indices`; ``key`` went through the first step of its derivation."""
    out = torch.empty(k, dtype=torch.int64, device=like.device)
    if k:
        with on(like):
            put_sample[(-(-k // TILE),)](out, numel, k, half_bits, *words(key), SIZE=TILE, **options(8))
    return out
