"""All-reduces of integers in messages of few bits, which widen as they sum more ranks' integers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import replace

import torch
from torch import Tensor

from thinwire.collectives.layout import Layout, Sum
from thinwire.collectives.reduction import all_reduce
from thinwire.collectives.stages import CollectiveCall
from thinwire.collectives.transport import Transport


class PackedSum(ABC):
    """One sum of a layout whose integers are sent packed, and the memory for it."""

    def __init__(self, s: Sum, device: torch.device | None = None) -> None:
        assert s.packed is not None
        self._packed = s.packed
        self._values = torch.zeros(s.packed.spread_numel(s.numel), dtype=torch.float32, device=device)
        """Integers as the kernels take them: fp32, in buckets."""

    @property
    def num_bytes(self) -> int:
        """Memory in use, in bytes."""
        return 4 * self._values.numel()

    @abstractmethod
    def exchange(self, x: Tensor, transport: Transport, call: CollectiveCall) -> Generator[None]:
        """Replace the flat tensor ``x`` by its sum over all ranks; a generator as `all_reduce`."""

    def run(self, buffer: Tensor, transport: Transport, call: CollectiveCall) -> Generator[None]:
        """Replace the integers in ``buffer`` by their sums over all ranks. Yields as `all_reduce` does."""
        with call.clock.stage("encode"):
            self._packed.spread(buffer, self._values)
        yield from self.exchange(self._values, transport, replace(call, scale=1.0, state=None))
        with call.clock.stage("decode"):
            self._packed.collect(self._values, buffer)


class HostPackedSum(PackedSum):
    """A packed sum by the messages of `all_reduce`."""

    def __init__(self, s: Sum, layout: Layout, transport: Transport) -> None:
        super().__init__(s)
        self._layout = layout.packed_layout(s)
        self._buffers = transport.open(self._layout.reduction_traffic())

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + self._buffers.num_bytes

    def exchange(self, x: Tensor, transport: Transport, call: CollectiveCall) -> Generator[None]:
        return all_reduce(x, self._layout, transport, self._buffers, call)


def packed_sums(layout: Layout, transport: Transport) -> dict[int, PackedSum]:
    """Return the packed sums of a layout by their number; none where an aggregator adds integers."""
    sums = layout.sums if transport.aggregator is None else ()
    return {number: HostPackedSum(s, layout, transport) for number, s in enumerate(sums) if s.packed is not None}
