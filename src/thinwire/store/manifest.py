"""The files of a store on disk: opening them, the manifest, and the check for free space."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from thinwire.store.errors import StoreError

NAME = "manifest.json"
_VERSION = 2


def open_file(path: Path, *, exclusive: bool = False) -> int:
    """Return a descriptor of a file that only this user may read and write; one that is missing is made.

    Args:
        path: The file. A symbolic link is not followed.
        exclusive: Raise if the file is there already.

    Raises:
        StoreError: The file cannot be opened.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_EXCL if exclusive else 0)
    try:
        file = os.open(path, flags, 0o600)
    except FileExistsError:
        raise StoreError(
            f"{path} is there, and no message store made it: move it away, or name another folder"
        ) from None
    except OSError as error:
        raise StoreError(f"{path} cannot be opened: {error.strerror} (symbolic links are not followed)") from None
    os.fchmod(file, 0o600)
    return file


def read_manifest(folder: Path) -> dict[str, object] | None:
    """Return the manifest of a store; None where there is none.

    Raises:
        StoreError: There is a file of that name which is not a manifest.
    """
    path = folder / NAME
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"{path} is not the manifest of a message store ({error}): remove {folder}") from None
    if not isinstance(manifest, dict):
        raise StoreError(f"{path} is not the manifest of a message store: remove {folder}")
    return manifest


def write_manifest(folder: Path, identity: Mapping[str, object]) -> None:
    """Write the manifest as a whole: after a crash there is all of it, or the old one."""
    fresh = folder / f"{NAME}.new"
    with os.fdopen(open_file(fresh), "wb") as file:
        file.truncate()
        file.write(json.dumps({"format_version": _VERSION, **identity}, indent=1).encode())
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(folder / NAME)


def check_manifest(folder: Path, manifest: Mapping[str, object], identity: Mapping[str, object]) -> None:
    """Raise ``StoreError``, naming the first difference, unless a store is the one that is asked for."""
    for name, wanted in {"format_version": _VERSION, **identity}.items():
        if manifest.get(name) != wanted:
            raise StoreError(
                f"the message store in {folder} has {name} {manifest.get(name)!r}, this run needs {wanted!r}: it is of "
                "another run or model. Give this run another folder, or remove that one"
            )


def check_room(folder: Path, num_bytes: int, what: str) -> None:
    """Raise ``StoreError`` unless the disk has ``num_bytes`` free."""
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise StoreError(
            f"the message store needs {num_bytes / 1e9:.3g} GB in {folder} ({what}), and there are {free / 1e9:.3g} GB "
            "free: lower precision= (8 bits keep the loss), set budget_bytes=, or name a larger disk"
        )
