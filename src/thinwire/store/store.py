"""The contract of message stores: what one side of a stage boundary keeps, from which it takes what changed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from thinwire.store.records import RecordFormat, Rows

LARGEST_SAMPLE = 2**62


@dataclass
class StoreCounts:
    """What happened to the records of a store."""

    corrupt: int = 0
    """Records that differed from what had been written. Their samples count as unseen."""
    evicted: int = 0
    """Samples that were dropped to make room for others."""
    turned_away: int = 0
    """Visits of samples for which there was no room."""


class Store(ABC):
    """Keeps what the changes of activations are taken from: m(ξ) of each sample ξ, or what stands for it.

    What it holds depends on the calls alone, not on hashes, clocks or threads, so that the two sides of a boundary,
    which make the same calls, hold the same. A step begins with `admit`; its micro-batches are loaded and saved in
    their order.
    """

    chooses: ClassVar[bool] = False
    """Whether the sender chooses what a sample's change is taken from. Its choices go with the message, so that nothing
    can be loaded ahead."""

    def __init__(self, form: RecordFormat) -> None:
        self.form = form
        self.counts = StoreCounts()

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples that are kept."""

    @abstractmethod
    def visits(self, sample: int) -> int:
        """Number of visits since the sample was first kept, that one included; 0 if it is to be sent whole."""

    @abstractmethod
    def view(self, sample: int, *, compare: bool) -> int | None:
        """A number that both sides share if they keep the same for the sample; None if nothing is kept. With
        ``compare``, the bytes that are kept are in it, otherwise only when they were written."""

    def check_corners(self, corners: Sequence[tuple[int, int]] | None) -> None:
        """Raise ``ValueError`` unless the crops that a step sees begin where this store can keep them."""
        if corners is not None:
            raise ValueError("corners= are of images that are seen cropped: they go with store=thinwire.store.Crops()")

    @abstractmethod
    def admit(self, samples: Sequence[int]) -> frozenset[int]:
        """Begin a step with these samples, and return those for which there is no room."""

    def choose(self, values: Tensor, rows: Rows) -> Tensor:
        """What the sender takes the changes of values (elements,) from: uint8 of shape (samples, vectors of each). Only
        of a store that `chooses`."""
        raise NotImplementedError

    @abstractmethod
    def load(self, rows: Rows, choices: Tensor | None = None) -> Tensor:
        """The values m(ξ) of samples that are all kept: fp32 (elements,), laid out as ``rows``; zero at positions that
        were never seen. ``choices`` are those of `choose`.

        Raises:
            StoreError: A choice is of what is not kept.
        """

    @abstractmethod
    def save(self, records: Tensor, rows: Rows, step: int, choices: Tensor | None = None) -> None:
        """Keep the records (samples, record_bytes) of samples visited in a step (from 0). They are copied or kept.
        ``choices`` are those of `choose`; None if the samples were sent whole."""

    @abstractmethod
    def forget(self, sample: int) -> None:
        """Drop what is kept of this sample alone, which counts as unseen from now on."""

    @abstractmethod
    def reset(self, samples: Iterable[int]) -> None:
        """Drop what the two sides keep differently of these samples: they are to be sent whole."""

    @abstractmethod
    def clear(self) -> None:
        """Drop everything."""

    def verify(self, samples: Iterable[int]) -> list[int]:
        """Forget, count and return the samples whose records differ from what was written."""
        return []

    @abstractmethod
    def digest(self) -> int:
        """A number that two stores share if, and only if, they hold the same."""

    def prefetch(self, samples: Iterable[int]) -> None:  # noqa: B027 - what is in memory is there
        """Read the records of these samples, which come next, in the background."""

    def flush(self) -> None:  # noqa: B027 - what is in memory is there
        """Block until everything that was saved is on disk."""

    def close(self) -> None:  # noqa: B027 - memory needs no closing
        """Let go of files."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes that the store takes now, in memory or on disk."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Tensors from which `load_state_dict` restores the store."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the store from a `state_dict`.

        Raises:
            StoreError: The state is not one of such a store.
        """
