"""How long steps take, and when their buckets become ready, seen from the hook: what ``auto`` foretells from."""

from __future__ import annotations

import time
from collections import deque

import torch
from torch import Tensor

from thinwire.plan import StepTime
from thinwire.plan.forecast import Bucket, Pace
from thinwire.wire.route import BucketLayers

_KEPT = 32


class StepClock:
    """Times the steps of one rank, from first bucket to first bucket."""

    def __init__(self, shared: float) -> None:
        """``shared``: as of `Pace`."""
        self.steps: deque[StepTime] = deque(maxlen=_KEPT)
        self._shared = shared
        self._began = self._arrived = 0.0
        self._compressed = False
        self._buckets: list[Bucket] = []

    def end(self) -> None:
        """A backward pass has begun: the step before it is over."""
        if self._buckets:
            seconds = time.perf_counter() - self._began
            last = self._buckets[-1].ready_s
            exposed = max(0.0, self._arrived - self._began - last)
            pace = Pace(tuple(self._buckets), max(seconds - exposed, last), self._shared)
            self.steps.append(StepTime(pace, seconds, self._compressed))
        self._buckets = []

    def begin(self, *, compressed: bool) -> None:
        """Start the clock; whatever was done since `end` does not count."""
        if self.steps and self.steps[-1].compressed != compressed:
            # Steps of another kind say nothing about those that follow.
            self.steps.clear()
        self._began, self._arrived, self._compressed = time.perf_counter(), 0.0, compressed

    def ready(self, flat: Tensor, layers: BucketLayers) -> None:
        """A bucket's gradients are complete."""
        self._buckets.append(Bucket(time.perf_counter() - self._began, layers, flat.element_size()))

    def arriving(self, future: torch.futures.Future[Tensor]) -> torch.futures.Future[Tensor]:
        """Note when this future's bucket arrives."""
        future.add_done_callback(self._note)
        return future

    def _note(self, _future: object) -> None:
        self._arrived = time.perf_counter()
