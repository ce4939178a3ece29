"""Replicas must be the same, bit for bit: a check that they are, and a way back if they are not."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from thinwire.collectives import Transport
from thinwire.kernels import checksum


class ParityError(RuntimeError):
    """Ranks hold different parameters."""


def check_parity(parameters: Mapping[str, Tensor], transport: Transport, step: int) -> None:
    """Compare a checksum of every parameter across ranks: 8 bytes each travel.

    Raises:
        ParityError: on every rank alike, naming the first parameter that differs and the ranks.
    """
    sums = torch.tensor([_checksum(parameter) for parameter in parameters.values()], dtype=torch.int64)
    everywhere = transport.all_gather(sums)
    differs = (everywhere != everywhere[0]).any(0)
    if not bool(differs.any()):
        return
    first = int(differs.nonzero()[0])
    name = list(parameters)[first]
    others = [rank for rank in range(transport.world_size) if everywhere[rank, first] != everywhere[0, first]]
    raise ParityError(
        f"replicas differ at step {step}: {name} of rank {', '.join(map(str, others))} is not that of rank 0 "
        f"({int(differs.sum())} of {len(parameters)} parameters differ). Something outside thinwire changed them "
        "(unequal initial weights, a rank that skipped an optimizer step, different hardware); "
        "resync=k copies rank 0's parameters to all every k steps"
    )


def resync(parameters: Mapping[str, Tensor], transport: Transport) -> None:
    """Give every rank the parameters of rank 0."""
    for parameter in parameters.values():
        values = parameter.detach()
        whole = values.contiguous()
        transport.broadcast(whole)
        if whole.data_ptr() != values.data_ptr():
            values.copy_(whole)


def _checksum(parameter: Tensor) -> int:
    """Signed, as int64 holds it."""
    data = parameter.detach().contiguous().view(-1).view(torch.uint8)
    if data.numel() % 4:
        data = torch.nn.functional.pad(data, (0, 4 - data.numel() % 4))
    value = checksum(data)
    return value - (1 << 64) if value >= 1 << 63 else value
