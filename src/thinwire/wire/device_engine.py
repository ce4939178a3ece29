"""What a Wire does with each bucket where gradients lie on a device: nothing in it waits on the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.collectives import DeviceBuffers, DeviceTransport, Layout, device_all_reduce
from thinwire.compressors import Count, State, not_finite
from thinwire.wire.engine import Engine
from thinwire.wire.route import Route
from thinwire.wire.stats import Stats
from thinwire.wire.stream import Later
from thinwire.wire.worker import Then


@dataclass
class DeviceRoute(Route):
    """How a bucket travels between devices."""

    buffers: DeviceBuffers | None = None

    @property
    def num_bytes(self) -> int:
        return self.buffers.num_bytes if self.buffers else 0


class Ranges:
    """Names the stages for ``torch.profiler``: on the host they take no time worth counting."""

    def stage(self, name: str) -> AbstractContextManager[Any]:
        return torch.profiler.record_function(f"thinwire {name}")


class DeviceEngine(Engine):
    """The engine for a `DeviceTransport`.

    Whether a step was finite, and what saturated in it, the device tells when the next step begins: by then it has
    long known.
    """

    transport: DeviceTransport

    def __init__(self, *args: Any, **options: Any) -> None:
        self._finite, self._limits, self._clippings = Later(), Later(), Later()
        super().__init__(*args, **options)

    def _open(self, layout: Layout, step: int, sent_bytes: int) -> Route:
        buffers = DeviceBuffers.of(layout, self.rank, self.transport.device)
        return DeviceRoute(layout, None, None, (), step, buffers.sent_bytes, buffers)

    def _exchange(self, flat: Tensor, route: Route, options: Mapping[str, Any]) -> Iterator[Then]:
        assert isinstance(route, DeviceRoute)
        assert route.buffers is not None
        device_all_reduce(flat, route.layout, self.transport, route.buffers, **{**options, "clock": Ranges()})
        yield Then.LATER

    def note_result(self, flat: Tensor) -> None:
        if self.plan.has_slots:
            self._finite.note(not_finite(flat))

    def _note_limits(self, route: Route, state: State | None) -> None:
        assert isinstance(route, DeviceRoute)
        assert route.buffers is not None
        for (compressor, segments), message in route.buffers.encoded():
            limits = compressor.limits(message, segments)
            if any(isinstance(count, Tensor) or count for count in limits):
                self._limits.note(torch.stack([_tensor(count, message.device) for count in limits]))
        clipped, rounded = route.clipped(state)
        if rounded:
            device = self.transport.device
            self._clippings.note(torch.stack([_tensor(count, device) for count in (clipped, rounded)]))

    def _end(self) -> None:
        for value in self._finite.read():
            self._step_is_finite &= bool(torch.isfinite(value))
        self._count_limits()
        super()._end()

    def present_stats(self) -> Stats:
        self._count_limits()
        return super().present_stats()

    def reset_stats(self) -> None:
        for told in (self._limits, self._clippings):
            told.read()
        super().reset_stats()

    def _count_limits(self) -> None:
        for saturated, overflowed in (counts.tolist() for counts in self._limits.read()):
            self.tally.limits(saturated, overflowed)
        for clipped, rounded in (counts.tolist() for counts in self._clippings.read()):
            self.tally.clipped(clipped, rounded)

    def _machine(self) -> dict[str, str]:
        device = self.transport.device
        return {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type}


def _tensor(count: Count, device: torch.device) -> Tensor:
    # Filled there: a number sent from the host would make it wait.
    return count if isinstance(count, Tensor) else torch.full((), count, device=device)
