"""Bare messages of ``thinwire bench allreduce``: those of the algorithm, as often one after another."""

from __future__ import annotations

import queue

import pytest
import torch
from torch import Tensor

from harness import run_threads
from thinwire.collectives import LoopbackTransport
from thinwire.collectives.transport import Pending
from thinwire_tools.bench.allreduce_rank import Method


class _Counting(LoopbackTransport):
    """Notes what it sends, and the most messages of which each had to wait for the one before."""

    hops: int
    sent: list[tuple[int, int]]
    routes: dict[tuple[int, int, int], queue.SimpleQueue[int]]

    def _send(self, message: Tensor, peer: int, tag: int) -> Pending:
        self.sent.append((peer, message.numel()))
        self._route(self.rank, peer, tag).put(self.hops + 1)
        return super()._send(message, peer, tag)

    def _receive(self, message: Tensor, peer: int, tag: int) -> Pending:
        return _Hop(self, super()._receive(message, peer, tag), self._route(peer, self.rank, tag))

    def _route(self, source: int, target: int, tag: int) -> queue.SimpleQueue[int]:
        return self.routes.setdefault((source, target, tag), queue.SimpleQueue())


class _Hop:
    def __init__(self, transport: _Counting, pending: Pending, hops: queue.SimpleQueue[int]) -> None:
        self._transport, self._pending, self._hops = transport, pending, hops

    def wait(self) -> None:
        self._pending.wait()
        self._transport.hops = max(self._transport.hops, self._hops.get(timeout=30))


@pytest.mark.parametrize(
    ("algorithm", "hops"), [("sra", 2), ("ring", 6), ("tree", 4), ("parameter_server", 2), ("allgather", 1)]
)
def test_bare_messages_are_those_of_the_algorithm(algorithm: str, hops: int) -> None:
    routes: dict[tuple[int, int, int], queue.SimpleQueue[int]] = {}

    def run(transport: LoopbackTransport) -> list[tuple[int, list[tuple[int, int]]]]:
        transport.__class__ = _Counting
        assert isinstance(transport, _Counting)
        transport.routes, found = routes, []
        method = Method(40_000, "minmax(bits=4, bucket=128)", algorithm, transport)
        for exchange in (method.bare, lambda: method.run(torch.ones(40_000))):
            transport.hops, transport.sent = 0, []
            exchange()
            found.append((transport.hops, sorted(transport.sent)))
        return found

    answers = run_threads(run, 4)
    for bare, full in answers:
        assert bare[1] == full[1]
    for which in range(2):
        assert max(answer[which][0] for answer in answers) == hops


def test_messages_whose_size_depends_on_data_have_no_bare_ones() -> None:
    def run(transport: LoopbackTransport) -> bool:
        return Method(4096, "threshold(lam=0.5)", "sra", transport).has_bare

    assert run_threads(run, 2) == [False, False]
