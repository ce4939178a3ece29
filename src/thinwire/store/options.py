"""The user's choice of a message store: `Memory` or `Disk`, and how much it may hold."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path

from thinwire.compressors import check_choice, check_int
from thinwire.store.background import Background
from thinwire.store.disk import DiskStore
from thinwire.store.errors import StoreError
from thinwire.store.folder import PrivateFolder
from thinwire.store.manifest import read_manifest
from thinwire.store.memory import MemoryStore
from thinwire.store.records import RecordFormat
from thinwire.store.store import Evict, Store


@dataclass(frozen=True, kw_only=True)
class Place(ABC):
    """A kind of store, and how much it may hold.

    Args:
        num_samples: Number of different samples that this pipeline will see: those of the data set, or of this
            replica's share of it.
        budget_bytes: Size limit for one side of one stage boundary; a stage between two others has two sides.
        evict: What happens when there is less room than samples. With ``newcomers``, new samples are not kept and are
            sent raw each time, which suits epochs. With ``oldest``, the samples that came first are dropped, which
            suits a stream.
    """

    num_samples: int | None = None
    budget_bytes: int | None = None
    evict: Evict = "newcomers"

    def __post_init__(self) -> None:
        for name in ("num_samples", "budget_bytes"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1)
        check_choice("evict", self.evict, ("newcomers", "oldest"))

    def capacity(self, form: RecordFormat, copies: int = 1) -> int | None:
        """Number of samples that there is room for, each with ``copies`` of its record; None for any number.

        Raises:
            StoreError: The budget does not hold a single one.
        """
        if self.budget_bytes is None:
            return self.num_samples
        room = self.budget_bytes // (form.record_bytes * copies)
        if room < 1:
            raise StoreError(
                f"budget_bytes={self.budget_bytes} does not hold one sample's message of {form.record_bytes} bytes"
                f"{f' {copies} times' if copies > 1 else ''}: give more, or lower precision="
            )
        return room if self.num_samples is None else min(room, self.num_samples)

    def eviction(self) -> Evict | None:
        """``evict``, or None without a budget: one sample more is an error then."""
        return self.evict if self.budget_bytes is not None else None

    @abstractmethod
    def open(self, form: RecordFormat, name: str, *, run: int, background: Background) -> Store:
        """Open the store of one side of one boundary.

        Raises:
            StoreError: As `DiskStore` raises it.
        """

    @abstractmethod
    def run_of(self, name: str) -> int | None:
        """The run of the store ``name`` that is to be continued; None if there is none."""


@dataclass(frozen=True)
class Memory(Place):
    """Keep messages in memory. They are part of ``stage.state_dict()``."""

    def open(self, form: RecordFormat, name: str, *, run: int, background: Background) -> Store:
        return MemoryStore(form, self.capacity(form), self.eviction())

    def run_of(self, name: str) -> int | None:
        return None


@dataclass(frozen=True)
class Disk(Place):
    """Keep messages in files under ``path``, which has a folder for each side of each boundary.

    ``num_samples`` or ``budget_bytes`` must be given, because the files have their size from the start. A store that
    exists already is an error, unless this run's state was loaded before its first step
    (`CompressedStage.load_state_dict`).

    Args:
        path: The folder.
        snapshots: From how many saved states back a run can be resumed bit by bit. Each takes the size of all records
            once more. 1 is enough for checkpoints that are written before training continues, 2 for those that are
            written beside it.
        resume: Continue with the messages of an existing store as they were last written.
        waiting_bytes: Limit of what the background thread holds in memory before it is written.
    """

    path: str | Path
    snapshots: int = field(default=1, kw_only=True)
    resume: bool = field(default=False, kw_only=True)
    waiting_bytes: int = field(default=256 << 20, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("snapshots", self.snapshots, 0)
        check_int("waiting_bytes", self.waiting_bytes, 1)
        if self.num_samples is None and self.budget_bytes is None:
            raise ValueError("Disk() needs num_samples= or budget_bytes=: its files have their size from the start")

    def open(self, form: RecordFormat, name: str, *, run: int, background: Background) -> Store:
        capacity = self.capacity(form, 1 + self.snapshots)
        assert capacity is not None, "one of the two is given"
        options = {"run": run, "evict": self.eviction(), "snapshots": self.snapshots, "background": background}
        return DiskStore(Path(self.path) / name, form, capacity, **options)

    def run_of(self, name: str) -> int | None:
        path = Path(self.path) / name
        if not self.resume or not path.is_dir():
            return None
        with contextlib.closing(PrivateFolder(path)) as folder:
            manifest = read_manifest(folder)
        if manifest is None:
            return None
        run = manifest.get("run")
        if not isinstance(run, int):
            raise StoreError(f"the manifest in {path} does not name a run: remove the folder")
        return run
