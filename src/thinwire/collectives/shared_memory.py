"""Memory that the ranks of one host share: made without a name, so that nothing is left of it however a rank ends.

A rank makes a `Segment`, tells its node-mates its `ticket`, and these map it through ``/proc/<pid>/fd/<fd>``. What a
ticket says is checked, not believed. Only Linux has all that this takes: `unavailable` says what is missing.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import select
import stat
import struct
import sys
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.collectives import nodes
from thinwire.collectives.transport import Transport, TransportError
from thinwire.kernels import HAVE_NATIVE, LINE_BYTES, Word

TICKET_BYTES = 32
_TICKET = struct.Struct("<qq16s")
_TOKEN_BYTES = 16
_LOOK_S = 0.2
"""How often a rank that waits looks whether the other one is still alive."""


class SharedMemoryError(RuntimeError):
    """Memory of another rank cannot be mapped, or is not what its ticket said."""


@cache
def unavailable() -> str | None:
    """Why ranks cannot share memory here; None if they can. Found out by trying, once in a process."""
    if not sys.platform.startswith("linux"):
        return f"shared memory between ranks needs Linux, this is {sys.platform}"
    if not HAVE_NATIVE:
        return "shared memory between ranks needs thinwire's native core, which is not in use here"
    try:
        with Segment(LINE_BYTES) as made, Process(os.getpid()) as process:
            other = Segment.of(made.ticket, LINE_BYTES)
            Word(made.memory, 0).post(7)
            if not Word(other.memory, 0).wait(7, timeout_s=1.0) or not process.is_alive():
                return "memory shared between ranks does not behave on this system"
    except (AttributeError, OSError, RuntimeError) as error:
        # AttributeError: what this system lacks, Python's os lacks too.
        return f"shared memory between ranks does not work on this system: {error}"
    return None


class Segment:
    """One area of memory that processes of a node share, full of zeros at first.

    ``memory``, (bytes,) uint8, begins at a multiple of 64. It stays mapped while any tensor on it lives; the system
    takes it back when no process has it mapped any more, killed ones included. A child that was forked, say a worker
    of a data loader, has it mapped too: that is harmless, but memory is only returned when the child ends.

    Until `close`, its maker holds a file descriptor, by which others find it; then its ticket is of no more use.
    """

    _fd = -1

    def __init__(self, num_bytes: int) -> None:
        """Make one. Raises `SharedMemoryError` if the system refuses."""
        if num_bytes < 0:
            raise ValueError(f"a segment has at least 0 bytes, not {num_bytes}")
        try:
            self._fd = os.memfd_create("thinwire", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self._fd, LINE_BYTES + num_bytes)
            # Sealed: nobody can cut it short, which would kill whoever then touches it.
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            whole = _map(self._fd, LINE_BYTES + num_bytes)
        except (OSError, OverflowError) as error:
            self.close()
            raise SharedMemoryError(f"the system gives no {num_bytes} bytes of shared memory: {error}") from error
        token = secrets.token_bytes(_TOKEN_BYTES)
        whole[:_TOKEN_BYTES] = torch.frombuffer(bytearray(token), dtype=torch.uint8)
        self.memory = whole[LINE_BYTES:]
        ticket = _TICKET.pack(os.getpid(), self._fd, token)
        self.ticket = torch.frombuffer(bytearray(ticket), dtype=torch.uint8)
        """32 bytes, uint8, that others need to map it."""

    @staticmethod
    def of(ticket: Tensor, num_bytes: int) -> Segment:
        """Map the segment that another process made and has not closed yet, of at least ``num_bytes``.

        ``num_bytes`` is what the caller has computed itself. Raises `SharedMemoryError`.
        """
        pid, number, token = read_ticket(ticket)
        path = f"/proc/{pid}/fd/{number}"
        segment = Segment.__new__(Segment)
        segment.ticket = ticket
        try:
            # Looked at before it is opened: opening anything but a file may block or do something.
            if pid <= 0 or number < 0 or not stat.S_ISREG(os.stat(path).st_mode):
                raise SharedMemoryError(f"{path} is not a segment of memory")
            segment._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            segment.memory = _checked(segment._fd, path, num_bytes, token)
        except OSError as error:
            raise SharedMemoryError(
                f"cannot map the memory of process {pid}: {error}. Ranks of one host must run as one user and see "
                f"each other in /proc; where they do not, give them different names in {nodes.VARIABLE}"
            ) from error
        finally:
            segment.close()
        return segment

    def close(self) -> None:
        """Give the file descriptor back. The memory stays as long as tensors on it live."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def read_ticket(ticket: Tensor) -> tuple[int, int, bytes]:
    """(pid, file descriptor, token) as a ticket says them. Raises `SharedMemoryError` for what cannot be one."""
    if ticket.dtype != torch.uint8 or ticket.shape != (TICKET_BYTES,):
        raise SharedMemoryError(f"a ticket is a 1-D uint8 tensor of {TICKET_BYTES} bytes")
    return _TICKET.unpack(ticket.numpy().tobytes())


def _checked(fd: int, path: str, num_bytes: int, token: bytes) -> Tensor:
    seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    if not seals & fcntl.F_SEAL_SHRINK:
        raise SharedMemoryError(f"{path} is not a segment of memory: it can be cut short")
    size = os.fstat(fd).st_size
    if size < LINE_BYTES + num_bytes:
        raise SharedMemoryError(f"{path} has {size} bytes, expected {LINE_BYTES + num_bytes}")
    whole = _map(fd, LINE_BYTES + num_bytes)
    if not secrets.compare_digest(whole[:_TOKEN_BYTES].numpy().tobytes(), token):
        raise SharedMemoryError(f"{path} is another segment than the one that was announced")
    return whole[LINE_BYTES:]


def _map(fd: int, num_bytes: int) -> Tensor:
    # PyTorch maps without keeping a file descriptor for as long as the memory is mapped, as Python's mmap does. But it
    # loses one where the system refuses; so Python's tries first.
    mmap.mmap(fd, num_bytes).close()
    return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=num_bytes, dtype=torch.uint8)


class Process:
    """Another process of this machine, watched through a file descriptor: a pid that is used again does not deceive it.

    Who maps a `Segment` of that process after this is made, and then finds it alive, watches the right one.

    Raises:
        SharedMemoryError: there is no such process, or this system cannot watch one.
    """

    _fd = -1

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self._fd = os.pidfd_open(pid)
        except (OSError, OverflowError) as error:
            raise SharedMemoryError(f"cannot watch process {pid}: {error}") from error
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def is_alive(self) -> bool:
        """Whether it has not ended, in whatever way. Without a delay, also before its parent has noticed."""
        return not self._poll.poll(0)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._poll.unregister(fd)
            os.close(fd)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class Shared(NamedTuple):
    """Memory of another rank, and the process that made it."""

    memory: Tensor
    process: Process


def share(transport: Transport, num_bytes: int, others: Mapping[int, int]) -> tuple[Tensor, dict[int, Shared]]:
    """Make memory of ``num_bytes`` (none of 0) for node-mates to map, and map that of ``others``: rank to bytes.

    All ranks must call this, in the same order, with nothing else under way on ``transport``.

    Raises:
        SharedMemoryError: on every rank alike, if any of them could not.
        TransportError: a rank is gone or silent.
    """
    problem: SharedMemoryError | None = None
    mine, found = None, {}
    try:
        mine = Segment(num_bytes) if num_bytes else None
    except SharedMemoryError as error:
        problem = error
    tickets = transport.all_gather(mine.ticket if mine else torch.zeros(TICKET_BYTES, dtype=torch.uint8))
    try:
        # Who has none to show says so itself.
        for rank in [rank for rank in others if problem is None and tickets[rank].any()]:
            process = Process(read_ticket(tickets[rank])[0])
            found[rank] = Shared(Segment.of(tickets[rank], others[rank]).memory, process)
    except SharedMemoryError as error:
        problem = error
    failed = transport.all_gather(torch.tensor([problem is not None]))[:, 0].tolist()
    if mine is not None:
        mine.close()
    if any(failed):
        ranks = ", ".join(str(rank) for rank, bad in enumerate(failed) if bad)
        why = f": {problem}" if problem else ""
        raise SharedMemoryError(f"ranks {ranks} could not share memory with their node-mates{why}") from problem
    return mine.memory if mine else torch.empty(0, dtype=torch.uint8), found


def await_word(
    word: Word, value: int, check: Callable[[], None], *, timeout_s: float, spin_s: float, waiting: str
) -> None:
    """Wait until ``word`` reaches ``value``.

    ``check`` is called five times a second and raises if there is nothing more to wait for; what came before that
    counts. ``waiting`` says for what, for the error's text.

    Raises:
        TransportError: it did not come within ``timeout_s``, or ``check`` said so.
    """
    deadline = time.monotonic() + timeout_s
    if word.wait(value, timeout_s=min(timeout_s, _LOOK_S), spin_s=spin_s):
        return
    while True:
        try:
            check()
        except TransportError:
            # It may have done its part before it ended.
            if word.wait(value, timeout_s=0.0):
                return
            raise
        left = deadline - time.monotonic()
        if left <= 0:
            raise TransportError(f"{waiting}: nothing came within {timeout_s:g} s. That rank is stuck")
        if word.wait(value, timeout_s=min(left, _LOOK_S)):
            return
