"""What a store on disk says of itself, and how much room it takes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from thinwire.store.errors import StoreError

NAME = "manifest.json"
_VERSION = 1
_LARGEST = 1 << 20
"""Bytes of a manifest, at most: what is longer is none."""


def read_manifest(folder: Path) -> dict[str, object] | None:
    """The manifest of a store; None where there is none.

    Raises:
        StoreError: there is a file of that name which is no manifest.
    """
    path = folder / NAME
    if not path.exists():
        return None
    try:
        if path.stat().st_size > _LARGEST:
            raise ValueError(f"{path.stat().st_size} bytes")
        found = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} is not the manifest of a message store ({error}): remove {folder}") from None
    if not isinstance(found, dict):
        raise StoreError(f"{path} is not the manifest of a message store: remove {folder}")
    return found


def write_manifest(folder: Path, identity: Mapping[str, object]) -> None:
    """Put a manifest in place as a whole: there is never half of one."""
    fresh = folder / f"{NAME}.new"
    with fresh.open("w") as file:
        json.dump({"format_version": _VERSION, **identity}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(folder / NAME)


def check_manifest(folder: Path, found: Mapping[str, object], identity: Mapping[str, object]) -> None:
    """Raise ``StoreError``, naming the first difference, unless a store is the one that is asked for."""
    for name, wanted in {"format_version": _VERSION, **identity}.items():
        if found.get(name) != wanted:
            raise StoreError(
                f"the message store in {folder} has {name} {found.get(name)!r}, this run needs {wanted!r}: it is of "
                "another run or model. Give this run another folder, or remove that one"
            )


def check_room(folder: Path, num_bytes: int, what: str) -> None:
    """Raise ``StoreError`` unless the disk has room for so many bytes more."""
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise StoreError(
            f"the message store needs {num_bytes / 1e9:.3g} GB in {folder} ({what}), and there are {free / 1e9:.3g} GB "
            "free: lower precision= (8 bits keep the loss), set budget_bytes=, or name a larger disk"
        )
