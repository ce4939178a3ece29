"""The files of a store on disk: its folder, lock, manifest, records and index."""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from thinwire.store.store import StoreError

_NAME = "manifest.json"
_VERSION = 2
WORDS = 8
"""Number of 64-bit words in a row of the index."""
ROW_BYTES = 8 * WORDS


def read_manifest(folder: Path) -> dict[str, object] | None:
    """Return the manifest of a store; None where there is none.

    Raises:
        StoreError: there is a file of that name which is not a manifest.
    """
    path = folder / _NAME
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"{path} is not the manifest of a message store ({error}): remove {folder}") from None
    if not isinstance(manifest, dict):
        raise StoreError(f"{path} is not the manifest of a message store: remove {folder}")
    return manifest


class Files:
    """The files of a store, which are made, or opened if they belong to this store.

    Folder and files are closed to other users. The manifest is written last: without one, making the store was
    interrupted, and it is made again.
    """

    def __init__(self, folder: Path, identity: Mapping[str, object], num_slots: int, record_bytes: int) -> None:
        self._record_bytes, self._num_slots = record_bytes, num_slots
        self._open: list[int] = []
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)
        except OSError as error:
            raise StoreError(f"{folder} cannot hold a message store: {error.strerror}. Name another folder") from None
        sizes = {"records.bin": num_slots * record_bytes, "index.bin": num_slots * ROW_BYTES}
        try:
            self._lock(folder)
            manifest = read_manifest(folder)
            self.existed = manifest is not None
            if manifest is None:
                _check_room(folder, sum(sizes.values()), f"{num_slots} records of {record_bytes} bytes")
            else:
                _check_manifest(folder, manifest, identity)
            self._records, self._index = (self._sized(folder / name, size) for name, size in sizes.items())
            # The map must not outlive the size of the file; nobody shortens it while the lock is held.
            self._map: Tensor | None = torch.frombuffer(
                mmap.mmap(self._records, sizes["records.bin"]), dtype=torch.uint8
            ).view(num_slots, record_bytes)
            if manifest is None:
                self._write_manifest(folder, identity)
        except BaseException:
            self.close()
            raise

    def _file(self, path: Path) -> int:
        """Open a file that only this user may read and write, and make one that is missing. A link is not followed."""
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(f"{path} cannot be opened: {error.strerror} (symbolic links are not followed)") from None
        self._open.append(file)
        os.fchmod(file, 0o600)
        return file

    def _lock(self, folder: Path) -> None:
        try:
            fcntl.flock(self._file(folder / "lock"), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StoreError(f"the message store in {folder} is in use by another process: give it a folder") from None

    def _sized(self, path: Path, size: int) -> int:
        """Open a file and reserve ``size`` zero bytes for it if it is new; an old one must have as many."""
        file = self._file(path)
        if not self.existed:
            os.ftruncate(file, 0)
            try:
                os.posix_fallocate(file, 0, size)
            except OSError as error:
                raise StoreError(f"the disk cannot hold {path} of {size} bytes: {error.strerror}") from None
        elif (found := os.fstat(file).st_size) != size:
            raise StoreError(
                f"{path} has {found} bytes, not {size}: it is damaged. Remove the folder; samples will count as unseen"
            )
        return file

    def _write_manifest(self, folder: Path, identity: Mapping[str, object]) -> None:
        """Write the manifest as a whole: after a crash there is all of it, or none."""
        fresh = folder / f"{_NAME}.new"
        file = self._file(fresh)
        os.ftruncate(file, 0)
        _write_all(file, memoryview(json.dumps({"format_version": _VERSION, **identity}, indent=1).encode()), 0)
        os.fsync(file)
        fresh.replace(folder / _NAME)

    def record(self, slot: int) -> Tensor:
        """Return the record in a slot (uint8), in the memory map."""
        assert self._map is not None, "the store is open"
        return self._map[slot]

    def rows(self) -> list[list[int]]:
        """Return the rows of the index."""
        data = os.pread(self._index, self._num_slots * ROW_BYTES, 0)
        return torch.frombuffer(bytearray(data), dtype=torch.int64).view(self._num_slots, WORDS).tolist()

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
        _write_all(self._index, memoryview(row), slot * ROW_BYTES)

    def sync(self) -> None:
        for file in (self._records, self._index) if self._open else ():
            os.fdatasync(file)

    def close(self) -> None:
        self._map = None
        for file in self._open:
            with contextlib.suppress(OSError):
                os.close(file)
        self._open.clear()


def _check_manifest(folder: Path, manifest: Mapping[str, object], identity: Mapping[str, object]) -> None:
    """Raise ``StoreError``, naming the first difference, unless a store is the one that is asked for."""
    for name, wanted in {"format_version": _VERSION, **identity}.items():
        if manifest.get(name) != wanted:
            raise StoreError(
                f"the message store in {folder} has {name} {manifest.get(name)!r}, this run needs {wanted!r}: it is of "
                "another run or model. Give this run another folder, or remove that one"
            )


def _check_room(folder: Path, num_bytes: int, what: str) -> None:
    """Raise ``StoreError`` unless the disk has ``num_bytes`` free."""
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise StoreError(
            f"the message store needs {num_bytes / 1e9:.3g} GB in {folder} ({what}), and there are {free / 1e9:.3g} GB "
            "free: lower precision= (8 bits keep the loss), set budget_bytes=, or name a larger disk"
        )


def _write_all(file: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(file, data, at)
        data, at = data[written:], at + written
