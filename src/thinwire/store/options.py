"""Where messages are to be kept, as a user says it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path

from thinwire.compressors import check_choice, check_int
from thinwire.store.background import Background
from thinwire.store.disk import DiskStore
from thinwire.store.errors import StoreError
from thinwire.store.manifest import read_manifest
from thinwire.store.memory import MemoryStore
from thinwire.store.records import RecordFormat
from thinwire.store.store import Evict, Store


@dataclass(frozen=True, kw_only=True)
class Place(ABC):
    """A kind of store, and how much it may hold.

    ``num_samples`` is how many different samples this pipeline will see: those of the data set, or of this replica's
    share of it. ``budget_bytes`` is for one side of one stage boundary; a stage between two others has two. With less
    room than samples, ``evict`` says who goes: ``newcomers`` find no room and are sent in full each time (which suits
    epochs: what is there stays of use), ``oldest`` gives up the samples that came first (which suits a stream).
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
        """Samples that there is room for, each with so many ``copies`` of its record; None if any number.

        Raises:
            StoreError: the budget does not hold a single one.
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

    def rule(self) -> Evict | None:
        """Who makes room: nobody, where a sample too many can only be a mistake."""
        return self.evict if self.budget_bytes is not None else None

    @abstractmethod
    def open(self, form: RecordFormat, name: str, *, run: int, background: Background) -> Store:
        """The store of one side of one boundary, of a run with this number.

        Raises:
            StoreError: see `DiskStore`.
        """

    @abstractmethod
    def run_of(self, name: str) -> int | None:
        """The run whose store of this name is to be gone on with; None if there is none."""


@dataclass(frozen=True)
class Memory(Place):
    """Messages in memory; they are in ``stage.state_dict()``."""

    def open(self, form: RecordFormat, name: str, *, run: int, background: Background) -> Store:
        return MemoryStore(form, self.capacity(form), self.rule())

    def run_of(self, name: str) -> int | None:
        return None


@dataclass(frozen=True)
class Disk(Place):
    """Messages in files under ``path``, a folder for each side of each boundary.

    ``num_samples`` or ``budget_bytes`` must be given: the files have their size from the start. A store that is there
    already is an error, unless this run's state was loaded before its first step (`PipelineStage.load_state_dict`) or
    ``resume=True``, which goes on with the messages as they were last written. ``snapshots`` is how many states back a
    run can be resumed from bit by bit, and how many more times the room is reserved: 1 for checkpoints that are written
    before training goes on, 2 where they are written meanwhile.

    The background thread holds at most ``waiting_bytes`` that are not written yet.
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
        options = {"run": run, "evict": self.rule(), "snapshots": self.snapshots, "background": background}
        return DiskStore(Path(self.path) / name, form, capacity, **options)

    def run_of(self, name: str) -> int | None:
        found = read_manifest(Path(self.path) / name) if self.resume else None
        if found is None:
            return None
        run = found.get("run")
        if not isinstance(run, int):
            raise StoreError(f"{Path(self.path) / name} does not say of which run it is: remove it")
        return run
