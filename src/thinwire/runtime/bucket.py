"""The layers in a bucket of DistributedDataParallel, which holds their gradients end to end."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from thinwire.kernels import is_dense

BucketLayers = tuple[tuple[str, tuple[int, ...]], ...]
"""Names and shapes of the layers of a bucket, in order."""


def bucket_parts(flat: Tensor, layers: BucketLayers) -> Iterator[tuple[str, Tensor]]:
    """Yield the layers of a bucket, by name and in their shapes, as views of its flat buffer."""
    start = 0
    for name, shape in layers:
        numel = math.prod(shape)
        yield name, flat[start : start + numel].view(shape)
        start += numel


def in_order_of(parameter: Tensor, values: Tensor) -> Tensor:
    """Return a layer of a DDP bucket as a view with the indices of its parameter.

    DDP keeps values in the order in which the parameter lies in memory, if that leaves no gaps.
    """
    values = values.view(parameter.shape)
    if parameter.is_contiguous() or not is_dense(parameter):
        return values
    return values.as_strided(parameter.shape, parameter.stride(), values.storage_offset())
