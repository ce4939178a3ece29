"""The namespaces of a node, which a process that is already running can enter."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from thinwire_tools.lab.keeper import CLONE_NEWPID


@dataclass(frozen=True)
class NodeNamespaces:
    """The namespaces and the environment of a rank on its node. It can be sent to another process, which enters
    them."""

    namespaces: tuple[tuple[str, int], ...]
    """Paths and kinds (``CLONE_NEW…`` of Linux ``setns(2)``), in the order in which they are entered."""
    environment: Mapping[str, str]
    """All environment variables of the process inside."""

    def enter(self) -> None:
        """Move this process into the node, for good. It must have a single thread: others would stay where they are.

        Raises:
            OSError: the node is gone, or may not be entered.
        """
        # All are opened first: from inside the first, the paths of the others may lead nowhere.
        opened = [(os.open(path, os.O_RDONLY | os.O_CLOEXEC), path, kind) for path, kind in self.namespaces]
        for fd, path, kind in opened:
            _set(fd, kind, path)
            os.close(fd)
        os.environ.clear()
        os.environ.update(self.environment)


@contextmanager
def children_in(pid_namespace: int) -> Iterator[None]:
    """Put processes that this thread starts in the body into the PID namespace of this file descriptor.

    Neither this process nor what other threads start changes its namespace. It takes root.
    """
    own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _set(pid_namespace, CLONE_NEWPID, "a PID namespace")
        try:
            yield
        finally:
            _set(own, CLONE_NEWPID, "this process's own PID namespace")
    finally:
        os.close(own)


def _set(fd: int, kind: int, what: str) -> None:
    """Run Linux ``setns(2)``. (``os.setns`` was added in Python 3.12.)"""
    if ctypes.CDLL(None, use_errno=True).setns(fd, kind) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot enter {what}: {os.strerror(code)}")
