"""The user's choice of a message store: `Memory`, `Disk`, `Crops` or `Centers`, and its limits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import ClassVar

from thinwire.arguments import check_choice, check_int
from thinwire.store.centers import MOST_CENTERS, CenterStore
from thinwire.store.crops import CroppedStore
from thinwire.store.disk import DiskStore
from thinwire.store.files import read_manifest
from thinwire.store.memory import Evict, MemoryStore
from thinwire.store.store import RecordFormat, Store, StoreError


@dataclass(frozen=True)
class Place(ABC):
    """The user's choice of the messages that a stage keeps, and of their place."""

    own: ClassVar[tuple[str, ...]] = ()
    """Options in which ranks may differ."""

    @abstractmethod
    def open(self, form: RecordFormat, name: str, *, run: int) -> Store:
        """Open the store of one side of one boundary.

        Raises:
            StoreError: see `DiskStore`.
        """

    def find_run(self, name: str) -> int | None:
        """Return the run of the store ``name`` that is to be continued; None if there is none."""
        return None

    def check(self, *, precision: int, warmup_epochs: int) -> None:  # noqa: B027 - any goes
        """Raise ``ValueError`` where these options of a stage do not go with the store."""

    def facts(self) -> dict[str, object]:
        """Return the options that all ranks must have in common."""
        shared = [one.name for one in fields(self) if one.name not in self.own]
        return {"kind": type(self).__name__, **{name: getattr(self, name) for name in shared}}


@dataclass(frozen=True, kw_only=True)
class Records(Place):
    """Limits of records of samples.

    Args:
        num_samples: number of different samples that this pipeline will see: those of the data set, or of this
            replica's share of it.
        budget_bytes: size limit for one side of one stage boundary; a stage between two others has two sides.
        evict: what happens when there is less room than samples. With ``newcomers``, new samples are not kept and are
            sent raw each time, which suits epochs. With ``oldest``, the samples that were seen first are dropped, which
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
        """Return the number of samples that there is room for, each with ``copies`` of its record; None for any number.

        Raises:
            StoreError: the budget does not suffice for a single one.
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
        """Return ``evict``, or None without a budget: one sample more is an error then."""
        return self.evict if self.budget_bytes is not None else None


@dataclass(frozen=True)
class Memory(Records):
    """Keep messages in memory. They are part of ``stage.state_dict()``."""

    def open(self, form: RecordFormat, name: str, *, run: int) -> Store:
        return MemoryStore(form, self.capacity(form), self.eviction())


@dataclass(frozen=True)
class Disk(Records):
    """Keep messages in files under ``path``, which has a folder for each side of each boundary.

    ``num_samples`` or ``budget_bytes`` must be given, because the files have their size from the start. A store that
    exists already is an error, unless this run's state was loaded before its first step
    (`CompressedStage.load_state_dict`).

    Args:
        path: the folder.
        snapshots: number of saved states from which a run can be resumed bit by bit. Each takes the size of all records
            once more. 1 is enough for checkpoints that are written before training continues, 2 for those that are
            written at the same time.
        resume: continue with the messages of an existing store as they were last written.
        waiting_bytes: limit of the memory of records that the background thread has yet to write.
    """

    own: ClassVar[tuple[str, ...]] = ("path", "resume", "waiting_bytes")
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

    def open(self, form: RecordFormat, name: str, *, run: int) -> Store:
        capacity = self.capacity(form, 1 + self.snapshots)
        assert capacity is not None, "one of the two is given"
        options = {"snapshots": self.snapshots, "waiting_bytes": self.waiting_bytes}
        return DiskStore(Path(self.path) / name, form, capacity, run=run, evict=self.eviction(), **options)

    def find_run(self, name: str) -> int | None:
        path = Path(self.path) / name
        manifest = read_manifest(path) if self.resume else None
        if manifest is None:
            return None
        run = manifest.get("run")
        if not isinstance(run, int):
            raise StoreError(f"the manifest in {path} does not name a run: remove the folder")
        return run


@dataclass(frozen=True)
class Crops(Records):
    """Keep messages of images that each epoch sees cropped elsewhere, in memory (split learning: AQ-SGD, H.6).

    Each boundary keeps messages of whole padded images. A visit takes the change from the part of it that its crop
    sees, and renews that part. ``stage.set_sample_ids(ids, corners=...)`` says where each image was cropped. A flipped
    image is a sample of its own: ``ids = 2 * ids + flipped``. Activations at boundaries are (batch, channels, height,
    width), square.

    Args:
        size: pixels of a crop's side.
        padding: pixels by which images are padded on each side before they are cropped.
    """

    size: int
    padding: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("size", self.size, 1)
        check_int("padding", self.padding, 1)

    def open(self, form: RecordFormat, name: str, *, run: int) -> Store:
        return CroppedStore(form, self.size, self.padding, self.capacity, self.eviction())

    def check(self, *, precision: int, warmup_epochs: int) -> None:
        if precision < 16:
            raise ValueError(
                f"precision={precision} rounds a kept message anew whenever a part of it changes: give 16 or 32"
            )


@dataclass(frozen=True)
class Centers(Place):
    """Keep cluster centers of activations in place of a message of each sample: `CenterStore`.

    Memory does not grow with the samples (`center_bytes`), and a sample need not return, so this is for streams and
    for a single epoch. The centers are part of ``stage.state_dict()``.

    Args:
        num: centers of one side of one stage boundary, 1 to 256. Until there are so many, samples are sent whole.
        window: about how many of the last vectors assigned to a center it is the mean of.
    """

    num: int = MOST_CENTERS
    window: int = 1024

    def __post_init__(self) -> None:
        check_int("num", self.num, 1, MOST_CENTERS)
        check_int("window", self.window, 1)

    def open(self, form: RecordFormat, name: str, *, run: int) -> Store:
        return CenterStore(form, self.num, self.window)

    def check(self, *, precision: int, warmup_epochs: int) -> None:
        if precision != 32:
            raise ValueError(f"precision={precision} is of messages of samples: cluster centers are kept in 32 bits")
        if warmup_epochs:
            raise ValueError(
                f"warmup_epochs={warmup_epochs} counts visits of samples, which cluster centers do not know"
            )
