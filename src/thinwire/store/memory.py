"""Stores of one record for each sample, and the one that keeps them in memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.store.store import LARGEST_SAMPLE, RecordFormat, Rows, Store, StoreError

Evict = Literal["newcomers", "oldest"]


class Entry(NamedTuple):
    """Facts about the record of a sample."""

    version: int
    """Training step that wrote the record, from 1."""
    visits: int
    """Number of visits since the sample was first kept, that step included."""
    length: int
    """Number of positions in the record."""


class RecordStore(Store):
    """Keeps one record for each sample, with its step, visits and length.

    Args:
        form: format of the records.
        capacity: number of samples that there is room for; None for any number.
        evict: what happens to a sample more than that: ``newcomers`` are turned away, or the ``oldest`` samples are
            dropped. None makes it an error.
    """

    def __init__(self, form: RecordFormat, capacity: int | None = None, evict: Evict | None = None) -> None:
        super().__init__(form)
        self.kept = form
        """Format of the records, which may be of more than an activation."""
        self.capacity = capacity
        self.evict = evict
        self._entries: dict[int, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, sample: int) -> bool:
        return sample in self._entries

    def entry(self, sample: int) -> Entry | None:
        """Return the entry of a sample; None if it was not seen, or was dropped."""
        return self._entries.get(sample)

    def visits(self, sample: int) -> int:
        known = self._entries.get(sample)
        return known.visits if known else 0

    def view(self, sample: int, *, compare: bool) -> int | None:
        known = self._entries.get(sample)
        return None if known is None else kernels.derive_key(*known, self.checksum(sample) if compare else 0)

    @property
    def samples(self) -> tuple[int, ...]:
        """Samples that are kept, in the order in which they were first seen."""
        return tuple(self._entries)

    def admit(self, samples: Sequence[int]) -> None:
        """Make room for the samples of a step, which are never dropped for one another.

        Raises:
            StoreError: there are more samples than the store was made for.
        """
        self.refused = frozenset()
        new = [sample for sample in samples if sample not in self._entries]
        if self.capacity is None or len(self._entries) + len(new) <= self.capacity:
            return
        if self.evict is None:
            first = new[self.capacity - len(self._entries)]
            raise StoreError(
                f"sample {first} is unknown: the store was made for {self.capacity} samples and has seen as many "
                "others. num_samples must be that of the data set (of this replica's share of it), and ids must be "
                "the samples' own, the same in every epoch"
            )
        if self.evict == "oldest":
            present = frozenset(samples)
            missing = len(self._entries) + len(new) - self.capacity
            for sample in list(islice((s for s in self._entries if s not in present), missing)):
                self.forget(sample)
                self.evicted += 1
        self.refused = frozenset(new[self.capacity - len(self._entries) :])
        self.turned_away += len(self.refused)

    def load(self, rows: Rows, choices: Tensor | None = None) -> Tensor:
        records = torch.empty(len(rows.samples), self.kept.record_bytes, dtype=torch.uint8, device="cpu")
        for record, sample in zip(records, rows.samples, strict=True):
            self._read(sample, record)
        return self.kept.decode(records, [self._entries[sample].length for sample in rows.samples], rows)

    def save(self, records: Tensor, rows: Rows, step: int, choices: Tensor | None = None) -> None:
        for record, sample, length in zip(records, rows.samples, rows.lengths, strict=True):
            known = self._entries.get(sample)
            self._entries[sample] = Entry(step + 1, known.visits + 1 if known else 1, length)
            try:
                self._write(sample, record)
            except BaseException:
                del self._entries[sample]  # the other side may have saved it: here it is unseen
                raise

    def forget(self, sample: int) -> None:
        if self._entries.pop(sample, None) is not None:
            self._drop(sample)

    def reset(self, samples: Iterable[int]) -> None:
        for sample in samples:
            self.forget(sample)

    def clear(self) -> None:
        self.reset(self.samples)

    @abstractmethod
    def checksum(self, sample: int) -> int:
        """Return a 64-bit checksum of the present bytes of a sample's record."""

    def digest(self) -> int:
        total = 0
        for sample, entry in self._entries.items():
            total ^= kernels.derive_key(sample, *entry, self.checksum(sample))
        return kernels.derive_key(len(self), total)

    def state_dict(self) -> dict[str, Tensor]:
        entries = [(sample, *entry) for sample, entry in self._entries.items()]
        return {"entries": torch.tensor(entries, dtype=torch.int64, device="cpu").reshape(len(entries), 4)}

    def _load_entries(self, state: Mapping[str, Tensor]) -> dict[int, Entry]:
        """Return the entries of a state. They are checked, because a state is read from a file."""
        table = state.get("entries")
        if not isinstance(table, Tensor) or table.dtype != torch.int64 or table.dim() != 2 or table.shape[1] != 4:
            raise StoreError("this is not the state of a message store: it has no table of entries")
        entries = {int(row[0]): Entry(*row[1:]) for row in table.tolist()}
        if len(entries) != len(table) or (self.capacity is not None and len(entries) > self.capacity):
            raise StoreError(
                f"the state has {len(table)} entries, of {len(entries)} samples, where {self.capacity} fit"
            )
        for sample, entry in entries.items():
            self._check_entry(sample, entry)
        return entries

    def _check_entry(self, sample: int, entry: Entry) -> None:
        sizes = 0 <= entry.length <= self.kept.length
        if not 0 <= sample < LARGEST_SAMPLE or entry.version < 1 or entry.visits < 1 or not sizes:
            raise StoreError(f"the store has an invalid entry for sample {sample}: {entry}")

    @abstractmethod
    def _read(self, sample: int, out: Tensor) -> None:
        """Copy a kept sample's record to ``out`` (record_bytes,)."""

    @abstractmethod
    def _write(self, sample: int, record: Tensor) -> None:
        """Keep the record of a sample, which has an entry."""

    @abstractmethod
    def _drop(self, sample: int) -> None:
        """Drop the record of a sample, whose entry is gone."""


class MemoryStore(RecordStore):
    """Keeps the records in memory. They are part of the state, so a checkpoint is as large as they are."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._records: dict[int, Tensor] = {}

    def checksum(self, sample: int) -> int:
        return kernels.checksum(self._records[sample])

    @property
    def num_bytes(self) -> int:
        return len(self._records) * self.kept.record_bytes

    def state_dict(self) -> dict[str, Tensor]:
        records = [self._records[sample] for sample in self._entries]
        empty = torch.empty(0, self.kept.record_bytes, dtype=torch.uint8, device="cpu")
        return {**super().state_dict(), "records": torch.stack(records) if records else empty}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        entries, records = self._load_entries(state), state.get("records")
        expected = (len(entries), self.kept.record_bytes)
        if not isinstance(records, Tensor) or records.dtype != torch.uint8 or tuple(records.shape) != expected:
            shape = f"{tuple(records.shape)}" if isinstance(records, Tensor) else "none"
            raise StoreError(
                f"the state's records are {shape}, expected {expected}: it is of another model, precision or store"
            )
        self._entries = entries
        self._records = {sample: record.clone() for sample, record in zip(entries, records.cpu(), strict=True)}

    def _read(self, sample: int, out: Tensor) -> None:
        out.copy_(self._records[sample])

    def _write(self, sample: int, record: Tensor) -> None:
        mine = self._records.get(sample)
        if mine is None:
            # A copy: the record is a row of a micro-batch's, which all its rows would keep alive.
            self._records[sample] = record.clone()
        else:
            mine.copy_(record)

    def _drop(self, sample: int) -> None:
        del self._records[sample]
