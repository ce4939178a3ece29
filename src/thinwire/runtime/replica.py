"""What all ranks hold of a unit's weights where only changes are sent: ``weights="delta(...)"``."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from thinwire.runtime.placement import Placement


class Replica:
    """The weights ŵ that have arrived, the same on all ranks: ``ŵ ← ŵ + Q(w − ŵ)`` at every gather (SDP4Bit, Jia et
    al. 2024).

    What Q loses is part of the next change, so errors do not add up. The first gather sends w whole. Values that are
    not finite become zero, so that weights that are mended later arrive again within a few gathers.
    """

    def __init__(self, placement: Placement, names: Collection[str], rank: int, device: torch.device) -> None:
        """Of the layers ``names``; others keep zeros here, and are sent as they are."""
        self._placement, self.names = placement, tuple(names)
        self._values = torch.zeros(placement.numel, dtype=torch.float32, device=device)
        self._runs = [list(self._runs_of(r)) for r in range(placement.num_ranks)]
        self._mine = self._runs[rank]
        self.filled = False
        """Whether the first gather has begun."""

    @property
    def num_bytes(self) -> int:
        """Bytes of memory in use."""
        return self._values.nbytes

    def _runs_of(self, rank: int) -> Iterator[slice]:
        """The elements of a rank's part that belong to these layers."""
        for name in self.names:
            start = rank * self._placement.part_numel + self._placement.starts[name]
            yield slice(start, start + self._placement.by_name[name].numel_of(rank))

    def subtract(self, flat: Tensor) -> None:
        """Replace this rank's part of ``flat``, the weights, by how they differ from what has arrived of them."""
        for run in self._mine:
            flat[run].sub_(self._values[run])

    def add(self, flat: Tensor, *, whole: bool) -> None:
        """Add the changes in ``flat``, or take the weights in it if they are ``whole``, and leave the weights there."""
        for runs in self._runs:
            for run in runs:
                held = self._values[run]
                if whole:
                    held.copy_(flat[run])
                else:
                    held.add_(flat[run])
                    flat[run].copy_(held)
                held.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def value(self, name: str) -> Tensor:
        """A copy of a layer, in its shape."""
        return self._placement.whole(self._values, name)

    def load(self, name: str, value: Tensor) -> None:
        """Set a layer."""
        self._placement.write(self._values, name, value.to(self._values.device))
