"""Compression without its communication: what arrives is what would arrive, but the reduction is exact and dense."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.collectives import Layout
from thinwire.collectives.keys import SHARED, WORKER, stage_key
from thinwire.compressors import State
from thinwire.kernels import derive_key


def simulate(flat: Tensor, layout: Layout, *, seed: int, step: int, rank: int, state: State | None) -> None:
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
    shared = derive_key(seed, step, SHARED)
    for s in layout.sums:
        buffer = torch.zeros(s.numel, dtype=s.dtype, device=flat.device)
        for compressor, parts in s.members:
            compressor.part(s.round, flat, parts, buffer, key=shared, scale=1.0, state=state)
            compressor.absorb(s.round, buffer, flat, parts, key=shared, state=state)
