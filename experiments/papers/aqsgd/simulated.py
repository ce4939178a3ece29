"""Boundaries whose two sides live in one process: messages are bytes all the same, and each side keeps its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.compressors import Coded, Delta, parse
from thinwire.kernels import derive_key
from thinwire.pipeline.message import BoundaryTensors, MessageLayout, Spec
from thinwire.pipeline.options import fitted
from thinwire.store import MemoryStore, Part as RecordPart, RecordFormat, Rows

Window = tuple[slice, ...]
"""Where in a sample's message, whose first dimension is whole, an activation lies."""


class Boundary:
    """What crosses in one direction between two parties, ``a [samples, ...]``, at most ``delta(...)`` of it.

    ``frame`` is the shape of a sample's message: that of its activation, or larger in all but the first dimension where
    activations are windows of it (a random crop, appendix H.6), of which a visit updates its own part only.
    """

    def __init__(self, spec: str, name: str, frame: Sequence[int], seed: int) -> None:
        compressor = parse(spec)
        self.keeps = isinstance(compressor, Delta)
        coder = compressor.coder if isinstance(compressor, Delta) else compressor
        assert isinstance(coder, Coded), "what codes activations is decoded by itself"
        self.coder, self.frame = coder, tuple(frame)
        self.sent_bytes = self.dense_bytes = 0
        self._name, self._seed, self._step = name, seed, 0
        form = RecordFormat((RecordPart(1, torch.Size(frame).numel(), False),), site=name)
        self.sender, self.receiver = MemoryStore(form), MemoryStore(form)

    def send(self, a: Tensor, samples: Sequence[int], windows: Sequence[Window] | None = None) -> Tensor:
        """What the receiver has of ``a``, of the same shape, in fp32; ``windows`` is one for each sample."""
        rows = Rows.uniform(samples, a.shape[1])
        crossing = BoundaryTensors((Spec(tuple(a.shape), torch.float32),))
        coded = [not self.keeps or self.sender.entry(sample) is not None for sample in samples]
        layout = MessageLayout.build(crossing, rows, coded, fitted(self.coder, crossing), site=self._name)
        message = torch.zeros(layout.num_bytes, dtype=torch.uint8)
        flat = a.detach().float().contiguous().view(-1)
        frames = self._load(self.sender, samples, a)
        layout.put_raw(flat, message)
        layout.encode(flat - self._cut(frames, a, windows), message, derive_key(self._seed, self._step))
        self._take(self.sender, layout, message, frames, a, windows)
        arrived = self._take(self.receiver, layout, message, self._load(self.receiver, samples, a), a, windows)
        self._step += 1
        self.sent_bytes += layout.num_bytes
        self.dense_bytes += 4 * a.numel()
        return arrived.view(a.shape)

    @property
    def alike(self) -> bool:
        """Whether both sides keep the same."""
        return self.sender.digest() == self.receiver.digest()

    def _load(self, store: MemoryStore, samples: Sequence[int], a: Tensor) -> Tensor:
        """Messages as a side keeps them: (samples, *frame), zero where nothing is."""
        if not self.keeps:
            return torch.zeros(a.shape)
        frames = torch.zeros(len(samples), *self.frame)
        known = [i for i, sample in enumerate(samples) if store.entry(sample) is not None]
        if known:
            kept = store.load(Rows.uniform((samples[i] for i in known), 0))
            frames[known] = kept.view(len(known), *self.frame)
        return frames

    def _cut(self, frames: Tensor, a: Tensor, windows: Sequence[Window] | None) -> Tensor:
        """The windows of messages, flat."""
        if windows is None or not self.keeps:
            return frames.reshape(-1)
        return torch.cat([frame[window].reshape(-1) for frame, window in zip(frames, windows, strict=True)])

    def _take(
        self,
        store: MemoryStore,
        layout: MessageLayout,
        message: Tensor,
        frames: Tensor,
        a: Tensor,
        windows: Sequence[Window] | None,
    ) -> Tensor:
        """What a message says, and what it changes in what a side keeps."""
        values = self._cut(frames, a, windows).clone()
        layout.take_raw(message, values)
        layout.decode(message, values, add=True)
        if self.keeps:
            for frame, own, window in zip(frames, values.view(a.shape), windows or [...] * len(frames), strict=True):
                frame[window] = own
            rows = Rows.uniform(layout.rows.samples, 0)
            store.save(store.form.encode(frames.view(-1), rows), rows, self._step)
        return values


class _Crossing(torch.autograd.Function):
    """Forward through one boundary, backward through another."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, there: Boundary, back: Boundary, samples: Sequence[int], windows: Any) -> Tensor:
        ctx.back = back
        return there.send(a, samples, windows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        # As one message, in which samples share the largest values: nothing is kept of each.
        gradient = gradients[0]
        return ctx.back.send(gradient.reshape(1, 1, -1), [0]).view(gradient.shape), None, None, None, None


def cross(
    a: Tensor, there: Boundary, back: Boundary, samples: Sequence[int], windows: Sequence[Window] | None = None
) -> Tensor:
    """``a`` as it arrives; its gradient goes back by ``back``, which keeps nothing."""
    return _Crossing.apply(a, there, back, samples, windows)  # pyright: ignore[reportReturnType]
