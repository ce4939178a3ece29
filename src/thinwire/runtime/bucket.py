"""Buckets of DistributedDataParallel, which hold gradients end to end, and what is sent in their place."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from thinwire.collectives import CollectiveCall, Layout, SumRounds, sum_buffers
from thinwire.collectives.message import WORKER
from thinwire.compressors import CodecCall, State, not_finite
from thinwire.kernels import is_dense
from thinwire.runtime.executor import AsyncReadback

BucketLayers = tuple[tuple[str, tuple[int, ...]], ...]
"""Names and shapes of the layers of a bucket, in order."""


def bucket_parts(flat: Tensor, layers: BucketLayers) -> Iterator[tuple[str, Tensor]]:
    """Yield the layers of a bucket, by name and in their shapes, as views of its flat buffer."""
    start = 0
    for name, shape in layers:
        numel = math.prod(shape)
        yield name, flat[start : start + numel].view(shape)
        start += numel


def view_layer(parameter: Tensor, values: Tensor) -> Tensor:
    """Return a layer of a DDP bucket as a view with the indices of its parameter.

    DDP keeps values in the order in which the parameter lies in memory, if that leaves no gaps.
    """
    values = values.view(parameter.shape)
    if parameter.is_contiguous() or not is_dense(parameter):
        return values
    return values.as_strided(parameter.shape, parameter.stride(), values.storage_offset())


class Substitute(ABC):
    """Turns the gradients of a bucket into what an optimizer of thinwire has sent in their place, and back."""

    when_dense = False
    """Whether gradients are replaced in uncompressed steps, too."""

    @property
    def waits(self) -> bool:
        """Whether gradients themselves are sent for now, and uncompressed."""
        return False

    @abstractmethod
    def make(self, flat: Tensor, layers: BucketLayers, loss_scale: float) -> None:
        """Replace the gradients of ``layers``, end to end in ``flat`` and ``loss_scale`` times their size, in place."""

    def undo(self, mean: Tensor, layers: BucketLayers, loss_scale: float) -> None:  # noqa: B027 - not all need it
        """Replace the mean that has arrived by the gradients that it stands for, in place."""


class UnsentResiduals:
    """Residuals of layers that keep none from now on: each goes with its layer's gradients until a step is taken.

    A step is not taken if one of its means is not finite: `torch.amp.GradScaler` skips the optimizer's step then.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, Tensor] = {}
        self._sent: dict[str, Tensor] = {}
        self._num_buckets = 0
        # On a device the host reads these when the next step begins: by then they have long been computed.
        self._means = AsyncReadback()

    def __bool__(self) -> bool:
        """Whether any residual waits, or is under way in a step of which it is not known whether it is taken."""
        return bool(self._waiting or self._sent)

    def add(self, layer: str, residual: Tensor) -> None:
        """Send ``residual`` (flat, in the units of gradients) from the next step on."""
        before = self._waiting.get(layer)
        self._waiting[layer] = residual if before is None else before + residual

    def send(self, flat: Tensor, layers: BucketLayers, loss_scale: float) -> None:
        """Add residuals still to be sent to a bucket's gradients, which are multiplied by ``loss_scale``."""
        self._num_buckets += 1
        for name, values in bucket_parts(flat, layers):
            if (residual := self._waiting.get(name)) is not None:
                # In this order: another thread, which has the mean of a bucket, asks for the truth value meanwhile.
                self._sent[name] = residual
                del self._waiting[name]
                values.add_(residual.to(values.device).view_as(values), alpha=loss_scale)

    def note_mean(self, mean: Tensor) -> None:
        """Note whether the mean of a bucket of this step is finite."""
        self._means.note(not_finite(mean))

    def end_step(self) -> None:
        """End a step, between two of them: forget what it sent if it was taken; send it again if not."""
        arrived, finite = len(self._means), self._means.read_finite()
        if arrived < self._num_buckets or not finite:
            self.keep()
        self._sent.clear()
        self._num_buckets = 0

    def keep(self) -> None:
        """Send again what the last step sent, since its means are not used."""
        for layer, residual in self._sent.items():
            self.add(layer, residual)
        self._sent.clear()


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
