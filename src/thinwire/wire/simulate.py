"""Compression without its communication: what arrives is what would arrive, but the reduction is exact and dense."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.collectives import Layout
from thinwire.collectives.keys import WORKER, stage_key, sum_key
from thinwire.compressors import State


def simulate(
    flat: Tensor, layout: Layout, *, seed: int, step: int, rank: int, num_ranks: int, state: State | None
) -> None:
    """Replace each layer of ``flat`` by what its receivers would decode, on any device.

    ``layout`` is that of a world of one: every layer is whole. The second coding, that of the mean by its owner, is
    left out, and error feedback works on the worker's side alone.
    """
    key = stage_key(seed, step, WORKER, rank)
    for chunk in (*layout.chunks, *layout.gathered):
        message = torch.zeros(chunk.message_bytes, dtype=torch.uint8, device=flat.device)
        for compressor, segments in chunk.groups:
            compressor.encode(flat, segments, message, key=key, state=state)
            compressor.decode(message, segments, flat)
    key = sum_key(seed, step, rank)
    for s in layout.sums:
        buffer = torch.zeros(s.numel, dtype=s.dtype, device=flat.device)
        for compressor, parts in s.members:
            compressor.part(s.round, flat, parts, buffer, key=key, scale=1.0, state=state)
        if s.op == "sum" and not s.dtype.is_floating_point:
            # As if all ranks had sent the same: integers are not divided by their number beforehand.
            buffer.mul_(num_ranks)
        for compressor, parts in s.members:
            compressor.absorb(s.round, buffer, flat, parts, key=key, state=state)
