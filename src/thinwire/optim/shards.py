"""Parameters that are sharded (DTensors of FSDP2): this rank's part of them, and values of the whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    # Importing DTensor takes a second, and before it is imported no tensor is one.
    distributed = getattr(dist, "tensor", None)
    return distributed is not None and isinstance(tensor, distributed.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, which shares its memory; any other tensor itself."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]


def as_whole(tensor: Tensor) -> Tensor:
    """Return a DTensor put together from all ranks' shards, a collective call; any other tensor itself."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]


def sharded_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return ``tensor``, which every rank has whole, sharded as the DTensor ``parameter`` is."""
    if is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import distribute_tensor  # who has a DTensor has imported it already

    mesh, placements = parameter.device_mesh, parameter.placements  # pyright: ignore[reportAttributeAccessIssue]
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def over_shards(values: Tensor, parameters: Sequence[Tensor], op: dist.ReduceOp.RedOpType) -> Tensor:
    """Replace one value (parameters,) of each parameter's local part by that of the whole, such as their sum.

    Every rank calls it with the same parameters.
    """
    together: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
    for index, parameter in enumerate(parameters):
        if groups := _groups(parameter):
            together.setdefault(groups, []).append(index)
    for groups, indices in together.items():
        part = values[indices]
        for group in groups:
            dist.all_reduce(part, op=op, group=group)
        values[indices] = part
    return values


def _groups(parameter: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the process groups over which a parameter is sharded."""
    if not is_sharded(parameter):
        return ()
    placements = enumerate(parameter.placements)  # pyright: ignore[reportAttributeAccessIssue]
    return tuple(parameter.device_mesh.get_group(dim) for dim, place in placements if place.is_shard())  # pyright: ignore[reportAttributeAccessIssue]
