"""Receives that are posted before their exchange: when, into what, and what becomes of them if it never comes."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness import run_ranks, run_threads
from last_message_rank import main
from thinwire.collectives import (
    Buffers,
    LoopbackTransport,
    PeerFailedError,
    ProcessGroupTransport,
    SharedMemoryTransport,
    Transport,
)
from thinwire.collectives.message import HEADER_BYTES, Messages
from thinwire.collectives.transport import OutgoingMessage, Pending, Traffic
from thinwire_tools import lab
from thinwire_tools.ranks import ForkedProcess

TIMEOUT = timedelta(seconds=20)
UNAVAILABLE = lab.unavailable()


def _everybody(num_ranks: int, num_bytes: int = 256, phases: int = 2) -> Traffic:
    """Every rank sends messages to all others."""
    return [
        [OutgoingMessage(k, num_bytes, tuple(r for r in range(num_ranks) if r != rank)) for k in range(phases)]
        for rank in range(num_ranks)
    ]


def _contents(rank: int, phase: int, step: int) -> int:
    return (7 * step + 3 * rank + phase) % 251


def _swap(transport: Transport, buffers: Buffers, step: int, *, fails: bool = False) -> None:
    """An exchange whose messages are different in every step, and are checked."""
    with Messages(transport, buffers, step=step, digest=1) as exchange:
        if fails:
            raise ValueError("made up")
        for phase in buffers.outbox:
            exchange.outgoing(phase)[HEADER_BYTES:] = _contents(transport.rank, phase, step)
            exchange.send(phase)
        for phase, peer in buffers.inbox:
            payload = exchange.receive(phase, peer)[HEADER_BYTES:]
            assert bool((payload == _contents(peer, phase, step)).all()), f"rank {peer}, phase {phase}, step {step}"


class _Ahead(LoopbackTransport):
    """Between threads, with receives that are posted ahead."""

    def _receive_ahead(self, message: Tensor, peer: int, tag: int) -> Pending | None:
        return self._receive(message, peer, tag)


def _run_ahead(function, num_ranks: int) -> list:
    def run(transport: LoopbackTransport):
        transport.__class__ = _Ahead
        return function(transport)

    return run_threads(run, num_ranks)


def test_buffers_used_again_are_received_into_ahead() -> None:
    """Those used once are not: a probe drops them, and a receive that is posted and dropped stops a connection."""

    def run(transport: Transport) -> list[int]:
        buffers, posted = transport.open(_everybody(3)), []
        for step in range(4):
            _swap(transport, buffers, step)
            posted.append(len(buffers.posted))
        return posted

    assert _run_ahead(run, 3) == [[0, 4, 4, 4]] * 3


@pytest.mark.parametrize("what", ["exchange", "sum"])
def test_nothing_is_posted_while_anything_is_under_way(what: str) -> None:
    """A rank that has ended may still have bytes on the way; an announcement that comes then would lose them."""

    def run(transport: Transport) -> tuple[int, int]:
        buffers, other = (transport.open(_everybody(2)) for _ in range(2))
        for step in range(2):
            _swap(transport, buffers, step)
        if what == "exchange":
            transport.begin(other)
            end = partial(transport.end, other)
        else:
            end = transport.start_all_reduce(torch.zeros(4)).wait
        _swap(transport, buffers, 2)
        during = len(buffers.posted)
        end()
        return during, len(buffers.posted)

    assert _run_ahead(run, 2) == [(0, 2)] * 2


def test_only_messages_of_known_size_from_ranks_that_also_get_some() -> None:
    """A rank that gets nothing may have ended an exchange that this rank has not begun."""

    def run(transport: Transport) -> list[tuple[int, int]]:
        late = [OutgoingMessage(0, 128, (1,)), OutgoingMessage(1, 128, (1, 2), late=True)]
        return list(transport.open([late, [OutgoingMessage(0, 128, (0, 2))], []]).ahead)

    assert run_threads(run, 3) == [[(0, 1)], [(0, 0)], []]


def test_not_into_memory_that_neighbors_still_read() -> None:
    """What comes from another node for several ranks of this one is decoded by all of them, each in its own time."""
    pair = [OutgoingMessage(0, 128, (2,)), OutgoingMessage(1, 128, (2,))]
    forwarded = [OutgoingMessage(0, 128, (0,)), OutgoingMessage(1, 128, (3,), source=0)]

    def run(transport: Transport) -> list[tuple[int, int]]:
        assert isinstance(transport, SharedMemoryTransport)
        return list(transport.open([pair, [], forwarded, []]).ahead)

    assert run_threads(run, 4, node_of=lambda rank: rank // 2) == [[(0, 2)], [], [(0, 0)], []]


def _transport(timeout: timedelta = TIMEOUT) -> ProcessGroupTransport:
    group = dist.new_group(timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    return ProcessGroupTransport(group, timeout, owned=True)


def _good_and_bad(rank: int) -> None:
    """Exchanges that succeed and that fail on one rank, with buffers of several sizes that come and go."""
    transport = _transport()
    buffers = transport.open(_everybody(3))
    for step in range(20):
        if step % 10 == 5:
            buffers = transport.open(_everybody(3, num_bytes=256 + 64 * step, phases=1 + step % 3))
        failing = step % 4 == 3
        try:
            _swap(transport, buffers, step, fails=failing and rank == step % 3)
        except (ValueError, PeerFailedError):
            assert failing
        else:
            assert not failing
        assert bool(buffers.posted) == (buffers.uses > 1)


def test_no_message_of_a_failed_exchange_is_taken_for_one_of_the_next() -> None:
    run_ranks(_good_and_bad, 3)


_PROGRAM = """
import sys
sys.path[:0] = {path!r}
import torch.distributed as dist
from test_receiving_ahead import TIMEOUT, _everybody, _swap, _transport

store = dist.FileStore({store!r}, 2)
dist.init_process_group("gloo", store=store, rank=int(sys.argv[1]), world_size=2, timeout=TIMEOUT)
transport = _transport()
buffers = transport.open(_everybody(2))
for step in range(3):
    _swap(transport, buffers, step)
assert buffers.posted
if transport.rank:
    dist.destroy_process_group()
print("ended")
"""


def test_a_program_ends_with_receives_posted(tmp_path) -> None:
    """Whether it destroys its group, as rank 1 does, or not."""
    text = _PROGRAM.format(path=sys.path, store=str(tmp_path / "store"))
    command = [sys.executable, "-X", "faulthandler", "-c", text]
    ranks = [subprocess.Popen([*command, str(rank)], stdout=-1, stderr=-1, text=True) for rank in range(2)]
    try:
        said = [process.communicate(timeout=240) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], said
    assert [out for out, _ in said] == ["ended\n"] * 2


@pytest.mark.network
@pytest.mark.skipif(UNAVAILABLE is not None, reason=UNAVAILABLE or "")
def test_the_last_message_of_a_rank_that_ends_is_not_lost(tmp_path: Path) -> None:
    """It is still in the kernel of a rank that has ended, while this one ends another exchange."""
    with lab.Network(2, rate="2mbit", rtt="20ms") as network:
        ranks = [ForkedProcess(main, network.namespaces(rank), tmp_path / f"rank{rank}.log") for rank in range(2)]
        try:
            assert json.loads(ranks[0].stdout.readall()) == "arrived"
        finally:
            for rank in ranks:
                rank.close()
