"""Stores on disk: what a crash, a damaged file, another run or a full disk does to them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from test_store import FORM, save, values_of

from thinwire.store import Disk, DiskStore, Part, RecordFormat, Rows, StoreError

ROWS = Rows.uniform(range(8), 5)


def make(path: Path, **options) -> DiskStore:
    return DiskStore(path, FORM, 8, **{"run": 1, **options})


def filled(path: Path, **options) -> DiskStore:
    store = make(path, **options)
    save(store, ROWS, values_of(ROWS, FORM), 0)
    store.flush()
    return store


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def test_a_corrupt_record_is_found_at_its_next_visit_and_its_sample_is_unseen(tmp_path: Path) -> None:
    store = filled(tmp_path)
    assert store.verify(range(8)) == []
    flip(tmp_path / "records.bin", 3 * FORM.record_bytes + 17)
    assert store.verify([0, 3, 7]) == [3]
    assert store.corrupt == 1
    assert 3 not in store
    assert store.verify([3]) == []
    assert torch.equal(store.load(Rows.uniform([2, 4], 5)).view(-1), values_of(ROWS, FORM).view(8, -1)[[2, 4]].view(-1))
    store.close()


def test_a_record_that_was_read_ahead_is_checked_again_at_the_visit_after(tmp_path: Path) -> None:
    store = filled(tmp_path)
    store.prefetch([1, 99])
    store.flush()
    assert store.verify([1]) == []
    flip(tmp_path / "records.bin", 1 * FORM.record_bytes)
    assert store.verify([1]) == [1], "what was read ahead counts for one visit"
    flip(tmp_path / "records.bin", 2 * FORM.record_bytes)
    store.prefetch([2])
    store.flush()
    assert store.verify([2]) == [2], "reading ahead finds it, too"
    store.close()


def test_a_record_saved_while_the_one_before_it_was_just_written_is_the_one_that_is_read(tmp_path: Path) -> None:
    store = filled(tmp_path, snapshots=0)
    forgetting, saved = threading.Event(), threading.Event()

    class Pending(dict[int, torch.Tensor]):
        """Lets a record be saved between the look for an older one and its end, if nothing prevents that."""

        def get(self, slot: int, default: torch.Tensor | None = None) -> torch.Tensor | None:  # type: ignore[override]
            found = super().get(slot, default)
            if threading.current_thread() is not threading.main_thread() and not forgetting.is_set():
                forgetting.set()
                saved.wait(0.5)
            return found

    store._pending = Pending()
    one = Rows.uniform([3], 5)
    save(store, one, values_of(one, FORM, 1), 1)
    assert forgetting.wait(60.0)
    save(store, one, values_of(one, FORM, 2), 2)
    saved.set()
    assert store.verify([3]) == []
    assert torch.equal(store.load(one), values_of(one, FORM, 2))
    store.close()


def test_what_is_loaded_is_what_was_saved_last_whatever_is_read_ahead_and_written_behind(tmp_path: Path) -> None:
    """Threads change places after every few instructions; samples are few, so that most are on their way somewhere."""
    random = torch.Generator().manual_seed(0)
    store = make(tmp_path, waiting_bytes=3 * FORM.record_bytes)
    last: dict[int, torch.Tensor] = {}
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for step in range(200):
            samples = torch.randperm(8, generator=random)[:3].tolist()
            store.prefetch(torch.randperm(8, generator=random)[:3].tolist())
            assert store.verify(samples) == []
            known = [sample for sample in samples if sample in last]
            for sample in known:
                assert torch.equal(store.load(Rows.uniform([sample], 5)), last[sample])
            store.prefetch(samples)
            rows = Rows.uniform(samples, 5)
            values = values_of(rows, FORM, step)
            save(store, rows, values, step)
            last |= dict(zip(samples, values.view(3, -1), strict=True))
            if step % 50 == 0:
                store.state_dict()
            elif step % 17 == 0:
                store.forget(samples[0])
                del last[samples[0]]
    finally:
        sys.setswitchinterval(interval)
    store.flush()
    assert store.corrupt == 0
    store.close()
    again = make(tmp_path)
    assert sorted(again.samples) == sorted(last)
    for sample, values in last.items():
        assert torch.equal(again.load(Rows.uniform([sample], 5)), values)


@pytest.mark.parametrize("snapshots", [0, 1, 2])
def test_states_older_than_the_snapshots_have_lost_records_and_say_so(snapshots: int, tmp_path: Path) -> None:
    store = filled(tmp_path, snapshots=snapshots)
    states, digests = [], []
    for step in range(1, 6):
        digests.append(store.digest())
        states.append(store.state_dict())
        save(store, ROWS, values_of(ROWS, FORM, step), step)
        if step % 2:
            store.close()
            store.open()
    store.flush()
    for back, (state, digest) in enumerate(reversed(list(zip(states, digests, strict=True))), 1):
        store.close()
        store = make(tmp_path, snapshots=snapshots)
        store.load_state_dict(state)
        damaged = store.verify(range(8))
        assert damaged == ([] if back <= snapshots else list(range(8)))
        assert (store.digest() == digest) == (back <= snapshots)
        if back > snapshots:
            break
        store.close()
        store = make(tmp_path, snapshots=snapshots)
        assert store.digest() == digest, "what was given up by going back does not come back"
    store.close()


def test_a_killed_process_leaves_a_store_that_can_be_gone_on_with(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys, torch\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from pathlib import Path\n"
        "from test_store import FORM, save, values_of\n"
        "from test_disk import make, ROWS\n"
        "store = make(Path(sys.argv[1]))\n"
        "for step in range(10 ** 6):\n"
        "    save(store, ROWS, values_of(ROWS, FORM, step), step)\n"
        "    if step == 3: torch.save(store.state_dict(), sys.argv[1] + '/state')\n"
        "    if step == 40: print('go', flush=True)\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", script, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "go\n"
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    process.stdout.close()
    store = make(tmp_path)
    damaged = store.verify(range(8))
    for sample in sorted(set(range(8)) - set(damaged)):
        entry = store.entry(sample)
        assert entry is not None
        assert entry.version > 4
        saved = values_of(ROWS, FORM, entry.version - 1).view(8, -1)[sample]
        assert torch.equal(store.load(Rows.uniform([sample], 5)), saved), "a record is of the step that its row says"
    store.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert store.verify(range(8)) == []
    assert torch.equal(store.load(ROWS), values_of(ROWS, FORM, 3))
    store.close()


def test_a_store_of_another_run_shape_or_precision_is_refused(tmp_path: Path) -> None:
    place = Disk(tmp_path, num_samples=8)
    place.open(FORM, "side", run=1).close()
    # One on disk is not opened unasked.
    assert place.find_run("side") is None
    assert Disk(tmp_path, num_samples=8, resume=True).find_run("side") == 1
    assert Disk(tmp_path, num_samples=8, resume=True).find_run("other") is None
    path = tmp_path / "side"
    for message, form, options in (
        ("run 1, this run needs 2", FORM, {"run": 2}),
        ("slots 16, this run needs 24", FORM, {"run": 1, "snapshots": 2}),
        ("site 'm', this run needs 'n'", RecordFormat(FORM.parts, site="n"), {"run": 1}),
        ("precision 32, this run needs 8", RecordFormat(FORM.parts, 8), {"run": 1}),
        ("parts", RecordFormat((Part(6, 12, True),)), {"run": 1}),
    ):
        with pytest.raises(StoreError, match=message):
            DiskStore(path, form, 8, **options)
    make(path).close()


def test_no_size_in_a_file_is_believed(tmp_path: Path) -> None:
    filled(tmp_path).close()
    for name in ("records.bin", "index.bin"):
        size = (tmp_path / name).stat().st_size
        os.truncate(tmp_path / name, size - 1)
        with pytest.raises(StoreError, match=f"not {size}: it is damaged"):
            make(tmp_path)
        os.truncate(tmp_path / name, size)
    rows = torch.randint(-(2**62), 2**62, (16, 8), generator=torch.Generator().manual_seed(0))
    (tmp_path / "index.bin").write_bytes(rows.numpy().tobytes())
    store = make(tmp_path)
    assert len(store) == 0
    assert store.corrupt == 16
    store.close()


def test_a_disk_that_fills_up_after_all_is_an_error_in_the_next_call(tmp_path: Path, monkeypatch) -> None:
    store = filled(tmp_path)

    def full(*args) -> int:
        raise OSError(28, "No space left on device")

    def save_all() -> None:
        # The first record may have failed in the background before the second is saved.
        save(store, ROWS, values_of(ROWS, FORM), 1)
        store.flush()

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StoreError, match="No space left"):
        save_all()
    monkeypatch.undo()
    with pytest.raises(StoreError, match="No space left"):
        store.close()  # which tells the error of the last record, too


def test_a_store_has_one_owner(tmp_path: Path) -> None:
    store = make(tmp_path)
    with pytest.raises(StoreError, match="in use by another process"):
        make(tmp_path)
    store.close()
    make(tmp_path).close()
