"""The namespaces of a node, which a process that is already running can enter."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass


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
            OSError: The node is gone, or may not be entered.
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
