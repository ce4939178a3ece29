"""Bare messages of ``thinwire bench allreduce``: those of the algorithm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from harness import run_threads
from thinwire.collectives import LoopbackTransport
from thinwire.collectives.transport import Pending
from thinwire_tools.bench.allreduce import Method


class _Noting(LoopbackTransport):
    """Notes what it sends."""

    sent: list[tuple[int, int]]

    def _send(self, message: Tensor, peer: int, tag: int) -> Pending:
        self.sent.append((peer, message.numel()))
        return super()._send(message, peer, tag)


@pytest.mark.parametrize("algorithm", ["sra", "ring", "tree", "parameter_server", "allgather"])
def test_bare_messages_are_those_of_the_algorithm(algorithm: str) -> None:
    def run(transport: Any) -> None:
        transport.__class__, found = _Noting, []
        method = Method(40_000, "minmax(bits=4, bucket=128)", algorithm, transport)
        for exchange in (method.bare, lambda: method.run(torch.ones(40_000))):
            transport.sent = []
            exchange()
            found.append(sorted(transport.sent))
        assert found[0] == found[1] != []

    run_threads(run, 4)


def test_messages_whose_size_depends_on_data_have_no_bare_ones() -> None:
    def run(transport: LoopbackTransport) -> bool:
        return Method(4096, "threshold(lam=0.5)", "sra", transport).has_bare

    assert run_threads(run, 2) == [False, False]
