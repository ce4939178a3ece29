"""The way into a node for a process that runs already."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Door:
    """Where a node is: may be handed to another process, which enters."""

    namespaces: tuple[tuple[str, int], ...]
    """Paths and kinds (``CLONE_NEW…`` of Linux ``setns(2)``), in the order in which they are entered."""
    environment: Mapping[str, str]
    """All variables of whoever is inside."""

    def enter(self) -> None:
        """Move into the node, for good. The process must have this thread only: others would stay where they are.

        Raises:
            OSError: the node is gone, or may not be entered.
        """
        # All are opened first: from inside the first, the paths of the others may lead nowhere.
        opened = [(os.open(path, os.O_RDONLY | os.O_CLOEXEC), path, kind) for path, kind in self.namespaces]
        for fd, path, kind in opened:
            # (``os.setns`` came with Python 3.12.)
            if ctypes.CDLL(None, use_errno=True).setns(fd, kind) != 0:
                code = ctypes.get_errno()
                raise OSError(code, f"cannot enter {path}: {os.strerror(code)}")
            os.close(fd)
        os.environ.clear()
        os.environ.update(self.environment)
