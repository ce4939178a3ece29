"""The manifest of a store on disk: its format, shape and run; and the check for free space."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from thinwire.store.errors import StoreError
from thinwire.store.folder import PrivateFolder

NAME = "manifest.json"
_VERSION = 2
_MAX_BYTES = 1 << 20


def read_manifest(folder: PrivateFolder) -> dict[str, object] | None:
    """The manifest of a store; None where there is none.

    Raises:
        StoreError: There is a file of that name which is not a manifest.
    """
    content = folder.read(NAME, _MAX_BYTES)
    if content is None:
        return None
    path = folder.path / NAME
    try:
        manifest = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} is not the manifest of a message store ({error}): remove {folder.path}") from None
    if not isinstance(manifest, dict):
        raise StoreError(f"{path} is not the manifest of a message store: remove {folder.path}")
    return manifest


def write_manifest(folder: PrivateFolder, identity: Mapping[str, object]) -> None:
    """Write the manifest, at once and as a whole."""
    folder.write(NAME, json.dumps({"format_version": _VERSION, **identity}, indent=1).encode())


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
