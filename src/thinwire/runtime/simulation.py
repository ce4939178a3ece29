"""Simulation of a bucket's communication: what would arrive, without sending it."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.collectives import CollectiveCall, Layout, SumRounds, sum_buffers
from thinwire.collectives.message import WORKER
from thinwire.compressors import CodecCall, State


def simulate(
    flat: Tensor, layout: Layout, *, seed: int, step: int, rank: int, num_ranks: int, state: State | None
) -> None:
    """Replace each layer of ``flat`` by what its receivers would decode, on any device.

    ``layout`` is that of a world of one: every layer is whole. The second coding, that of the mean by its owner, is
    left out, and error feedback works on the worker's side alone.
    """
    call = CollectiveCall(seed, step, scale=1.0, state=state)
    key = call.key(WORKER, rank)
    for chunk in (*layout.chunks, *layout.gathered):
        message = torch.zeros(chunk.message_bytes, dtype=torch.uint8, device=flat.device)
        for compressor, segments in chunk.groups:
            compressor.encode(flat, message, CodecCall(segments, key, state=state))
            compressor.decode(message, flat, CodecCall(segments))
    buffers = sum_buffers(layout, flat.device)
    running = SumRounds(flat, layout, buffers, call, rank=rank, num_ranks=num_ranks)
    running.start()
    for s, buffer in zip(layout.sums, buffers, strict=True):
        if s.op == "sum" and not s.dtype.is_floating_point:
            # The sum is as if all ranks had sent the same: integers are not divided by their number beforehand.
            buffer.mul_(num_ranks)
        running.go_on(s)
