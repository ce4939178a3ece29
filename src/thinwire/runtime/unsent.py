"""Residuals of layers that keep none from now on."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.compressors import not_finite
from thinwire.runtime.channel import BucketLayers, bucket_parts
from thinwire.runtime.executor import AsyncReadback


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
        """Add what is still to be sent to a bucket's gradients, which are ``loss_scale`` times as large as they are."""
        self._num_buckets += 1
        for name, values in bucket_parts(flat, layers):
            if (residual := self._waiting.pop(name, None)) is not None:
                self._sent[name] = residual
                values.add_(residual.to(values.device).view_as(values), alpha=loss_scale)

    def note_mean(self, mean: Tensor) -> None:
        """Note whether the mean of a bucket of this step is finite."""
        self._means.note(not_finite(mean))

    def end_step(self) -> None:
        """Between two steps: forget what the last one sent if it was taken; send it again if not."""
        means = self._means.read()
        if len(means) < self._num_buckets or not all(bool(torch.isfinite(mean)) for mean in means):
            self.keep()
        self._sent.clear()
        self._num_buckets = 0

    def keep(self) -> None:
        """Send again what the last step sent, since its means are not used."""
        for layer, residual in self._sent.items():
            self.add(layer, residual)
        self._sent.clear()
