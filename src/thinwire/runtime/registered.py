"""Lookup of the layers that a flat buffer holds, by sizes alone.

Every answer is a pure function of what was registered and of the sizes asked for before, so that ranks that make the
same calls get the same answers without communication.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate

NamedShape = tuple[str, tuple[int, ...]]
"""A layer's name and shape."""


class LayerCursor:
    """The trained layers of a model, and a cursor that walks them as a backward pass hands over their gradients.

    DistributedDataParallel's first pass, or its first two with a static graph, sends all layers in one buffer in their
    registered order. Then it forms buckets in the order in which gradients were ready, which is the registered order
    backwards for most models; ``bucket_order`` returns the true one, by names, once it is known; until then it is
    called whenever a pass begins. With ``find_unused_parameters`` DDP never rebuilds its buckets (``rebuilds=False``):
    they come last layers first, and inside a bucket layers keep their registered order.
    """

    def __init__(
        self,
        layers: Sequence[NamedShape],
        *,
        whole_passes: int = 1,
        rebuilds: bool = True,
        bucket_order: Callable[[], Sequence[str] | None] | None = None,
    ) -> None:
        self._layers = tuple((name, tuple(shape)) for name, shape in layers if math.prod(shape))
        self._whole_passes, self._rebuilds, self._bucket_order = whole_passes, rebuilds, bucket_order
        self._walk_over(self._layers[::-1])

    def find(self, numel: int) -> tuple[NamedShape, ...] | None:
        """Return the layers of a buffer of ``numel`` elements: a run that begins at the cursor and fills it exactly.

        If there is none, a new pass may have begun: then a run that begins at the start. None if there is no such run
        either, and the cursor stays.
        """
        if self._at == 0 and self._bucket_order is not None and (names := self._bucket_order()):
            shapes = dict(self._layers)
            self._walk_over([(name, shapes[name]) for name in names if name in shapes])
            self._bucket_order = None
        if self._whole_passes and self._ends and numel == self._ends[-1]:
            self._whole_passes -= 1
            self._at = 0
            return self._layers
        for begin in dict.fromkeys((self._at, 0)):
            run = self._run(begin, numel)
            if run:
                self._at = (begin + len(run)) % len(self._order)
                return run if self._rebuilds else run[::-1]
        return None

    def _run(self, begin: int, numel: int) -> tuple[NamedShape, ...] | None:
        before = self._ends[begin - 1] if begin else 0
        last = bisect_left(self._ends, before + numel)
        if last == len(self._ends) or self._ends[last] != before + numel:
            return None
        return self._order[begin : last + 1]

    def _walk_over(self, order: Sequence[NamedShape]) -> None:
        self._order = tuple(order)
        self._ends = list(accumulate(math.prod(shape) for _, shape in self._order))
        self._at = 0
