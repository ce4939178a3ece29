"""Cluster centres of activations in place of each sample's message: for streams, where no sample comes back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from thinwire.store import StoreError

MOST_CENTRES = 256
"""The number of centres that one byte can refer to."""


class Centres:
    """The centres that both sides of a boundary keep (S0, appendix G: the relaxation of AQ-SGD for online learning).

    A vector of an activation is sent as the index of its nearest centre, one byte, and its difference from that,
    ``Q(a − c)``. Both sides then move the centre towards the decoded vector, so that they keep the same: the mean of
    all vectors assigned to it, or of about the last ``window`` ones, as the network drifts. The first ``num`` vectors
    become the centres and are sent raw.

    Args:
        num: Number of centres, 1 to 256.
        width: Elements of a vector.
        window: About how many of the last vectors a centre is the mean of.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(self, num: int, width: int, window: int = 1024) -> None:
        if not 1 <= num <= MOST_CENTRES:
            raise ValueError(f"num must be 1 to {MOST_CENTRES} centres, not {num}: a byte refers to one")
        if width < 1 or window < 1:
            raise ValueError(f"width and window must be at least 1, not {width} and {window}")
        self.num, self.width, self.window = num, width, window
        self._values = torch.zeros(num, width)
        self._counts = torch.zeros(num, dtype=torch.int64)
        self._ready = 0

    @property
    def missing(self) -> int:
        """Number of vectors that must be sent raw before all centres exist."""
        return self.num - self._ready

    @property
    def num_bytes(self) -> int:
        """Bytes of the centres, however many samples there are."""
        return self._values.numel() * self._values.itemsize

    def begin(self, vectors: Tensor) -> None:
        """Make the first vectors centres: fp32 of shape (at most `missing`, width)."""
        self._check(vectors)
        if len(vectors) > self.missing:
            raise ValueError(f"{len(vectors)} vectors are more than the {self.missing} centres that are missing")
        self._values[self._ready : self._ready + len(vectors)] = vectors
        self._counts[self._ready : self._ready + len(vectors)] = 1
        self._ready += len(vectors)

    def nearest(self, vectors: Tensor) -> Tensor:
        """Indices of the nearest centres: uint8 (vectors,). Only the sender calls it, because distances may round
        differently on another machine."""
        self._check(vectors)
        return torch.cdist(vectors, self._values[: self._ready]).argmin(1).to(torch.uint8)

    def look_up(self, indices: Tensor) -> Tensor:
        """The centres with these indices: fp32 (vectors, width).

        Raises:
            StoreError: There is no such centre.
        """
        if indices.numel() and int(indices.max()) >= self._ready:
            raise StoreError(f"the message refers to centre {int(indices.max())} of {self._ready}")
        return self._values[indices.long()]

    def update(self, indices: Tensor, arrived: Tensor) -> None:
        """Move the centres with these indices towards the decoded vectors, fp32 (vectors, width)."""
        self._check(arrived)
        index = indices.long()
        more = torch.bincount(index, minlength=self.num)
        sums = torch.zeros_like(self._values).index_add_(0, index, arrived)
        # A vector that is not finite would make its centre useless for ever.
        good = (more > 0) & torch.isfinite(sums).all(1)
        before = self._counts.clamp(max=self.window)
        after = (before + more).unsqueeze(1)
        moved = (self._values * before.unsqueeze(1) + sums) / after.clamp(min=1)
        self._values = torch.where(good.unsqueeze(1), moved, self._values)
        self._counts += torch.where(good, more, 0)

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors from which `load_state_dict` restores the centres."""
        return {"values": self._values.clone(), "counts": self._counts.clone(), "ready": torch.tensor(self._ready)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the centres from a `state_dict`.

        Raises:
            StoreError: The state is not one of as many centres of that width.
        """
        values, counts, ready = (state.get(name) for name in ("values", "counts", "ready"))
        if values is None or counts is None or ready is None:
            raise StoreError("this is not the state of cluster centres")
        sizes = tuple(values.shape) == (self.num, self.width) and tuple(counts.shape) == (self.num,)
        if not sizes or values.dtype != torch.float32 or counts.dtype != torch.int64:
            raise StoreError(f"the state has centres {tuple(values.shape)}, expected {(self.num, self.width)}")
        if not 0 <= int(ready) <= self.num or bool((counts < 0).any()):
            raise StoreError(f"the state has {int(ready)} of {self.num} centres, or a negative count: it is invalid")
        self._values, self._counts, self._ready = values.clone(), counts.clone(), int(ready)

    def _check(self, vectors: Tensor) -> None:
        if vectors.dim() != 2 or vectors.shape[1] != self.width or vectors.dtype != torch.float32:
            raise ValueError(f"vectors are fp32 of shape (vectors, {self.width}), not {tuple(vectors.shape)}")
