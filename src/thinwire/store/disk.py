"""A message store on disk: a memory-mapped file of records of fixed size, an index and a manifest."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.store.files import ROW_BYTES, Files
from thinwire.store.memory import Entry, Evict, RecordStore
from thinwire.store.store import RecordFormat, StoreError
from thinwire.threads import Worker

_NO_ROW = bytes(ROW_BYTES)
_LAST_WRITES_S = 10.0
"""Seconds that the interpreter waits, when it ends, for records to be written."""


class DiskStore(RecordStore):
    """A record of each sample in a file, read through a memory map and written behind by a background thread.

    ``folder`` has ``manifest.json`` (format, shape, precision, dtype, number of records, run, site), ``records.bin``
    and ``index.bin``, which has a row for every slot of ``records.bin``: the sample, its entry, the checksum of the
    record, and a checksum of the row. The row is written after the record, and a record whose checksum differs from its
    row counts as corrupt. So after a crash every record is old, new, or recognized as torn.

    A record that a state (`state_dict`) names is not overwritten: its sample's next record goes to another slot, until
    ``snapshots`` newer states were made. So a run that is killed at any time resumes from such a state bit by bit: the
    state has the slots of its records, the index those of the newest ones. This takes up to ``1 + snapshots`` times the
    size of the records, which is reserved when the store is made.

    Raises:
        StoreError: the folder has a store of another run or shape, or one that is in use; the disk has too little
            room; or a file has the wrong size. `open` raises it, too.
    """

    def __init__(
        self,
        folder: str | Path,
        form: RecordFormat,
        capacity: int,
        *,
        run: int,
        evict: Evict | None = None,
        snapshots: int = 1,
        waiting_bytes: int = 256 << 20,
    ) -> None:
        super().__init__(form, capacity, evict)
        self._snapshots = snapshots
        self._num_slots = capacity * (1 + snapshots)
        self._error: Exception | None = None
        """Error of a job of the worker's thread, after which it does nothing more."""
        self._slots: dict[int, int] = {}
        self._orders: dict[int, int] = {}
        self._next_order = 0
        self._sums: dict[int, int] = {}
        self._checked: dict[int, int] = {}
        self._pending: dict[int, Tensor] = {}
        self._lock = threading.Lock()
        self._pinned: deque[frozenset[int]] = deque()
        self._free: deque[int] = deque(range(self._num_slots))
        identity = {**form.describe(), "site": form.site, "slots": self._num_slots, "run": run}
        self._make_files = partial(Files, Path(folder), identity, self._num_slots, form.record_bytes)
        self._make_worker = partial(Worker, "thinwire store", max_bytes=waiting_bytes, within_s=_LAST_WRITES_S)
        self._files, self._worker = self._make_files(), self._make_worker()
        if self._files.existed:
            try:
                self._reopen()
            except BaseException:
                self.close()
                raise

    def checksum(self, sample: int) -> int:
        slot = self._slots[sample]
        pending = self._pending.get(slot)
        return kernels.checksum(self._files.record(slot) if pending is None else pending)

    def prefetch(self, samples: Iterable[int]) -> None:
        slots = [self._slots[sample] for sample in samples if sample in self._slots]
        if slots:
            self._submit(lambda: self._check_ahead(slots))

    def _check_ahead(self, slots: list[int]) -> None:
        self._files.read_ahead(slots)
        for slot in slots:
            checksum = kernels.checksum(self._files.record(slot))
            with self._lock:
                # If a new record was saved meanwhile, it is pending behind this job, and the checksum is that of the
                # old one.
                if slot not in self._pending:
                    self._checked[slot] = checksum

    def _submit(self, job: Callable[[], None], num_bytes: int = 0) -> None:
        """Read ahead or write behind in the worker's thread. The error of a job is raised by the next call."""

        def run() -> None:
            if self._error is None:
                try:
                    job()
                except Exception as error:  # noqa: BLE001 - raised in the thread that submits
                    self._error = error

        self._raise()
        self._worker.submit(run, num_bytes)

    def _raise(self) -> None:
        if self._error is not None:
            raise StoreError(f"the message store failed: {self._error}") from self._error

    def flush(self) -> None:
        """Block until all saved records are on disk."""
        self._worker.wait()
        self._raise()
        self._files.sync()  # nothing, if they are closed

    def open(self) -> None:
        if self._worker.closed:
            self._files, self._worker = self._make_files(), self._make_worker()

    def close(self) -> None:
        self._worker.close()
        self._worker.join()
        try:
            self.flush()
        finally:
            self._files.close()

    @property
    def num_bytes(self) -> int:
        return self._num_slots * (self.form.record_bytes + ROW_BYTES)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the slots of the records, which stay on disk until ``snapshots`` newer states were made."""
        self.flush()
        state = super().state_dict()
        slots = [self._slots[sample] for sample in self._entries]
        state["slots"] = torch.tensor(slots, dtype=torch.int64, device="cpu")
        state["checksums"] = torch.tensor(
            [_signed(self._sums[slot]) for slot in slots], dtype=torch.int64, device="cpu"
        )
        if self._snapshots:
            self._pinned.append(frozenset(slots))
            if len(self._pinned) > self._snapshots:
                released = self._pinned.popleft().difference(slots, *self._pinned)
                self._free.extend(sorted(released))
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        entries = self._load_entries(state)
        columns = [state.get(name) for name in ("slots", "checksums")]
        if not all(isinstance(c, Tensor) and c.dtype == torch.int64 and c.numel() == len(entries) for c in columns):
            raise StoreError("the state is not one of a message store on disk: its slots or checksums are missing")
        slots, sums = ([] if c is None else c.reshape(-1).tolist() for c in columns)
        if len(set(slots)) != len(slots) or not all(0 <= slot < self._num_slots for slot in slots):
            raise StoreError(f"the state names slots that a store of {self._num_slots} does not have")
        self.flush()
        self._take(dict(zip(entries, slots, strict=True)), entries, dict(zip(slots, sums, strict=True)))
        self._pinned = deque([frozenset(slots)] if self._snapshots else [])
        # The other slots were written after the state was saved.
        for slot in self._free:
            self._files.write_row(slot, _NO_ROW)
        for sample in self._entries:
            self._files.write_row(self._slots[sample], self._row(sample))

    def _take(self, slots: Mapping[int, int], entries: dict[int, Entry], sums: Mapping[int, int]) -> None:
        self._entries, self._slots = entries, dict(slots)
        self._orders = {sample: order for order, sample in enumerate(entries)}
        self._next_order = len(entries)
        self._sums = {slot: value % 2**64 for slot, value in sums.items()}
        self._checked.clear()
        used = frozenset(self._slots.values())
        self._free = deque(slot for slot in range(self._num_slots) if slot not in used)

    def _reopen(self) -> None:
        """Load the records of an earlier process: the newest one of each sample whose row is intact."""
        newest: dict[int, tuple[int, Entry, int, int]] = {}
        for slot, row in enumerate(self._files.rows()):
            sample, version, visits, length, order, total, check, _ = row
            if not any(row):
                continue
            try:
                self._check_entry(sample, Entry(version, visits, length))
            except StoreError:
                check = 0
            if check != _row_check(row[:6]):
                self.corrupt += 1
            elif sample not in newest or newest[sample][1].version < version:
                newest[sample] = slot, Entry(version, visits, length), order, total
        ordered = sorted(newest, key=lambda sample: newest[sample][2])[: self.capacity]
        entries = {sample: newest[sample][1] for sample in ordered}
        slots = {sample: newest[sample][0] for sample in ordered}
        self._take(slots, entries, {newest[sample][0]: newest[sample][3] for sample in ordered})
        self._orders = {sample: newest[sample][2] for sample in ordered}
        self._next_order = max(self._orders.values(), default=-1) + 1
        for slot in self._free:
            self._files.write_row(slot, _NO_ROW)

    def _read(self, sample: int, out: Tensor) -> None:
        slot = self._slots[sample]
        pending = self._pending.get(slot)
        out.copy_(self._files.record(slot) if pending is None else pending)

    def _write(self, sample: int, record: Tensor) -> None:
        old = self._slots.get(sample)
        slot = self._free.popleft() if old is None or self._is_pinned(old) else old
        if old is None:
            self._orders[sample] = self._next_order
            self._next_order += 1
        self._slots[sample] = slot
        self._sums[slot] = kernels.checksum(record)
        with self._lock:
            self._checked.pop(slot, None)
            self._pending[slot] = record
        row, left = self._row(sample), None if old == slot else old
        self._submit(lambda: self._put(slot, record, row, left), record.numel())

    def _put(self, slot: int, record: Tensor, row: bytes, left: int | None) -> None:
        self._files.write_record(slot, record)
        self._files.write_row(slot, row)
        if left is not None:
            self._files.write_row(left, _NO_ROW)
        with self._lock:
            # A newer record may be saved at this moment. That one is read until it is written, too.
            if self._pending.get(slot) is record:
                del self._pending[slot]

    def _drop(self, sample: int) -> None:
        slot = self._slots.pop(sample)
        del self._orders[sample]
        if not self._is_pinned(slot):
            self._free.append(slot)
            with self._lock:
                self._pending.pop(slot, None)
        self._submit(lambda: self._files.write_row(slot, _NO_ROW))

    def _is_pinned(self, slot: int) -> bool:
        return any(slot in pinned for pinned in self._pinned)

    def verify(self, samples: Iterable[int]) -> list[int]:
        damaged = [sample for sample in samples if sample in self._entries and not self._is_whole(sample)]
        for sample in damaged:
            self.forget(sample)
        self.corrupt += len(damaged)
        return damaged

    def _is_whole(self, sample: int) -> bool:
        """Whether the record of a kept sample is the one that was written."""
        slot = self._slots[sample]
        if slot in self._pending:
            return True
        checksum = self._checked.pop(slot, None)
        return (kernels.checksum(self._files.record(slot)) if checksum is None else checksum) == self._sums[slot]

    def _row(self, sample: int) -> bytes:
        slot = self._slots[sample]
        words = [sample, *self._entries[sample], self._orders[sample], _signed(self._sums[slot])]
        return b"".join(word.to_bytes(8, "little", signed=True) for word in (*words, _row_check(words), 0))


def _signed(value: int) -> int:
    """Return an unsigned 64-bit number as the signed one of the same bits, which tensors can hold."""
    return value - 2**64 if value >= 2**63 else value


def _row_check(words: Iterable[int]) -> int:
    return _signed(kernels.derive_key(*words))
