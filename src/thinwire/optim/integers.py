"""The integers that workers of IntDIANA exchange: a vector rounded with a scale that all of them know, and its sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.collectives import Transport, ring_bytes
from thinwire.kernels import Table, align, int_round, site_id

_DTYPES = {8: torch.int8, 32: torch.int32}


@dataclass(frozen=True)
class IntegerStats:
    """Totals since the optimizer was made, and the extremes of the last step.

    The first step is exact and sends no integers; it is counted in ``steps`` and ``sent_bytes`` only.
    """

    steps: int = 0
    evaluations: int = 0
    """Calls of the closures. A step of L-SVRG has two on a mini-batch and, at random, one on all data."""
    sent_bytes: int = 0
    """Bytes that this rank sent, counted as those of a ring all-reduce."""
    values: int = 0
    """Values that this rank rounded."""
    clipped: int = 0
    """Those of ``values`` that this rank clipped so that no sum can overflow."""
    largest_sent: int = 0
    """Largest magnitude of this rank's integers in any step."""
    largest_sum: int = 0
    """Largest magnitude of the sums over all ranks in any step."""
    last_sent: int = 0
    last_sum: int = 0
    """Largest magnitude of a sum in the last step."""

    @property
    def clipped_share(self) -> float:
        """Share of the values that were clipped."""
        return self.clipped / self.values if self.values else 0.0

    @property
    def bits_per_coordinate(self) -> float:
        """Bits for each of this rank's integers in the last step: ``bits_of(last_sent)``."""
        return bits_of(self.last_sent)


def bits_of(largest: int) -> float:
    """Bits of a signed integer of at most this magnitude: ``1 + log2(largest)`` (section 4.2), at least 1."""
    return 1.0 + math.log2(max(1, largest))


class IntegerSum:
    """Rounds one flat vector to integers and sums those of all ranks in a native all-reduce, with a flag for each
    parameter.

    Args:
        numels: Number of elements of each parameter.
        bits: Width of the integers, 8 or 32.
        transport: Its all-reduce adds them.

    Raises:
        ValueError: ``bits`` is neither 8 nor 32, or too small for a sum over so many ranks.
    """

    def __init__(self, numels: Sequence[int], bits: int, transport: Transport) -> None:
        if bits not in _DTYPES:
            raise ValueError(f"bits must be 8 or 32, not {bits}: the integers that an all-reduce adds natively")
        self.transport = transport
        self.dtype = _DTYPES[bits]
        self.clip = (2 ** (bits - 1) - 1) // transport.world_size
        """Largest magnitude that a rank sends, so that no sum overflows."""
        if self.clip < 1:
            raise ValueError(f"8 bits are too few for the sum over {transport.world_size} ranks: take bits=32")
        rows, start, at = [], 0, 0
        for index, numel in enumerate(numels):
            rows.append([start, numel, 0, at, site_id(str(index))])
            start, at = start + numel, at + align(numel * self.dtype.itemsize)
        self.table = Table(torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 5))
        self.places = [slice(at // self.dtype.itemsize, at // self.dtype.itemsize + n) for _, n, _, at, _ in rows]
        self._numels = list(numels)
        self._values = torch.zeros(start, dtype=torch.float32, device="cpu")
        # Behind the integers lies a flag for each parameter, whose sum is the number of ranks with values that are not
        # finite.
        self._flags = slice(at // self.dtype.itemsize, at // self.dtype.itemsize + len(rows))
        self._sent = torch.zeros(self._flags.stop, dtype=self.dtype, device="cpu")
        self._total = torch.zeros_like(self._sent)

    @property
    def sent_bytes(self) -> int:
        """Bytes that a rank sends for one sum."""
        return ring_bytes(self._sent.numel() * self.dtype.itemsize, self.transport.world_size)

    def add(self, values: Sequence[Tensor], alphas: Tensor, flags: Sequence[bool], key: int) -> int:
        """Round ``alphas[l] · values[l]`` and sum over all ranks. `sent` and `total` return the results.

        Returns:
            The number of values that were clipped on this rank.
        """
        for value, into in zip(values, self._values.split(self._numels), strict=True):
            into.copy_(value.reshape(-1))
        clipped = int_round(self._values, self.table, alphas, self._sent, clip=self.clip, key=key)
        self._sent[self._flags] = torch.tensor(flags, dtype=self.dtype, device="cpu")
        self._total.copy_(self._sent)
        self.transport.all_reduce(self._total)
        return int(clipped.sum())

    def sent(self, index: int) -> Tensor:
        """This rank's integers for one parameter, flat."""
        return self._sent[self.places[index]]

    def total(self, index: int) -> Tensor:
        """The sum over all ranks for one parameter, flat."""
        return self._total[self.places[index]]

    @property
    def not_finite(self) -> list[int]:
        """For each parameter, the number of ranks that set its flag."""
        return self._total[self._flags].tolist()

    def largest(self) -> tuple[int, int]:
        """Largest magnitudes of this rank's integers and of the sums."""
        return _largest(self._sent[: self._flags.start]), _largest(self._total[: self._flags.start])


def _largest(integers: Tensor) -> int:
    if not integers.numel():
        return 0
    low, high = torch.aminmax(integers)
    return max(-int(low), int(high))
