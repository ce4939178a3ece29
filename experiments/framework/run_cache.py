"""Cache of finished runs by what determines them: task, method, seed, link, number of ranks and version of the code."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import thinwire

_SUFFIXES = (".py", ".cpp", ".h")
_MORE_SOURCES = ("native", "experiments/framework", "experiments/tasks")


class RunCache:
    """Runs in memory and, if a folder is given, as JSON files that outlive the process: an experiment that was stopped
    continues where it was. A file that cannot be read counts as a run that has not been made."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._known: dict[str, dict[str, Any]] = {}

    def get(self, key: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the result that was put under an equal ``key`` by the same version of the code, or None."""
        name = _name(key)
        if name not in self._known and self._folder is not None:
            try:
                self._known[name] = json.loads((self._folder / f"{name}.json").read_text())["result"]
            except (OSError, ValueError, KeyError, TypeError):
                return None
        return self._known.get(name)

    def put(self, key: Mapping[str, Any], result: dict[str, Any]) -> None:
        """Keep ``result``, of plain values, under ``key``."""
        name = _name(key)
        self._known[name] = result
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            partial = self._folder / f"{name}.partial"
            partial.write_text(json.dumps({"key": key, "result": result}))
            partial.replace(self._folder / f"{name}.json")


def _name(key: Mapping[str, Any]) -> str:
    text = json.dumps({**key, "code": code_version()}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


@functools.cache
def code_version() -> str:
    """Return a hash of the library's sources and of those that train: a run of other code is another run."""
    library = Path(thinwire.__file__).parent
    clone = Path(__file__).resolve().parents[2]
    state = hashlib.sha256()
    for folder in (library, *(clone / name for name in _MORE_SOURCES)):
        for path in sorted(path for path in folder.rglob("*") if path.suffix in _SUFFIXES):
            state.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return state.hexdigest()[:16]
