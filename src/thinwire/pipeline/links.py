"""Compressors by link: the ranks of a pipeline measure their links, and all make the same choice from that."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from thinwire.collectives import Transport
from thinwire.pipeline.boundary_tensors import Direction
from thinwire.pipeline.link_choices import DIRECTIONS, LinkChoices
from thinwire.pipeline.stage_compression import StageCompression
from thinwire.policies import LinkChoice, choose_by_link
from thinwire.runtime import measure_one_way

_log = logging.getLogger("thinwire")


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
    """By direction: the seconds that the slowest rank computes for a micro-batch, and, by boundary and choice, the
    bytes of a message, which the boundary's earlier side knows."""
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
