"""Memory shared by ranks of one host: segments, words in them, and what happens when a rank dies."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from harness import run_ranks
from thinwire import TransportError
from thinwire.collectives import node_identity
from thinwire.collectives.shared_memory import (
    NODE_VARIABLE,
    TICKET_BYTES,
    Process,
    Segment,
    SharedMemoryError,
    await_word,
    read_ticket,
    unavailable,
)
from thinwire.kernels import LINE_BYTES, SharedCounter

pytestmark = [pytest.mark.alone, pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))]

LIMITS = {"timeout_s": 10.0, "spin_s": 0.0, "waiting": "waiting"}


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    gc.collect()
    return sum("memfd:thinwire" in line for line in Path("/proc/self/maps").read_text().splitlines())


def ticket_of(pid: int, fd: int, token: bytes) -> torch.Tensor:
    content = pid.to_bytes(8, "little", signed=True) + fd.to_bytes(8, "little", signed=True) + token
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def exchange(rank: int, num_bytes: int, size: int) -> tuple[list[Process], list[Segment]]:
    """Every rank makes a segment and maps all of the others'."""
    mine = Segment(num_bytes)
    tickets = [torch.empty(TICKET_BYTES, dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(tickets, mine.ticket)
    processes = [Process(read_ticket(ticket)[0]) for ticket in tickets]
    segments = [mine if peer == rank else Segment.from_ticket(tickets[peer], num_bytes) for peer in range(size)]
    dist.barrier()
    mine.close()
    return processes, segments


def test_two_mappings_are_one_memory_and_hold_no_file() -> None:
    before = open_files(), mappings()
    mine = Segment(1000)
    assert mine.memory.numel() == 1000
    assert mine.memory.data_ptr() % LINE_BYTES == 0
    assert not mine.memory.any()
    other = Segment.from_ticket(mine.ticket, 1000)
    assert other.memory.data_ptr() != mine.memory.data_ptr()
    mine.memory.copy_(torch.arange(1000))
    assert torch.equal(other.memory, torch.arange(1000).to(torch.uint8))
    mine.close()
    mine.close()
    assert (open_files(), mappings()) == (before[0], before[1] + 2)
    part = other.memory[990:]
    del mine, other
    assert mappings() == before[1] + 1
    assert part[9] == 999 % 256
    del part
    assert mappings() == before[1]


def test_sizes_that_cannot_be_or_change() -> None:
    with Segment(0) as mine:
        assert mine.memory.numel() == Segment.from_ticket(mine.ticket, 0).memory.numel() == 0
    with pytest.raises(ValueError, match="at least 0"):
        Segment(-1)
    before = open_files()
    for num_bytes in (1 << 62, 1 << 63, 1 << 64):
        with pytest.raises(SharedMemoryError, match=f"gives no {num_bytes} bytes"):
            Segment(num_bytes)
    assert open_files() == before, "a refusal of the system leaves nothing"
    with Segment(1000) as mine:
        _, fd, _ = read_ticket(mine.ticket)
        for size in (0, 1 << 20):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)


@pytest.fixture
def _nothing_left() -> Iterator[None]:
    before = open_files(), mappings()
    yield
    assert (open_files(), mappings()) == before


def refused(ticket: torch.Tensor, num_bytes: int, match: str = r"not a segment|cannot map") -> None:
    with pytest.raises(SharedMemoryError, match=match):
        Segment.from_ticket(ticket, num_bytes)


@pytest.mark.usefixtures("_nothing_left")
def test_tickets_of_other_segments_are_refused() -> None:
    with Segment(1000) as mine, Segment(64) as other:
        assert Segment.from_ticket(mine.ticket, 1000).memory.numel() == 1000
        refused(mine.ticket, 1001, "has 1064 bytes, expected 1065")
        pid, fd, _ = read_ticket(mine.ticket)
        refused(ticket_of(pid, fd, read_ticket(other.ticket)[2]), 64, "another segment")
    refused(mine.ticket, 64, "cannot map")
    for ticket in (torch.zeros(31, dtype=torch.uint8), torch.zeros(8, dtype=torch.int32)):
        refused(ticket, 0, "a ticket is")
    for pid in (0, -1, 1 << 40):
        refused(ticket_of(pid, 3, bytes(16)), 0)


@pytest.mark.usefixtures("_nothing_left")
def test_tickets_of_other_kinds_of_files_are_refused() -> None:
    reading, writing = os.pipe()
    with open("/dev/null") as null, tempfile.TemporaryFile() as file, tempfile.TemporaryDirectory() as folder:
        file.write(bytes(4096))
        file.flush()
        unsealed, readonly = (os.memfd_create("made up", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING) for _ in range(2))
        for fd in (unsealed, readonly):
            os.ftruncate(fd, 4096)
        fcntl.fcntl(readonly, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE)
        opened = os.open(folder, os.O_RDONLY)
        for fd in (reading, writing, null.fileno(), file.fileno(), unsealed, opened, -1, 1 << 40):
            refused(ticket_of(os.getpid(), fd, bytes(16)), 64)
        refused(ticket_of(os.getpid(), readonly, bytes(16)), 64, "cannot map")
        for fd in (reading, writing, unsealed, readonly, opened):
            os.close(fd)


def wait_for_the_dead(rank: int, how: str) -> float:
    """Memory that was never a file of /dev/shm leaves none there."""
    before = set(os.listdir("/dev/shm"))
    processes, segments = exchange(rank, 1 << 20, 2)
    word = SharedCounter(segments[1].memory, 0)
    if rank == 1:
        if how == "during the wait":
            time.sleep(0.7)
        word.post(1)
        if how == "fork" and not os.fork():
            # Like a worker of a data loader: it outlives its parent, with all that it inherited.
            time.sleep(4.0)
            os._exit(0)
        if how == "exit":
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    def alive() -> None:
        if not processes[1].is_alive():
            raise TransportError("rank 1 has died")

    if how != "during the wait":
        time.sleep(0.5)
    # What it did before counts, though it is dead.
    await_word(word, 1, alive, **LIMITS)
    start = time.monotonic()
    with pytest.raises(TransportError, match="rank 1 has died"):
        await_word(word, 2, alive, **LIMITS)
    assert not segments[1].memory[4:].any()
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "thinwire" in name}
    return time.monotonic() - start


@pytest.mark.parametrize("how", ["exit", "fork", "during the wait"])
def test_a_dead_rank_is_noticed_and_leaves_nothing(how: str) -> None:
    first, second = run_ranks(wait_for_the_dead, 2, how, may_die=True)
    assert second is None
    assert isinstance(first, float), first
    assert first < 3.0


def test_a_silent_rank_is_noticed_in_time() -> None:
    limits = {**LIMITS, "timeout_s": 0.2, "waiting": "receiving from rank 5"}
    with Segment(LINE_BYTES) as mine:
        start = time.monotonic()
        with pytest.raises(TransportError, match=r"rank 5: nothing came within 0\.2 s"):
            await_word(SharedCounter(mine.memory, 0), 1, lambda: None, **limits)
        assert 0.2 <= time.monotonic() - start < 10.0


def test_a_process_that_ended_is_dead_before_it_is_buried() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = Process(child.pid)
    assert process.is_alive()
    child.kill()
    deadline = time.monotonic() + 30.0
    while process.is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    child.communicate()
    for pid in (child.pid, -1, 1 << 40):
        with pytest.raises(SharedMemoryError, match=f"cannot watch process {pid}"):
            Process(pid)


IDENTITY = f"""
import os
from thinwire.collectives import node_identity
from thinwire.collectives.shared_memory import unavailable
print(node_identity().tolist())
os.environ["{NODE_VARIABLE}"] = "one"
print(node_identity().tolist())
print(unavailable())
"""


def python(code: str, *before: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [*before, sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


@pytest.mark.network
def test_another_namespace_is_another_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """An emulated host (a network namespace) counts as one, unless its node is named; a container always does."""
    if subprocess.run(["unshare", "--net", "--pid", "--fork", "--mount-proc", "true"]).returncode:
        pytest.skip("this machine gives no namespaces")
    plain = str(node_identity().tolist())
    monkeypatch.setenv(NODE_VARIABLE, "one")
    named = str(node_identity().tolist())
    monkeypatch.delenv(NODE_VARIABLE)
    assert plain != named
    for options in (["--net"], ["--pid", "--fork", "--mount-proc"]):
        other, other_named, why = python(IDENTITY, "unshare", *options).stdout.splitlines()
        assert other != plain, options
        assert (other_named == named) == (options == ["--net"]), options
        assert why == "None", options


def test_what_is_missing_is_said() -> None:
    assert unavailable() is None
    answer = python(IDENTITY, THINWIRE_CPU_LEVEL="reference")
    assert answer.stdout.strip().endswith("needs thinwire's native core, which is not in use here")


def test_a_system_that_lacks_something_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    before = open_files()
    for owner, name, put, reason in [
        (sys, "platform", "darwin", "needs Linux, this is darwin"),
        (os, "memfd_create", None, "has no attribute 'memfd_create'"),
        (Path, "read_bytes", refuse, "cannot watch process"),
        (os, "stat", refuse, "cannot map the memory of process"),
        (SharedCounter, "wait", lambda *_, **__: False, "does not behave"),
        (Process, "is_alive", lambda _: False, "does not behave"),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, put) if put else patch.delattr(owner, name)
            said = unavailable.__wrapped__()
        assert said is not None
        assert reason in said
    assert open_files() == before
    assert unavailable.__wrapped__() is None
