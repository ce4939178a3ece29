"""Compressors by link: what ranks of a pipeline measure, and what they choose from it, alike."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from thinwire.attach.pipeline.choices import DIRECTIONS, Choices
from thinwire.attach.pipeline.crossing import Direction
from thinwire.attach.pipeline.station import Station
from thinwire.collectives import Transport
from thinwire.plan import LinkChoice, choose_by_link
from thinwire.wire import measure_one_way

_log = logging.getLogger("thinwire")


def choose(stations: Sequence[Station], transport: Transport, step: int) -> None:
    """Measure all links, choose for each boundary before training step ``step``, and tell the stations. The same on
    every rank; all must call it.

    A boundary between two stages of one rank has no link, and an empty entry.

    Raises:
        TransportError: a rank is gone or silent.
    """
    ranks = stations[0].group_ranks
    boundaries = [b for b in range(stations[0].num_stages - 1) if ranks[b] != ranks[b + 1]]
    pairs: dict[Direction, list[tuple[int, int]]] = {
        "forward": [(ranks[b], ranks[b + 1]) for b in boundaries],
        "backward": [(ranks[b + 1], ranks[b]) for b in boundaries],
    }
    compute_s, sizes = _gather(stations, transport, boundaries)
    chosen: dict[int, dict[Direction, int]] = {}
    rows: list[dict[Direction, LinkChoice]] = [{} for _ in range(stations[0].num_stages - 1)]
    for direction in DIRECTIONS:
        rates = measure_one_way(transport, pairs[direction])
        picked = choose_by_link(sizes[direction], rates, compute_s[direction])
        specs = stations[0].options.choices(direction)
        for boundary, choice, of, rate in zip(boundaries, picked, sizes[direction], rates, strict=True):
            rows[boundary][direction] = LinkChoice(str(specs[choice]), of[choice], rate, compute_s[direction])
            chosen.setdefault(boundary, {})[direction] = choice
    for station in stations:
        station.choices = Choices(step, chosen)
        station.links = tuple(rows)
    if stations[0].index == 0:
        for boundary, row in enumerate(rows):
            for direction, of in row.items():
                _log.info(
                    "boundary %d %s: %s, %.1f ms of a link of %.1f Mbit/s; a stage computes for %.1f ms",
                    *(boundary, direction, of.compressor, 1e3 * of.wire_s, 8e-6 * of.rate, 1e3 * of.compute_s),
                )


def _gather(
    stations: Sequence[Station], transport: Transport, boundaries: Sequence[int]
) -> tuple[dict[Direction, float], dict[Direction, list[list[float]]]]:
    """What the slowest rank computes for a micro-batch, and, by boundary and choice, the bytes of a message: those on
    its earlier side know."""
    counts = {direction: len(stations[0].options.choices(direction)) for direction in DIRECTIONS}
    own = {direction: torch.zeros(len(boundaries), counts[direction], dtype=torch.float64) for direction in DIRECTIONS}
    for station in stations:
        for side in (side for side in station.sides if side.earlier):
            for direction in DIRECTIONS:
                told = side.choice_bytes(direction)
                own[direction][boundaries.index(side.boundary)] = torch.tensor(told, dtype=torch.float64)
    computed = [sum(station.compute_s(direction) for station in stations) for direction in DIRECTIONS]
    table = transport.all_gather(
        torch.cat([torch.tensor(computed, dtype=torch.float64), *(of.flatten() for of in own.values())])
    )
    slowest = table[:, :2].amax(0).tolist()
    found = table[:, 2:].sum(0).split([of.numel() for of in own.values()])
    shaped = (of.view(len(boundaries), -1).tolist() for of in found)
    return dict(zip(DIRECTIONS, slowest, strict=True)), dict(zip(DIRECTIONS, shaped, strict=True))
