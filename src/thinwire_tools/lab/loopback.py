"""Ranks on this machine's loopback device, where no slow network is wanted or none can be made."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from typing import Any, Protocol, Self

from thinwire_tools.lab.namespaces import NodeNamespaces

_KILL_AFTER_S = 20.0


class Link(Protocol):
    """The network of ranks: a `Network` or a `Loopback`."""

    def namespaces(self, rank: int) -> NodeNamespaces:
        """Return the namespaces of a rank's node and its environment, for a process that runs already."""
        ...

    def popen(self, rank: int, argv: Sequence[str], **popen_kwargs: Any) -> subprocess.Popen[Any]:
        """Start ``argv`` as this rank; arguments as in `subprocess.Popen`."""
        ...


class Loopback:
    """A set of ``num_ranks`` ranks on the loopback device; a context manager that ends what `popen` started.

    Their variables are those that ``torchrun`` sets on one machine. ``OMP_NUM_THREADS`` is 1 unless it is set here.
    """

    def __init__(self, num_ranks: int) -> None:
        self._world = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        self._processes: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Self:
        return self

    def namespaces(self, rank: int) -> NodeNamespaces:
        """Return no namespaces, and the environment of a rank."""
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        return NodeNamespaces((), {"OMP_NUM_THREADS": "1", **os.environ, **self._world, **own})

    def popen(self, rank: int, argv: Sequence[str], **popen_kwargs: Any) -> subprocess.Popen[Any]:
        """Start ``argv`` as ``rank``; arguments as `subprocess.Popen`."""
        process = subprocess.Popen(argv, env=self.namespaces(rank).environment, **popen_kwargs)
        self._processes.append(process)
        return process

    def __exit__(self, *_: object) -> None:
        """Terminate the processes, and kill those that do not end within 20 seconds."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(_KILL_AFTER_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_KILL_AFTER_S)


def free_port() -> int:
    """Return a port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
