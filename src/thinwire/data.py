"""Data sets and samplers for pipelines, with the ids of samples and of the next ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from thinwire.arguments import check_int

Item = TypeVar("Item", covariant=True)


class Items(Protocol[Item]):
    """A data set with a length and items by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Item: ...


class Indexed(Dataset[tuple[int, Any]], Generic[Item]):
    """A data set whose items come with their ids: ``Indexed(dataset)[i] == (i, dataset[i])``.

    A ``DataLoader`` of it yields ``(ids, batch)``, whatever its sampler, workers and batch size are; ids are an int64
    tensor of shape (samples,), for ``stage.set_sample_ids(ids)``.
    """

    def __init__(self, dataset: Items[Item]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[int, Item]:
        return index, self.dataset[index]


class Step(NamedTuple):
    """One batch, and the ids of the next one."""

    ids: Tensor
    batch: Any
    upcoming: Tensor
    """Ids of the batch after this one; none (shape (0,)) at the end."""


def with_upcoming(loader: Iterable[tuple[Tensor, Any]]) -> Iterator[Step]:
    """Yield the batches of a loader of `Indexed`, each with the ids of the one after it, so that messages on disk are
    read ahead: ``stage.set_sample_ids(step.ids, upcoming=step.upcoming)``. The loader is one batch ahead."""
    before: tuple[Tensor, Any] | None = None
    for ids, batch in loader:
        if before is not None:
            yield Step(*before, ids)
        before = ids, batch
    if before is not None:
        yield Step(*before, torch.empty(0, dtype=torch.int64, device="cpu"))


class Share(Sampler[int]):
    """One replica's share of a data set, the same in every epoch, in an order of the epoch's own (AQ-SGD, section 3.3).

    With data parallelism each pipeline keeps messages of its own samples only: they are shuffled once among the
    replicas, and then inside each share. Shares differ by one sample at most. Call `set_epoch` before each epoch.

    Args:
        dataset: anything with a length.
        replica, num_replicas: the number of this pipeline, and how many there are.
        seed: the same on all ranks.

    Raises:
        ValueError: there is no such replica, or fewer samples than replicas.
    """

    def __init__(self, dataset: Sized, replica: int, num_replicas: int, *, seed: int = 0) -> None:
        check_int("replica", replica, 0, num_replicas - 1)
        if len(dataset) < num_replicas:
            raise ValueError(f"{len(dataset)} samples cannot be shared by {num_replicas} replicas")
        dealt = torch.randperm(
            len(dataset), generator=torch.Generator().manual_seed(seed), dtype=torch.int64, device="cpu"
        )
        self.samples = dealt[replica::num_replicas]
        """Ids of the share: shape (samples,)."""
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the order, which is the same for the same seed and epoch."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch + 1)
        order = torch.randperm(len(self.samples), generator=generator, dtype=torch.int64, device="cpu")
        return iter(self.samples[order].tolist())
