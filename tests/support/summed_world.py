"""A world of ranks in one process, each with its state, which all-reduce layers with a summed compressor."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from thinwire.compressors import (
    Compressor,
    Key,
    Parts,
    Piece,
    Segments,
    State,
    StepEnd,
    SumCall,
    Summed,
    cold_start,
    find_mixin,
    first_state,
    for_world,
)


class SummedWorld:
    """Integers are added in the dtype of the wire, where an overflow would wrap around, and are exact."""

    def __init__(self, compressor: Compressor, num_ranks: int, layers: Mapping[str, tuple[int, ...]]) -> None:
        self.pieces, at = [], 0
        for name, shape in layers.items():
            self.pieces.append(Piece(name, at, math.prod(shape), 0, 0, shape))
            at += math.prod(shape)
        self.numel, self.num_ranks, self.steps = at, num_ranks, 0
        self.compressor = for_world(compressor, num_ranks, at)
        self.cold_start = cold_start(self.compressor)
        self.sums: list[Tensor] = []
        """Of the last step, one for each of the compressor's rounds."""
        states = [first_state(self.compressor, torch.zeros(at), Segments.build(self.pieces)) for _ in range(num_ranks)]
        self.states: list[State] = [state for state in states if state is not None]

    def step(self, gradients: Tensor | list[Tensor]) -> Tensor:
        """What every rank receives of the flat gradients of all."""
        compressor = self.cold_start if self.steps == 0 and self.cold_start is not None else self.compressor
        assert isinstance(compressor, Summed)
        flats = [x.clone() for x in gradients]
        by_layer = [compressor.sums(piece.layer_shape, torch.float32) for piece in self.pieces]
        of_rounds = list(zip(*by_layer, strict=True))
        parts = tuple(Parts.build(zip(self.pieces, (s.numel for s in sums), strict=True)) for sums in of_rounds)
        buffers = [torch.zeros(self.num_ranks, sum(s.numel for s in sums), dtype=sums[0].dtype) for sums in of_rounds]
        running, self.sums = [], []
        for rank, (x, state) in enumerate(zip(flats, self.states, strict=True)):
            key, own = Key(1000 * self.steps + rank, self.steps), tuple(buffer[rank] for buffer in buffers)
            running.append(compressor.rounds(x, x, SumCall(parts, own, key, state, 1 / self.num_ranks)))
        for sums, buffer in zip(of_rounds, buffers, strict=True):
            for rounds in running:
                next(rounds)
            self.sums.append(buffer.amax(0) if sums[0].op == "max" else buffer.sum(0, dtype=buffer.dtype))
            if sums[0].op == "sum" and not buffer.is_floating_point():
                assert torch.equal(self.sums[-1].long(), buffer.long().sum(0)), "a sum has overflowed"
            buffer[:] = self.sums[-1]
        for rounds in running:
            next(rounds, None)
        if (ending := find_mixin(self.compressor, StepEnd)) is not None:
            for state in self.states:
                ending.end_step([state.layers[piece.name] for piece in self.pieces], 1.0)
        self.states = [state.swapped() for state in self.states]
        self.steps += 1
        assert all(torch.equal(x, flats[0]) for x in flats) or any(bool(x.isnan().any()) for x in flats)
        return flats[0]
