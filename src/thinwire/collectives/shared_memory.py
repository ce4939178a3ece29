"""Memory that the ranks of one node share. It has no name, so nothing of it remains however a rank ends.

Ranks determine their nodes themselves, by `node_identity`.

A rank makes a `Segment` and sends its `ticket` to the other ranks of its node, which map it through
``/proc/<pid>/fd/<fd>``. The contents of a ticket are checked. All this needs Linux; `unavailable` returns what is
missing.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import secrets
import stat
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor

from thinwire.collectives.errors import TransportError
from thinwire.collectives.transport import Transport
from thinwire.kernels import HAVE_NATIVE, LINE_BYTES, SharedCounter

NODE_VARIABLE = "THINWIRE_NODE"
"""Environment variable that names this rank's node, if the identity from the kernel is not the intended one."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
TICKET_BYTES = 32
_TICKET = struct.Struct("<qq16s")
_TOKEN_BYTES = 16
_CHECK_S = 0.2
"""Seconds between checks of whether a rank that is waited for is still alive."""


class SharedMemoryError(RuntimeError):
    """Memory of another rank cannot be mapped, or is not the segment of its ticket."""


def node_identity() -> Tensor:
    """Return 16 bytes that are equal on ranks that can share memory: those of one kernel in the same PID and network
    namespaces.

    The network namespace is included because ranks in different ones reach each other over a link, as on emulated
    hosts.
    """
    try:
        machine = _BOOT_ID.read_text().strip()
    except OSError:
        machine = os.uname().nodename
    parts = [machine, _namespace("pid"), os.environ.get(NODE_VARIABLE) or _namespace("net")]
    digest = hashlib.blake2b("\n".join(parts).encode(), digest_size=16).digest()
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)


def number_nodes(identities: Sequence[bytes]) -> tuple[int, ...]:
    """Return the number of each rank's node, counted from 0 in the order of first ranks."""
    numbers: dict[bytes, int] = {}
    return tuple(numbers.setdefault(identity, len(numbers)) for identity in identities)


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""


@cache
def unavailable() -> str | None:
    """Return why ranks cannot share memory here, or None if they can. Tried once for each process."""
    if not sys.platform.startswith("linux"):
        return f"shared memory between ranks needs Linux, this is {sys.platform}"
    if not HAVE_NATIVE:
        return "shared memory between ranks needs thinwire's native core, which is not in use here"
    try:
        with Segment(LINE_BYTES) as made:
            process = Process(os.getpid())
            other = Segment.from_ticket(made.ticket, LINE_BYTES)
            SharedCounter(made.memory, 0).post(7)
            if not SharedCounter(other.memory, 0).wait(7, timeout_s=1.0) or not process.is_alive():
                return "memory shared between ranks does not behave on this system"
    except (AttributeError, OSError, RuntimeError) as error:
        # AttributeError: the os module lacks functions that the system does not have.
        return f"shared memory between ranks does not work on this system: {error}"
    return None


class Segment:
    """Memory that processes of a node share, initially zero.

    ``memory``, (bytes,) uint8, starts at a multiple of 64. It stays mapped while any tensor uses it; the system frees
    it when no process has it mapped, however processes end. A forked child, such as a worker of a data loader, has it
    mapped as well, which is harmless, but the memory is freed only when the child ends.

    Until `close`, the process that made it has a file descriptor, through which others map it. Its ticket is invalid
    afterwards, and the memory stays while tensors use it.
    """

    _fd = -1

    def __init__(self, num_bytes: int) -> None:
        """Allocate ``num_bytes``. Raises `SharedMemoryError` if the system does not."""
        if num_bytes < 0:
            raise ValueError(f"a segment has at least 0 bytes, not {num_bytes}")
        try:
            self._fd = os.memfd_create("thinwire", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self._fd, LINE_BYTES + num_bytes)
            # Sealed: a process that truncated it would kill every process that then accesses it.
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
        """Ticket for other processes, which need it to map the segment: (32,) uint8."""

    @staticmethod
    def from_ticket(ticket: Tensor, num_bytes: int) -> Segment:
        """Map a segment of at least ``num_bytes`` that another process made and has not closed yet.

        ``num_bytes`` is computed by the caller, not received.

        Raises:
            SharedMemoryError: it cannot be mapped, or is not the segment of the ticket.
        """
        pid, number, token = read_ticket(ticket)
        path = f"/proc/{pid}/fd/{number}"
        segment = Segment.__new__(Segment)
        segment.ticket = ticket
        try:
            # Checked before it is opened: opening anything but a regular file may block or have effects.
            if pid <= 0 or number < 0 or not stat.S_ISREG(os.stat(path).st_mode):
                raise SharedMemoryError(f"{path} is not a segment of memory")
            segment._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            segment.memory = _checked(segment._fd, path, num_bytes, token)
        except OSError as error:
            raise SharedMemoryError(
                f"cannot map the memory of process {pid}: {error}. Ranks of one host must run as one user and see "
                f"each other in /proc; where they do not, give them different names in {NODE_VARIABLE}"
            ) from error
        finally:
            segment.close()
        return segment

    def close(self) -> None:
        """Close the file descriptor."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def read_ticket(ticket: Tensor) -> tuple[int, int, bytes]:
    """Return (pid, file descriptor, token) of a ticket. Raises `SharedMemoryError` if it is invalid."""
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
    # PyTorch's mapping holds no file descriptor, Python's mmap does. But PyTorch leaks one if the system refuses to
    # map, so mmap tries first.
    mmap.mmap(fd, num_bytes).close()
    return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=num_bytes, dtype=torch.uint8)


class Process:
    """Another process of this machine, told from a later one with its pid by the time at which it started.

    No descriptor is held for it: those of a pidfd for each rank of a large node would be many.
    Make this first, then map a `Segment` of the process, then check `is_alive`: it is the process of the segment.

    Raises:
        SharedMemoryError: there is no such process, or the system does not tell.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self._started = _start_time(pid)
        except OSError as error:
            raise SharedMemoryError(f"cannot watch process {pid}: {error}") from error
        if self._started is None:
            raise SharedMemoryError(f"cannot watch process {pid}: it has ended")

    def is_alive(self) -> bool:
        """Whether the process runs. False as soon as it has ended, even before its parent has waited for it."""
        try:
            return _start_time(self.pid) == self._started
        except OSError:  # no more files: it may be alive
            return True


def _start_time(pid: int) -> bytes | None:
    """Return when a process started, in ticks of the kernel's; None if there is none, or if it has ended."""
    try:
        # The name, in parentheses, may have any characters.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X") else fields[19]


class Shared(NamedTuple):
    """Mapped memory of another rank, and the process of that rank."""

    memory: Tensor
    process: Process


def share(transport: Transport, num_bytes: int, others: Mapping[int, int]) -> tuple[Tensor, dict[int, Shared]]:
    """Allocate ``num_bytes`` (none for 0) that ranks of the node can map, and map the memory of ``others``: rank to
    bytes.

    All ranks must call this, in the same order, while no other operation runs on ``transport``.

    Raises:
        SharedMemoryError: on every rank, if any of them failed.
        TransportError: a rank has failed or does not answer.
    """
    problem: SharedMemoryError | None = None
    mine, mapped = None, {}
    try:
        mine = Segment(num_bytes) if num_bytes else None
    except SharedMemoryError as error:
        problem = error
    tickets = transport.all_gather(mine.ticket if mine else torch.zeros(TICKET_BYTES, dtype=torch.uint8, device="cpu"))
    try:
        # A rank whose ticket is empty reports its own failure.
        for rank in [rank for rank in others if problem is None and tickets[rank].any()]:
            process = Process(read_ticket(tickets[rank])[0])
            mapped[rank] = Shared(Segment.from_ticket(tickets[rank], others[rank]).memory, process)
    except SharedMemoryError as error:
        problem = error
    failed = transport.all_gather(torch.tensor([problem is not None], dtype=torch.bool, device="cpu"))[:, 0].tolist()
    if mine is not None:
        mine.close()
    if any(failed):
        ranks = ", ".join(str(rank) for rank, bad in enumerate(failed) if bad)
        why = f": {problem}" if problem else ""
        text = f"ranks {ranks} could not share memory with the other ranks of their node{why}"
        raise SharedMemoryError(text) from problem
    return mine.memory if mine else torch.empty(0, dtype=torch.uint8, device="cpu"), mapped


def await_word(
    word: SharedCounter,
    value: int,
    check: Callable[[], None],
    *,
    timeout_s: float,
    spin_s: float,
    waiting: str,
    peer: int | None = None,
) -> None:
    """Wait until ``word`` reaches ``value``.

    ``check`` is called five times a second and raises if the peer is gone; a value written before counts.
    ``waiting`` is what the error message starts with, and ``peer`` is the rank that is waited for.

    Raises:
        TransportError: the value was not written within ``timeout_s``, or ``check`` raised.
    """
    deadline = time.monotonic() + timeout_s
    if word.wait(value, timeout_s=min(timeout_s, _CHECK_S), spin_s=spin_s):
        return
    while True:
        try:
            check()
        except TransportError:
            # It may have written the value before it ended.
            if word.wait(value, timeout_s=0.0):
                return
            raise
        left = deadline - time.monotonic()
        if left <= 0:
            raise TransportError(f"{waiting}: nothing came within {timeout_s:g} s. That rank is stuck", rank=peer)
        if word.wait(value, timeout_s=min(left, _CHECK_S)):
            return
