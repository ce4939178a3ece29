"""What a store on disk lets other users read, and which files it never touches."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from thinwire.store import DiskStore, Part, RecordFormat, StoreError

FORMAT = RecordFormat((Part(5, 12, True),))
FILES = ("lock", "records.bin", "index.bin", "manifest.json")
PRECIOUS = b"not to be overwritten"


def open_store(path: Path) -> DiskStore:
    return DiskStore(path, FORMAT, 8, run=1)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_only_the_owner_reads_the_folder_and_its_files_whatever_modes_they_had(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = tmp_path / "store"
        open_store(folder).close()
    finally:
        os.umask(before)
    assert mode_of(folder) == 0o700
    assert {path.name: mode_of(path) for path in folder.iterdir()} == dict.fromkeys(FILES, 0o600)
    folder.chmod(0o755)
    for name in FILES[:3]:
        (folder / name).chmod(0o644)
    open_store(folder).close()
    assert mode_of(folder) == 0o700
    assert {mode_of(folder / name) for name in FILES} == {0o600}


def test_links_are_not_followed(tmp_path: Path) -> None:
    for name in ("lock", "records.bin", "index.bin", "manifest.json.new"):
        folder, victim = tmp_path / name / "store", tmp_path / name / "victim"
        folder.mkdir(parents=True)
        victim.write_bytes(PRECIOUS)
        (folder / name).symlink_to(victim)
        with pytest.raises(StoreError, match=name):
            open_store(folder)
        assert victim.read_bytes() == PRECIOUS


def test_a_store_whose_making_was_interrupted_is_made_again(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "records.bin").write_bytes(b"half")
    open_store(tmp_path).close()
    assert (tmp_path / "records.bin").stat().st_size == 16 * FORMAT.record_bytes
    (tmp_path / "file").write_bytes(PRECIOUS)
    with pytest.raises(StoreError, match="cannot hold a message store"):
        open_store(tmp_path / "file")
