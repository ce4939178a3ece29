"""The interface of optimizers of thinwire that have something else sent in the place of gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from thinwire.runtime.bucket import BucketLayers


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
