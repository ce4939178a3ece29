"""A stand-in for torchft in threads of one process, for tests of what thinwire does in a managed group.

It fakes torchft's lighthouse and manager: a quorum is whoever has said that it takes part (there are no heartbeats and
no time limits but a generous one), a worker that lacks exchanges gets the shared state by a call, and failures are made
by the test. It does not fake communication: every quorum has process groups of gloo of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 20.0


class Lighthouse:
    """Forms quorums of all workers that are in `present`, once all of them ask."""

    def __init__(self, *present: str) -> None:
        self.present = set(present)
        self._asking: dict[str, Manager] = {}
        self._formed: dict[str, tuple[int, int, int]] = {}
        self._id = 0
        self._condition = threading.Condition()
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def remove(self, name: str) -> None:
        with self._condition:
            self.present.discard(name)
            self._form()

    def add(self, name: str) -> None:
        with self._condition:
            self.present.add(name)

    def quorum(self, manager: Manager) -> tuple[int, int, int]:
        """The quorum's number, this worker's rank in it, and how many there are."""
        with self._condition:
            self._asking[manager.name] = manager
            self._form()
            assert self._condition.wait_for(lambda: manager.name in self._formed, TIMEOUT_S), "no quorum in time"
            return self._formed.pop(manager.name)

    def _form(self) -> None:
        if not self.present or set(self._asking) != self.present:
            return
        self._id += 1
        names = sorted(self._asking)
        furthest = max(names, key=lambda name: self._asking[name].exchanges)
        self._formed = {name: (self._id, rank, len(names)) for rank, name in enumerate(names)}
        # The state is copied before anybody goes on.
        source = self._asking[furthest]
        state = source.save()
        for manager in self._asking.values():
            behind = manager.exchanges < source.exchanges or (manager.fresh and manager is not source)
            manager.received = (state, source.exchanges) if behind else None
        self._asking = {}
        self._condition.notify_all()


class Group:
    """Stands in for ``torchft.ProcessGroupGloo``."""

    def __init__(self) -> None:
        self.inner: Any = None

    @property
    def parent(self) -> Any:
        assert self.inner is not None
        return self.inner

    def configure(self, store_addr: str, replica_id: str, rank: int, world_size: int) -> None:
        place, prefix = store_addr.split("/", 1)
        host, port = place.split(":")
        timeout = timedelta(seconds=TIMEOUT_S)
        meeting = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
        store = dist.PrefixStore(prefix, meeting)
        group = dist.ProcessGroup(store, rank, world_size)
        gloo = dist.ProcessGroupGloo(store, rank, world_size, timeout)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        self.inner = group

    def abort(self) -> None:
        self.inner = None


class Breaking:
    """A process group whose next messages after ``left`` fail, as those to a process that has died."""

    def __init__(self, group: dist.ProcessGroup, left: int) -> None:
        self._group, self._left = group, left

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def send(self, *args: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("made up: the connection is closed")
        return self._group.send(*args)


class Manager:
    """Stands in for ``torchft.Manager``."""

    def __init__(self, lighthouse: Lighthouse, name: str, group: Group) -> None:
        self.lighthouse, self.name, self.group = lighthouse, name, group
        self.exchanges, self.fresh = 0, True
        self.received: tuple[dict[str, torch.Tensor], int] | None = None
        self.error: Exception | None = None
        self.doubtful: set[int] = set()
        """Exchanges that succeed, but of which this worker does not hear."""
        self.break_after: dict[int, int] = {}
        """By exchange, the messages after which this worker's connections fail."""

    def register_state_dict_fn(self, key: str, load_state_dict: Callable, state_dict: Callable) -> None:
        assert key == "thinwire"
        self.load, self.save = load_state_dict, state_dict

    def start_quorum(self) -> None:
        self.error = None
        number, rank, size = self.lighthouse.quorum(self)
        try:
            self.group.configure(f"127.0.0.1:{self.lighthouse.store.port}/quorum{number}", self.name, rank, size)
        except Exception as error:  # noqa: BLE001 - whatever it is, torchft reports it
            self.error = error
            return
        if self.exchanges in self.break_after:
            self.group.inner = Breaking(self.group.parent, self.break_after.pop(self.exchanges))
        if self.received is not None:
            state, self.exchanges = self.received
            self.load(state)
        self.fresh = False

    def wait_quorum(self) -> None:
        pass

    def errored(self) -> Exception | None:
        return self.error

    def report_error(self, e: Exception) -> None:
        self.error = e

    def is_participating(self) -> bool:
        return True

    def should_commit(self) -> bool:
        if self.exchanges in self.doubtful:
            self.doubtful.remove(self.exchanges)
            return False
        self.exchanges += self.error is None
        return self.error is None
