"""Sizes of the min-max payload: a pure function of element count, bits and bucket, so both sides know it."""

from __future__ import annotations

from functools import lru_cache
from math import lcm

GROUP = 128
"""Codes are packed in groups of this many, counted from the start of a row; a group takes ``16 * bits`` bytes."""

ALIGN = 64
"""Payloads, and the codes inside them, start at multiples of this many bytes."""

MAX_BUCKET = 2**62
"""A bucket may be larger than any layer ("the whole layer"), but must fit the core's 64-bit arithmetic."""


def align(num_bytes: int) -> int:
    """``num_bytes`` rounded up to a multiple of :data:`ALIGN`."""
    return -(-num_bytes // ALIGN) * ALIGN


@lru_cache(maxsize=256, typed=True)
def check_format(bits: int, bucket: int) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless (bits, bucket) names a min-max format."""
    for name, value in (("bits", bits), ("bucket", bucket)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    if not 1 <= bits <= 8:
        raise ValueError(f"bits must be 1 to 8, not {bits}")
    if not 1 <= bucket <= MAX_BUCKET:
        raise ValueError(f"bucket must be 1 to 2**62 elements, not {bucket}")


def num_buckets(numel: int, bucket: int) -> int:
    """Buckets of ``numel`` elements; the last one may be short."""
    return -(-numel // bucket)


def codes_at(numel: int, bucket: int) -> int:
    """Byte at which the codes start inside a payload: behind ``lo`` and ``unit`` of every bucket."""
    return align(8 * num_buckets(numel, bucket))


def minmax_bytes(numel: int, *, bits: int, bucket: int) -> int:
    """Payload size in bytes of one segment of ``numel`` elements: a multiple of 64, and 0 for 0 elements.

    Raises ``ValueError`` for a negative ``numel``, bits outside 1..8 or a bucket below 1.
    """
    check_format(bits, bucket)
    if numel < 0:
        raise ValueError(f"numel must not be negative, got {numel}")
    return codes_at(numel, bucket) + align(-(-numel // GROUP) * 16 * bits)


def minmax_grain(bucket: int) -> int:
    """Elements at which a layer may be cut so that each piece gets the bytes it would get inside the whole."""
    check_format(1, bucket)
    return lcm(bucket, GROUP)
