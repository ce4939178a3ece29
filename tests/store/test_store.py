"""Message stores: what one keeps, on which bytes two agree, what they do when a sample too many comes."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch import Tensor

from thinwire.store import (
    Disk,
    DiskStore,
    Memory,
    MemoryStore,
    Part,
    RecordFormat,
    Rows,
    Store,
    StoreError,
    store_bytes,
)

FORM = RecordFormat((Part(5, 12, True), Part(1, 7, False)))
PRECISIONS = (32, 16, 8, 4, 2)


def values_of(rows: Rows, form: RecordFormat, seed: int = 0) -> Tensor:
    """Random values, zero behind each sample's length."""
    values = torch.randn(len(rows.samples), form.numel(rows.padded), generator=torch.Generator().manual_seed(seed))
    for i, length in enumerate(rows.lengths):
        at = 0
        for part in form.parts:
            values[i, at + part.at(length) : at + part.at(rows.padded)] = 0
            at += part.at(rows.padded)
    return values.view(-1)


def save(store: Store, rows: Rows, values: Tensor, step: int) -> None:
    store.save(store.form.encode(values.clone(), rows), rows, step)


@settings(max_examples=10)
@given(kind=st.sampled_from(["memory", "disk"]), precision=st.sampled_from(PRECISIONS))
@example("memory", 2)
@example("disk", 16)
def test_what_is_kept_is_what_was_saved_up_to_precision(tmp_path_factory, kind: str, precision: int) -> None:
    form = RecordFormat(FORM.parts, precision)
    folder = tmp_path_factory.mktemp("store")
    store = MemoryStore(form, 20) if kind == "memory" else DiskStore(folder, form, 20, run=1)
    rows = Rows((3, 900, 7), (5, 2, 4), 5)
    values = values_of(rows, form)
    save(store, rows, values, 0)
    kept = store.load(rows)
    if precision == 32:
        assert torch.equal(kept, values)
    elif precision == 16:
        assert torch.equal(kept, values.bfloat16().float())
    else:
        # To the nearest: of 2 bits, that of the midpoints of four intervals.
        intervals = 4 if precision == 2 else 2**precision - 2
        half_step = float(values.abs().max()) / intervals
        assert float((kept - values).abs().max()) <= half_step * 1.001
        assert not torch.equal(kept, values)
    assert [store.entry(sample) for sample in (3, 900, 7)] == [(1, 1, 5), (1, 1, 2), (1, 1, 4)]
    assert store.entry(4) is None
    save(store, Rows((900,), (5,), 5), values_of(Rows((900,), (5,), 5), form, 1), 8)
    assert store.entry(900) == (9, 2, 5)
    store.close()


def test_a_sample_seen_at_another_length_keeps_what_it_had_and_starts_elsewhere_at_zero() -> None:
    store = MemoryStore(FORM)
    short = Rows((1,), (2,), 2)
    values = values_of(short, FORM)
    save(store, short, values, 0)
    longer = store.load(Rows((1,), (4,), 5)).view(-1)
    assert torch.equal(longer[:24], values[:24])
    assert not longer[24:60].any()
    assert torch.equal(longer[60:], values[24:])
    shorter = store.load(Rows((1,), (1,), 1)).view(-1)
    assert torch.equal(shorter, torch.cat([values[:12], values[24:]]))


def test_a_full_store_turns_newcomers_away_or_gives_up_the_oldest() -> None:
    for evict, kept, refused in (("newcomers", (1, 2, 3), {4, 5}), ("oldest", (2, 4, 5), set())):
        store = MemoryStore(FORM, 3, evict)  # pyright: ignore[reportArgumentType]
        for step, sample in enumerate((1, 2, 3)):
            save(store, Rows.uniform([sample], 5), values_of(Rows.uniform([sample], 5), FORM), step)
        # 2 is in the batch and stays, though it is older than 3.
        store.admit([2, 4, 5])
        away = store.refused
        assert away == refused
        rows = Rows.uniform([s for s in (2, 4, 5) if s not in away], 5)
        save(store, rows, values_of(rows, FORM), 3)
        assert store.samples == kept
        assert (store.evicted, store.turned_away) == ((0, 2) if away else (2, 0))
    store.admit([1, 2, 3, 4, 7])
    assert store.refused == {3, 7}, "samples of one step do not push each other out"


@settings(max_examples=30)
@given(
    steps=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True), max_size=12),
    capacity=st.integers(1, 10),
    evict=st.sampled_from(["newcomers", "oldest"]),
    precision=st.sampled_from(PRECISIONS),
    saves=st.sets(st.integers(0, 11)),
)
def test_two_stores_that_see_the_same_keep_the_same(tmp_path_factory, steps, capacity, evict, precision, saves) -> None:
    """A store in memory and one on disk, which is closed and opened again at times, hold the same bytes after any
    steps; and what they hold is what was saved last."""
    path = tmp_path_factory.mktemp("store")
    form = RecordFormat(FORM.parts, precision)
    memory, disk = MemoryStore(form, capacity, evict), DiskStore(path, form, capacity, run=1, evict=evict)
    last: dict[int, Tensor] = {}
    for step, samples in enumerate(steps):
        for store in (memory, disk):
            store.admit(samples)
        assert memory.refused == disk.refused
        rows = Rows.uniform([s for s in samples if s not in memory.refused], 5)
        for store in (memory, disk):
            save(store, rows, values_of(rows, form, step), step)
        records = form.encode(values_of(rows, form, step), rows)
        last |= dict(zip(rows.samples, records, strict=True))
        assert memory.samples == disk.samples
        assert len(memory) <= capacity
        if step in saves:
            state = disk.state_dict()
            disk.close()
            disk = DiskStore(path, form, capacity, run=1, evict=evict)
            assert disk.digest() == memory.digest()
            disk.load_state_dict(state)
        assert disk.digest() == memory.digest()
    again = MemoryStore(form, capacity, evict)
    again.load_state_dict(memory.state_dict())
    assert again.digest() == memory.digest()
    assert again.samples == memory.samples
    for sample in memory.samples:
        entry = memory.entry(sample)
        assert entry is not None
        assert torch.equal(
            memory.load(Rows.uniform([sample], 5)), form.decode(last[sample][None], [5], Rows.uniform([sample], 5))
        )
    disk.close()


def test_estimates_are_what_a_store_takes(tmp_path: Path) -> None:
    for precision, snapshots in itertools.product(PRECISIONS, (0, 1, 2)):
        form = RecordFormat((Part(128, 64, True),), precision)
        estimate = store_bytes(10, (128, 64), precision, snapshots=snapshots)
        place = Disk(tmp_path / f"{precision}-{snapshots}", num_samples=10, snapshots=snapshots)
        store = place.open(form, "side", run=1)
        assert estimate == 10 * form.record_bytes * (1 + snapshots)
        assert estimate <= store.num_bytes <= 1.2 * estimate
        store.close()
    assert store_bytes(1000, (1024, 1600)) == 1000 * 1024 * 1600 * 4
    assert store_bytes(1000, (1024, 1600), 8) < 0.27 * store_bytes(1000, (1024, 1600))
    assert Memory(budget_bytes=10_000).capacity(FORM) == 10_000 // FORM.record_bytes
    assert Memory(budget_bytes=10_000, num_samples=3).capacity(FORM) == 3
    assert Memory().capacity(FORM) is None
    with pytest.raises(StoreError, match="does not hold one sample"):
        Memory(budget_bytes=10).capacity(FORM)


def test_samples_that_are_unknown_not_finite_or_without_room() -> None:
    store, rows = MemoryStore(FORM, 2, "newcomers"), Rows.uniform([4, 5, 6], 5)
    values = values_of(rows, FORM).view(3, -1)
    store.admit(rows.samples)
    assert store.keep(FORM.encode(values.view(-1).clone(), rows), rows, 0, [True, False, True]) == 1
    assert store.samples == (4,), "5 is not finite, and for 6 there was no room"
    found = store.load_known(rows, [0]).view(3, -1)
    assert torch.equal(found[0], values[0])
    assert not found[1:].any()
