"""A message store on disk: a memory-mapped file of records of fixed size, an index and a manifest."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.store.background import Background
from thinwire.store.errors import StoreError
from thinwire.store.manifest import check_manifest, check_room, open_file, read_manifest, write_manifest
from thinwire.store.record_store import Entry, Evict, RecordStore
from thinwire.store.records import RecordFormat

_WORDS = 8
_ROW_BYTES = 8 * _WORDS
_NO_ROW = bytes(_ROW_BYTES)
_MARK = b"thinwire message store\n"


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
        StoreError: The folder has a store of another run or shape, or one that is in use; the disk has too little
            room; or a file has the wrong size.
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
        background: Background | None = None,
    ) -> None:
        super().__init__(form, capacity, evict)
        self._folder = Path(folder)
        self._snapshots = snapshots
        self._num_slots = capacity * (1 + snapshots)
        self._background = background or Background()
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
        self._files = _Files(self._folder, identity, self._num_slots, form.record_bytes)
        if self._files.existed:
            self._reopen()

    def checksum(self, sample: int) -> int:
        slot = self._slots[sample]
        pending = self._pending.get(slot)
        return kernels.checksum(self._files.record(slot) if pending is None else pending)

    def prefetch(self, samples: Iterable[int]) -> None:
        slots = [self._slots[sample] for sample in samples if sample in self._slots]
        if slots:
            self._background.submit(lambda: self._check_ahead(slots))

    def _check_ahead(self, slots: list[int]) -> None:
        self._files.read_ahead(slots)
        for slot in slots:
            checksum = kernels.checksum(self._files.record(slot))
            with self._lock:
                # If a new record was saved meanwhile, it is pending behind this job, and the checksum is that of the
                # old one.
                if slot not in self._pending:
                    self._checked[slot] = checksum

    def flush(self) -> None:
        self._background.wait()
        self._files.sync()

    def close(self) -> None:
        self._background.close()
        self._files.close()

    @property
    def num_bytes(self) -> int:
        return self._num_slots * (self.form.record_bytes + _ROW_BYTES)

    @property
    def waiting_bytes(self) -> int:
        """Bytes of memory of records that are not written yet."""
        return self._background.held_bytes

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
        self._background.wait()
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
                self.counts.corrupt += 1
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
        self._background.submit(lambda: self._put(slot, record, row, left), record.numel())

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
        self._background.submit(lambda: self._files.write_row(slot, _NO_ROW))

    def _is_pinned(self, slot: int) -> bool:
        return any(slot in pinned for pinned in self._pinned)

    def _is_whole(self, sample: int) -> bool:
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


class _Files:
    """The files of a store, which are made, or opened if they belong to this store.

    Folder and files are closed to other users. The file ``lock`` has a mark from before the first record on: in a
    folder with the mark and without a manifest, making the store was interrupted, and it is made again. Without the
    mark no file is overwritten.
    """

    def __init__(self, folder: Path, identity: Mapping[str, object], num_slots: int, record_bytes: int) -> None:
        self._record_bytes, self._num_slots = record_bytes, num_slots
        self._open: list[int] = []
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)
        except OSError as error:
            raise StoreError(f"{folder} cannot hold a message store: {error.strerror}. Name another folder") from None
        try:
            marked = self._take_lock(folder)
            manifest = read_manifest(folder)
            self.existed = manifest is not None
            if manifest is not None:
                check_manifest(folder, manifest, identity)
            sizes = {"records.bin": num_slots * record_bytes, "index.bin": num_slots * _ROW_BYTES}
            if manifest is None:
                check_room(folder, sum(sizes.values()), f"{num_slots} records of {record_bytes} bytes")
            files = {name: self._file(folder, name, exclusive=not (self.existed or marked)) for name in sizes}
            if manifest is None:
                os.pwrite(self._open[0], _MARK, 0)
            for name, size in sizes.items():
                _set_size(files[name], size, folder / name, new=manifest is None)
            self._records, self._index = files.values()
            # The map must not outlive the size of the file; nobody shortens it while the lock is held.
            self._map: Tensor | None = torch.frombuffer(
                mmap.mmap(self._records, sizes["records.bin"]), dtype=torch.uint8
            ).view(num_slots, record_bytes)
            if manifest is None:
                write_manifest(folder, identity)
        except BaseException:
            self.close()
            raise

    def _take_lock(self, folder: Path) -> bool:
        """Lock the folder for this process. Returns whether a store was made, or begun, in it before."""
        lock = self._file(folder, "lock")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StoreError(f"the message store in {folder} is in use by another process: give it a folder") from None
        content = os.pread(lock, len(_MARK) + 1, 0)
        if content not in (b"", _MARK):
            raise StoreError(f"{folder / 'lock'} is not a message store's: name another folder")
        return bool(content)

    def _file(self, folder: Path, name: str, *, exclusive: bool = False) -> int:
        file = open_file(folder / name, exclusive=exclusive)
        self._open.append(file)
        return file

    def record(self, slot: int) -> Tensor:
        """Return the record in a slot (uint8), in the memory map."""
        assert self._map is not None, "the store is open"
        return self._map[slot]

    def rows(self) -> list[list[int]]:
        """Return the rows of the index."""
        data = os.pread(self._index, self._num_slots * _ROW_BYTES, 0)
        return torch.frombuffer(bytearray(data), dtype=torch.int64).view(self._num_slots, _WORDS).tolist()

    def read_ahead(self, slots: Iterable[int]) -> None:
        """Ask the operating system to read these slots into its cache."""
        for slot in slots:
            at = slot * self._record_bytes
            os.posix_fadvise(self._records, at, self._record_bytes, os.POSIX_FADV_WILLNEED)

    def write_record(self, slot: int, record: Tensor) -> None:
        # The map is not written to: on a full disk that would end the process instead of raising an error.
        data = memoryview(record.contiguous().numpy())  # pyright: ignore[reportArgumentType] - arrays are buffers
        _write_all(self._records, data, slot * self._record_bytes)

    def write_row(self, slot: int, row: bytes) -> None:
        _write_all(self._index, memoryview(row), slot * _ROW_BYTES)

    def sync(self) -> None:
        os.fdatasync(self._records)
        os.fdatasync(self._index)

    def close(self) -> None:
        self._map = None
        for file in self._open:
            with contextlib.suppress(OSError):
                os.close(file)
        self._open.clear()


def _set_size(file: int, size: int, path: Path, *, new: bool) -> None:
    """Reserve ``size`` zero bytes for a new file; check that an old one has as many."""
    if new:
        os.ftruncate(file, 0)
        try:
            os.posix_fallocate(file, 0, size)
        except OSError as error:
            raise StoreError(f"the disk cannot hold {path} of {size} bytes: {error.strerror}") from None
    elif os.fstat(file).st_size != size:
        raise StoreError(
            f"{path} has {os.fstat(file).st_size} bytes, not {size}: it is damaged. Remove the folder; samples will "
            "count as unseen"
        )


def _write_all(file: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(file, data, at)
        data, at = data[written:], at + written
