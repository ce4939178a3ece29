"""Compressors by link: the ranks of a pipeline measure their links, and all make the same choice from that."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.collectives import Transport
from thinwire.pipeline.message import DIRECTIONS, Direction
from thinwire.policies import ByLink, LinkChoice, choose_by_link
from thinwire.runtime import measure_one_way

if TYPE_CHECKING:
    from thinwire.pipeline.stage import CompressedStage

_log = logging.getLogger("thinwire")


@dataclass
class LinkChoices:
    """Choices for all boundaries, the same on every rank."""

    step: int | None = None
    """Training step before which the choices were made."""
    rows: dict[int, dict[Direction, int]] = field(default_factory=dict)
    """Index into the lists of `thinwire.policies.ByLink`, by boundary and direction."""

    def is_due(self, adapt: ByLink, step: int, timed: int) -> bool:
        """Whether to choose before training step ``step``, in a process that has timed ``timed`` steps."""
        again = adapt.every is not None and self.step is not None and step >= self.step + adapt.every
        return timed >= adapt.after and (self.step is None or again)

    def to_tensor(self, num_boundaries: int) -> Tensor:
        """Return the choices as int64 of shape ``(1 + boundaries, 2)``; -1 where nothing was chosen."""
        rows = [[self.rows.get(b, {}).get(direction, -1) for direction in DIRECTIONS] for b in range(num_boundaries)]
        step = -1 if self.step is None else self.step
        return torch.tensor([[step, step], *rows], dtype=torch.int64, device="cpu")

    @staticmethod
    def from_tensor(x: Tensor, num_boundaries: int, counts: Mapping[Direction, int]) -> LinkChoices:
        """Return the choices in a tensor of `to_tensor`. ``counts``: the compressors to choose from, by direction.

        Raises:
            ValueError: it is not such a tensor, or has an index that is out of range.
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


def choose(stages: Sequence[CompressedStage], transport: Transport, step: int) -> None:
    """Measure all links, choose compressors for each boundary before training step ``step``, and set them on the
    stages. All ranks must call it, and all make the same choice.

    A boundary between two stages of one rank has no link, and an empty entry.

    Raises:
        TransportError: a rank is gone or silent.
    """
    ranks = stages[0].stage_index_to_group_rank
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
    if stages[0].is_first:
        for boundary, row in enumerate(rows):
            for direction, link in row.items():
                _log.info(
                    "boundary %d %s: %s, %.1f ms of a link of %.1f Mbit/s; a stage computes for %.1f ms",
                    *(boundary, direction, link.compressor, 1e3 * link.wire_s, 8e-6 * link.rate, 1e3 * link.compute_s),
                )


def _gather(
    stages: Sequence[CompressedStage], transport: Transport, boundaries: Sequence[int]
) -> tuple[dict[Direction, float], dict[Direction, list[list[float]]]]:
    """Return, by direction, the seconds that the slowest rank computes for a micro-batch, and, by boundary and choice,
    the bytes of a message, which the boundary's earlier side knows."""
    counts = [len(stages[0].options.choices(direction)) for direction in DIRECTIONS]
    own = [torch.zeros(len(boundaries), count, dtype=torch.float64, device="cpu") for count in counts]
    for side in (side for stage in stages for side in stage.sides if side.earlier):
        for sizes, direction in zip(own, DIRECTIONS, strict=True):
            sizes[boundaries.index(side.boundary)] = torch.tensor(
                side.choice_bytes(direction), dtype=torch.float64, device="cpu"
            )
    computed = [sum(stage.compute_s(direction) for stage in stages) for direction in DIRECTIONS]
    seconds = torch.tensor(computed, dtype=torch.float64, device="cpu")
    table = transport.all_gather(torch.cat([seconds, *(sizes.flatten() for sizes in own)]))
    columns = table[:, 2:].sum(0).split([sizes.numel() for sizes in own])
    shaped = (column.view(len(boundaries), -1).tolist() for column in columns)
    return dict(zip(DIRECTIONS, table[:, :2].amax(0).tolist(), strict=True)), dict(zip(DIRECTIONS, shaped, strict=True))
