"""What the workers of IntDIANA exchange: one vector of integers, rounded with a scale that all of them know."""

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
    """Totals since the optimizer was made, and the last step's extremes. The first step, which is exact, sends no
    integers and is counted in ``steps`` and ``sent_bytes`` only."""

    steps: int = 0
    evaluations: int = 0
    """Calls of the closures: two of a mini-batch in a step of L-SVRG, and one of all data where the coin falls so."""
    sent_bytes: int = 0
    """By this rank, counted as those of a ring all-reduce."""
    values: int = 0
    clipped: int = 0
    """Of ``values`` this rank had to clip so that no sum can overflow."""
    largest_sent: int = 0
    """The largest magnitude among the integers of this rank, in any step."""
    largest_sum: int = 0
    """The same of the sums over all ranks."""
    last_sent: int = 0
    last_sum: int = 0
    """The same of the last step alone."""

    @property
    def clipped_share(self) -> float:
        return self.clipped / self.values if self.values else 0.0

    @property
    def bits_per_coordinate(self) -> float:
        """Bits that every coordinate of the last step's own integers takes: ``bits_of(last_sent)``."""
        return bits_of(self.last_sent)


def bits_of(largest: int) -> float:
    """Bits of a signed integer of at most this magnitude, ``1 + log2(largest)`` (section 4.2); 1 below that."""
    return 1.0 + math.log2(max(1, largest))


class IntegerSum:
    """Rounds one flat vector to integers and adds those of all ranks, natively, with one flag a parameter.

    Args:
        numels: elements of each parameter.
        bits: 8 or 32.
        transport: whose integer all-reduce adds.

    Raises:
        ValueError: ``bits`` leave no integer to each of so many ranks, or are neither 8 nor 32.
    """

    def __init__(self, numels: Sequence[int], bits: int, transport: Transport) -> None:
        if bits not in _DTYPES:
            raise ValueError(f"bits must be 8 or 32, not {bits}: the integers that an all-reduce adds natively")
        self.transport = transport
        self.dtype = _DTYPES[bits]
        self.clip = (2 ** (bits - 1) - 1) // transport.world_size
        """No rank sends more than this, so that no sum overflows."""
        if self.clip < 1:
            raise ValueError(f"8 bits are too few for the sum over {transport.world_size} ranks: take bits=32")
        rows, start, at = [], 0, 0
        for index, numel in enumerate(numels):
            rows.append([start, numel, 0, at, site_id(str(index))])
            start, at = start + numel, at + align(numel * self.dtype.itemsize)
        self.table = Table(torch.tensor(rows, dtype=torch.int64).view(-1, 5))
        self.places = [slice(at // self.dtype.itemsize, at // self.dtype.itemsize + n) for _, n, _, at, _ in rows]
        self._numels = list(numels)
        self._values = torch.zeros(start, dtype=torch.float32)
        # Behind the integers one flag for each parameter: how many ranks hold something that is not finite.
        self._flags = slice(at // self.dtype.itemsize, at // self.dtype.itemsize + len(rows))
        self._sent = torch.zeros(self._flags.stop, dtype=self.dtype)
        self._total = torch.zeros_like(self._sent)

    @property
    def sent_bytes(self) -> int:
        """Bytes that a rank sends for one sum."""
        return ring_bytes(self._sent.numel() * self.dtype.itemsize, self.transport.world_size)

    def add(self, values: Sequence[Tensor], alphas: Tensor, flags: Sequence[bool], key: int) -> int:
        """Round ``alphas[l] · values[l]`` and add over all ranks; `sent` and `total` then hold what came of it.

        Returns how many values had to be clipped on this rank.
        """
        for value, into in zip(values, self._values.split(self._numels), strict=True):
            into.copy_(value.reshape(-1))
        clipped = int_round(self._values, self.table, alphas, self._sent, clip=self.clip, key=key)
        self._sent[self._flags] = torch.tensor(flags, dtype=self.dtype)
        self._total.copy_(self._sent)
        self.transport.all_reduce(self._total)
        return int(clipped.sum())

    def sent(self, index: int) -> Tensor:
        """This rank's integers for one parameter, flat."""
        return self._sent[self.places[index]]

    def total(self, index: int) -> Tensor:
        """Their sum over all ranks."""
        return self._total[self.places[index]]

    @property
    def not_finite(self) -> list[int]:
        """For each parameter, how many ranks raised its flag."""
        return self._total[self._flags].tolist()

    def largest(self) -> tuple[int, int]:
        """The largest magnitudes sent by this rank and of the sums."""
        return _largest(self._sent[: self._flags.start]), _largest(self._total[: self._flags.start])


def _largest(integers: Tensor) -> int:
    if not integers.numel():
        return 0
    low, high = torch.aminmax(integers)
    return max(-int(low), int(high))
