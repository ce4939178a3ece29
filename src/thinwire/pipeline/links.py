"""Compressors by link: the ranks of a pipeline measure their links, and all make the same choice from that."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.collectives import Transport
from thinwire.pipeline.message import Direction
from thinwire.policies import LinkChoice, choose_by_link
from thinwire.runtime import measure_one_way

if TYPE_CHECKING:
    from thinwire.pipeline.stage_compression import StageCompression

_log = logging.getLogger("thinwire")
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


@dataclass
class LinkChoices:
    """Choices for all boundaries, the same on every rank."""

    step: int | None = None
    """Training step before which the choices were made."""
    rows: dict[int, dict[Direction, int]] = field(default_factory=dict)
    """Index into the lists of `thinwire.policies.ByLink`, by boundary and direction."""

    def due(self, step: int, timed: int, *, after: int, every: int | None) -> bool:
        """Whether to choose before training step ``step``, in a process that has timed ``timed`` steps."""
        if timed < after:
            return False
        return self.step is None or (every is not None and step >= self.step + every)

    def to_tensor(self, num_boundaries: int) -> Tensor:
        """Return the choices as int64 of shape ``(1 + boundaries, 2)``; -1 where nothing was chosen."""
        rows = [[self.rows.get(b, {}).get(direction, -1) for direction in DIRECTIONS] for b in range(num_boundaries)]
        step = -1 if self.step is None else self.step
        return torch.tensor([[step, step], *rows], dtype=torch.int64, device="cpu")

    @staticmethod
    def from_tensor(x: Tensor, num_boundaries: int, counts: Mapping[Direction, int]) -> LinkChoices:
        """Return the choices in a tensor of `to_tensor`. ``counts``: the compressors to choose from, by direction.

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


def choose(stages: Sequence[StageCompression], transport: Transport, step: int) -> None:
    """Measure all links, choose compressors for each boundary before training step ``step``, and set them on the
    stages. All ranks must call it, and all make the same choice.

    A boundary between two stages of one rank has no link, and an empty entry.

    Raises:
        TransportError: A rank is gone or silent.
    """
    ranks = stages[0].group_ranks
    boundaries = [b for b in range(stages[0].num_stages - 1) if ranks[b] != ranks[b + 1]]
    pairs: dict[Direction, list[tuple[int, int]]] = {
        "forward": [(ranks[b], ranks[b + 1]) for b in boundaries],
        "backward": [(ranks[b + 1], ranks[b]) for b in boundaries],
    }
    compute_s, sizes = _gather(stages, transport, boundaries)
    chosen: dict[int, dict[Direction, int]] = {}
    rows: list[dict[Direction, LinkChoice]] = [{} for _ in range(stages[0].num_stages - 1)]
    for direction in DIRECTIONS:
        rates = measure_one_way(transport, pairs[direction])
        picked = choose_by_link(sizes[direction], rates, compute_s[direction])
        specs = stages[0].options.choices(direction)
        for boundary, choice, num_bytes, rate in zip(boundaries, picked, sizes[direction], rates, strict=True):
            rows[boundary][direction] = LinkChoice(str(specs[choice]), num_bytes[choice], rate, compute_s[direction])
            chosen.setdefault(boundary, {})[direction] = choice
    for stage in stages:
        stage.choices = LinkChoices(step, chosen)
        stage.links = tuple(rows)
    if stages[0].index == 0:
        for boundary, row in enumerate(rows):
            for direction, link in row.items():
                _log.info(
                    "boundary %d %s: %s, %.1f ms of a link of %.1f Mbit/s; a stage computes for %.1f ms",
                    *(boundary, direction, link.compressor, 1e3 * link.wire_s, 8e-6 * link.rate, 1e3 * link.compute_s),
                )


def _gather(
    stages: Sequence[StageCompression], transport: Transport, boundaries: Sequence[int]
) -> tuple[dict[Direction, float], dict[Direction, list[list[float]]]]:
    """Return, by direction, the seconds that the slowest rank computes for a micro-batch, and, by boundary and choice,
    the bytes of a message, which the boundary's earlier side knows."""
    counts = {direction: len(stages[0].options.choices(direction)) for direction in DIRECTIONS}
    own = {
        direction: torch.zeros(len(boundaries), counts[direction], dtype=torch.float64, device="cpu")
        for direction in DIRECTIONS
    }
    for stage in stages:
        for side in (side for side in stage.sides if side.earlier):
            for direction in DIRECTIONS:
                num_bytes = side.choice_bytes(direction)
                own[direction][boundaries.index(side.boundary)] = torch.tensor(
                    num_bytes, dtype=torch.float64, device="cpu"
                )
    computed = [sum(stage.compute_s(direction) for stage in stages) for direction in DIRECTIONS]
    table = transport.all_gather(
        torch.cat(
            [torch.tensor(computed, dtype=torch.float64, device="cpu"), *(sizes.flatten() for sizes in own.values())]
        )
    )
    slowest = table[:, :2].amax(0).tolist()
    choice_sizes = table[:, 2:].sum(0).split([sizes.numel() for sizes in own.values()])
    shaped = (sizes.view(len(boundaries), -1).tolist() for sizes in choice_sizes)
    return dict(zip(DIRECTIONS, slowest, strict=True)), dict(zip(DIRECTIONS, shaped, strict=True))
