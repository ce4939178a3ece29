"""PowerSGD over several ranks and steps beside its algorithms, written down in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness import run_threads
from thinwire import Plan, Wire, parse
from thinwire.compressors import Compressor
from thinwire.plan import Filter

SHAPE, NAME, RANKS, STEPS = (40, 24), "w", 3, 6


def gradient(rank: int, step: int) -> Tensor:
    """Of low rank, but for noise of a tenth."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    low = torch.randn(SHAPE[0], 3, generator=generator) @ torch.randn(3, SHAPE[1], generator=generator)
    return low + 0.1 * torch.randn(SHAPE, generator=generator)


def in_fp64(rank: int, q: Tensor) -> list[Tensor]:
    """The means of Vogels et al. 2019, Algorithms 1 and 2: one power iteration a step, from the factor of the step
    before, and what a rank's own factors lack is added to its next gradient."""
    q, lacking, means = q.double(), torch.zeros(RANKS, *SHAPE, dtype=torch.float64), []
    for step in range(STEPS):
        m = lacking + torch.stack([gradient(i, step).double() for i in range(RANKS)])
        p = (m @ q).mean(0)
        for column in range(rank):  # Gram-Schmidt
            p[:, column] -= p[:, :column] @ (p[:, :column].T @ p[:, column])
            p[:, column] /= p[:, column].norm()
        own = m.mT @ p
        q = own.mean(0)
        lacking = m - p @ own.mT
        means.append(p @ q.T)
    return means


def first_q(compressor: Compressor) -> Tensor:
    """The factor that all ranks start from, drawn from the layer's name."""
    slot = next(slot for slot in compressor.slots if slot.name == "q")
    return slot.first(SHAPE, NAME).view(SHAPE[1], -1)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_ranks_receive_what_the_algorithm_gives(rank: int) -> None:
    spec = f"ef(powersgd(rank={rank}))"

    def run(transport) -> list[Tensor]:
        plan = Plan.build({NAME: SHAPE}, spec, Filter(min_numel=0))
        wire = Wire(plan, {NAME: SHAPE}, transport)
        received = []
        for step in range(STEPS):
            wire.begin_step()
            flat = gradient(transport.rank, step).view(-1).clone()
            received.append(wire.reduce(flat, ((NAME, SHAPE),)).wait().view(SHAPE).clone())
        sent = wire.stats.payload_sent_bytes
        wire.detach()
        # A ring's all-reduce sends 2(n-1)/n of both factors.
        assert sent == pytest.approx(STEPS * 4 * rank * sum(SHAPE) * 2 * (RANKS - 1) / RANKS, rel=0.05)
        return received

    expected = in_fp64(rank, first_q(parse(spec)))
    for received in run_threads(run, RANKS):
        for ours, theirs in zip(received, expected, strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-3, atol=1e-3)
    exact = torch.stack([gradient(i, STEPS - 1).double() for i in range(RANKS)]).mean(0)
    assert float((expected[-1] - exact).norm() / exact.norm()) > 0.05, "it was compressed"
