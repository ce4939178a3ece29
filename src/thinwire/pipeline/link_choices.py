"""Which compressors were chosen for each stage boundary according to its link, and when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.pipeline.boundary_tensors import Direction

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


@dataclass
class LinkChoices:
    """The choices for all boundaries, the same on every rank."""

    step: int | None = None
    """The training step before which they were made."""
    rows: dict[int, dict[Direction, int]] = field(default_factory=dict)
    """By boundary and direction, an index into the lists of `thinwire.policies.ByLink`."""

    def due(self, step: int, timed: int, *, after: int, every: int | None) -> bool:
        """Whether to choose before training step ``step``, in a process that has timed ``timed`` steps."""
        if timed < after:
            return False
        return self.step is None or (every is not None and step >= self.step + every)

    def to_tensor(self, num_boundaries: int) -> Tensor:
        """Shape ``(1 + boundaries, 2)``, int64; -1 where nothing was chosen."""
        rows = [[self.rows.get(b, {}).get(direction, -1) for direction in DIRECTIONS] for b in range(num_boundaries)]
        step = -1 if self.step is None else self.step
        return torch.tensor([[step, step], *rows], dtype=torch.int64, device="cpu")

    @staticmethod
    def from_tensor(x: Tensor, num_boundaries: int, counts: Mapping[Direction, int]) -> LinkChoices:
        """The choices in a tensor that `to_tensor` made. ``counts``: the compressors to choose from, by direction.

        Raises:
            ValueError: It is not such a tensor, or has an index that is out of range.
        """
        if not isinstance(x, Tensor) or x.dtype != torch.int64 or x.shape != (1 + num_boundaries, len(DIRECTIONS)):
            raise ValueError(
                "the state's choices are not those of this many boundaries: it is not the state of this pipeline"
            )
        (step, _), *rows = x.tolist()
        for row in rows:
            for value, direction in zip(row, DIRECTIONS, strict=True):
                if not -1 <= value < counts[direction]:
                    raise ValueError(
                        f"the state chose {direction} compressor {value} of {counts[direction]}: resume with the same "
                        "adapt=ByLink(...)"
                    )
        made: dict[int, dict[Direction, int]] = {
            b: {d: v for d, v in zip(DIRECTIONS, row, strict=True) if v >= 0} for b, row in enumerate(rows)
        }
        return LinkChoices(None if step < 0 else step, {b: row for b, row in made.items() if row})
