"""Rank processes of experiments: on a link or on loopback, called together, their findings kept.

A run is kept by what determines it: task, method, seed, link, number of ranks and version of the code."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, Self

import thinwire
from experiments.framework.rank import Call, Rank
from thinwire_tools import lab
from thinwire_tools.ranks import launch_ranks

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


_TIMEOUT_S = 180.0
_FOR_PEOPLE = ("name", "title", "color")

OnStep = Callable[[int, float], None]
"""A function that is called with every step's number and loss."""
AnyNetwork = AbstractContextManager[lab.Network | None]


class Ranks:
    """A context manager of ``num_ranks`` processes on ``network``, or on loopback. ``cache``: keeps their findings, in
    memory by default."""

    def __init__(
        self, num_ranks: int, network: AnyNetwork | None = None, cache: RunCache | None = None, name: str = "rank"
    ) -> None:
        self.num_ranks = num_ranks
        self.link: dict[str, Any] | str = "loopback"
        self.network: lab.Network | None = None
        self._made, self._name = network or nullcontext(), name
        self._cache = cache or RunCache()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.network = stack.enter_context(self._made)
            options: dict[str, Any] = {"name": self._name, "timeout_s": _TIMEOUT_S}
            started = launch_ranks(Rank, self.num_ranks, self.network, **options)
            self._ranks, self.folder = stack.enter_context(started)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def call(
        self,
        function: Call,
        *,
        hear: Callable[[dict[str, Any]], None] | None = None,
        teller: int | None = 0,
        **arguments: Any,
    ) -> list[dict[str, Any]]:
        """Return each rank's answer to a call of ``function``; ``hear`` takes the steps of rank ``teller``, or of all.

        Raises:
            RankFailedError: a rank failed.
        """

        def on_event(rank: int, event: dict[str, Any]) -> None:
            if hear is not None and event["event"] == "step" and teller in (None, rank):
                hear(event)

        return self._ranks.run(function, arguments, on_event)

    def kept(self, key: dict[str, Any], make: Callable[[], Any]) -> Any:
        """Return the result of ``make``, or the earlier one under the same key by as many ranks."""
        key = {"num_ranks": self.num_ranks, **key}
        known = self._cache.get(key)
        if known is None:
            known = {"answers": make()}
            self._cache.put(key, known)
        return known["answers"]

    def shape(self, rate: str | None) -> None:
        """Set the rate of all links, or none."""
        if self.network is None:
            return
        self.network.shape(rate)
        if rate is not None:
            self.link = self.network.describe()


def described(task: Any) -> dict[str, Any]:
    """Return a task, or a method, as a part of a key: its name, title and color change no run."""
    values = {name: value for name, value in dataclasses.asdict(task).items() if name not in _FOR_PEOPLE}
    return {"type": type(task).__qualname__, **values}
