"""The contract of message stores: the activations from which one side of a stage boundary takes changes."""

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
    """Counts of events of a store's records."""

    corrupt: int = 0
    """Number of records that differed from the bytes that had been written. Their samples count as unseen."""
    evicted: int = 0
    """Number of samples that were dropped to make room for others."""
    turned_away: int = 0
    """Number of visits of samples for which there was no room."""


class Store(ABC):
    """Keeps the reference of activations' changes: m(ξ) of each sample ξ, or a substitute for it.

    Its contents depend on the calls alone, not on hashes, clocks or threads, so that the two sides of a boundary,
    which make the same calls, are the same. A step begins with `admit`; its micro-batches are loaded and saved in
    their order.
    """

    chooses: ClassVar[bool] = False
    """Whether the sender chooses the reference of a sample's change. Its choices are sent with the message, so that
    nothing can be loaded ahead."""

    def __init__(self, form: RecordFormat) -> None:
        self.form = form
        self.counts = StoreCounts()

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples that are kept."""

    @abstractmethod
    def visits(self, sample: int) -> int:
        """Return the visits since the sample was first kept, that one included; 0 if it is to be sent whole."""

    @abstractmethod
    def view(self, sample: int, *, compare: bool) -> int | None:
        """Return a number that both sides share if they keep the same for the sample; None if nothing is kept. With
        ``compare`` it depends on the kept bytes, otherwise only on when they were written."""

    def check_corners(self, corners: Sequence[tuple[int, int]] | None) -> None:
        """Raise ``ValueError`` unless the crops that a step sees begin where this store can keep them."""
        if corners is not None:
            raise ValueError("corners= are of images that are seen cropped: they go with store=thinwire.store.Crops()")

    @abstractmethod
    def admit(self, samples: Sequence[int]) -> frozenset[int]:
        """Begin a step with these samples, and return those for which there is no room."""

    def choose(self, values: Tensor, rows: Rows) -> Tensor:
        """Return the sender's choice of the reference of values (elements,): uint8 of shape (samples, vectors of each).
        Only for a store that `chooses`."""
        raise NotImplementedError

    @abstractmethod
    def load(self, rows: Rows, choices: Tensor | None = None) -> Tensor:
        """Return the values m(ξ) of samples that are all kept: fp32 (elements,), laid out as ``rows``; zero at
        positions that were never seen. ``choices`` are those of `choose`.

        Raises:
            StoreError: A choice refers to something that is not kept.
        """

    @abstractmethod
    def save(self, records: Tensor, rows: Rows, step: int, choices: Tensor | None = None) -> None:
        """Keep the records (samples, record_bytes) of samples visited in a step (from 0). They are copied or kept.
        ``choices`` are those of `choose`; None if the samples were sent whole."""

    @abstractmethod
    def forget(self, sample: int) -> None:
        """Drop the record of this sample alone, which counts as unseen from now on."""

    @abstractmethod
    def reset(self, samples: Iterable[int]) -> None:
        """Drop the records of these samples, which the two sides keep differently: they are to be sent whole."""

    @abstractmethod
    def clear(self) -> None:
        """Drop everything."""

    def verify(self, samples: Iterable[int]) -> list[int]:
        """Forget, count and return the samples whose records differ from what was written."""
        return []

    @abstractmethod
    def digest(self) -> int:
        """Return a number that two stores share if, and only if, they keep the same."""

    def prefetch(self, samples: Iterable[int]) -> None:  # noqa: B027 - what is in memory is there
        """Read the records of these samples, which are used next, in the background."""

    def flush(self) -> None:  # noqa: B027 - what is in memory is there
        """Block until all saved records are on disk."""

    def close(self) -> None:  # noqa: B027 - memory needs no closing
        """Close files."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes that the store takes now, in memory or on disk."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Return tensors from which `load_state_dict` restores the store."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the store from a `state_dict`.

        Raises:
            StoreError: The state is not one of such a store.
        """
