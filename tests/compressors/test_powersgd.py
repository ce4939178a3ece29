"""PowerSGD over several ranks and steps beside its algorithms, written down in fp64."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from harness import run_threads
from kernel_levels import LEVELS, at, needs_native
from thinwire import Plan, Wire, parse
from thinwire.compressors import Compressor
from thinwire.plan import Filter
from thinwire.runtime import BucketEngine
from thinwire.runtime.consistency import machine_record

BLOCKS = {"0.a": (24, 16), "0.b": (16, 32), "1.a": (24, 16), "1.b": (16, 32), "last": (24, 16), "2.a": (24, 16)}
"""Layers of blocks, and one that is out of line, which cannot be compressed together with those of its shape."""

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


def received_of(spec: str, transport, shapes: dict[str, tuple[int, ...]], given: list[Tensor]) -> tuple[list, int]:
    """The flat means of steps with these gradients, and the bytes that this rank has sent."""
    wire, means = Wire(BucketEngine(Plan.build(shapes, spec, Filter(min_numel=0)), shapes, transport)), []
    for flat in given:
        wire.engine.begin_step()
        means.append(wire.engine.reduce(flat.view(-1).clone(), tuple(shapes.items())).wait().clone())
    wire.detach()
    return means, wire.stats.payload_sent_bytes


def first_q(compressor: Compressor) -> Tensor:
    """The factor that all ranks start from, drawn from the layer's name."""
    slot = next(slot for slot in compressor.slots if slot.name == "q")
    return slot.first(SHAPE, NAME).view(SHAPE[1], -1)


@pytest.mark.parametrize("rank", [1, 3])
def test_ranks_receive_what_the_algorithm_gives(rank: int) -> None:
    spec = f"ef(powersgd(rank={rank}))"

    def run(transport) -> list[Tensor]:
        given = [gradient(transport.rank, step) for step in range(STEPS)]
        received, sent = received_of(spec, transport, {NAME: SHAPE}, given)
        # A ring's all-reduce sends 2(n-1)/n of both factors.
        assert sent == pytest.approx(STEPS * 4 * rank * sum(SHAPE) * 2 * (RANKS - 1) / RANKS, rel=0.05)
        return [mean.view(SHAPE) for mean in received]

    expected = in_fp64(rank, first_q(parse(spec)))
    for received in run_threads(run, RANKS):
        for ours, theirs in zip(received, expected, strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-3, atol=1e-3)
    exact = torch.stack([gradient(i, STEPS - 1).double() for i in range(RANKS)]).mean(0)
    assert float((expected[-1] - exact).norm() / exact.norm()) > 0.05, "it was compressed"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_layers_of_blocks_are_received_as_each_alone(dtype: str) -> None:
    generator = torch.Generator().manual_seed(1)
    values = {name: torch.randn(shape, generator=generator) for name, shape in BLOCKS.items()}
    plan = Plan.build(BLOCKS, f"ef(powersgd(rank=2, dtype={dtype}))", Filter(min_numel=0))

    def run(transport) -> list[Tensor]:
        together, apart = Wire(BucketEngine(plan, BLOCKS, transport)), Wire(BucketEngine(plan, BLOCKS, transport))
        received = []
        for step in range(3):
            together.engine.begin_step()
            apart.engine.begin_step()
            mine = {name: x * (1 + transport.rank + step) for name, x in values.items()}
            flat = torch.cat([x.view(-1) for x in mine.values()])
            received.append(together.engine.reduce(flat, tuple(BLOCKS.items())).wait().clone())
            alone = [
                apart.engine.reduce(x.view(-1).clone(), ((n, BLOCKS[n]),)).wait().view(-1) for n, x in mine.items()
            ]
            assert torch.equal(received[-1], torch.cat(alone))
        together.detach()
        apart.detach()
        return received

    first, second = run_threads(run, 2)
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def test_factors_of_16_bits_take_half_the_bytes_and_what_they_lose_is_sent_later() -> None:
    """A gradient of rank 1 that does not change: its factors in bf16 are off by rounding, their mean over steps not."""
    whole, half = parse("powersgd(rank=1)"), parse("powersgd(rank=1, dtype=bf16)")
    assert whole.wire_bytes(SHAPE) == 2 * half.wire_bytes(SHAPE)
    assert str(half) == "powersgd(rank=1, dtype=bf16)"
    constant = gradient(0, 0)[:, :1] @ gradient(0, 1)[:1]

    def error(spec: str) -> float:
        received, _ = run_threads(lambda t: received_of(spec, t, {NAME: SHAPE}, [constant] * 20)[0], 2)
        return float((torch.stack(received).double().mean(0).view(SHAPE) - constant).norm() / constant.norm())

    kept, lost = error("ef(powersgd(rank=1, dtype=bf16))"), error("powersgd(rank=1, dtype=bf16, feedback=False)")
    assert kept < 3e-4 < 5e-4 < lost
    assert error("ef(powersgd(rank=1))") < 1e-5


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_of_different_machines_receive_the_same_bits(dtype: torch.dtype) -> None:
    numel, found = sum(a * b for a, b in BLOCKS.values()), []

    def run(transport) -> Tensor:
        drawn = torch.randn(3, numel, generator=torch.Generator().manual_seed(transport.rank)).to(dtype)
        return torch.stack(received_of("ef(powersgd(rank=3))", transport, BLOCKS, [*drawn])[0])

    for level, threads in product(LEVELS, (1, 2)):
        with at(level, threads):
            found.append(run_threads(run, 2)[0])
    assert all(torch.equal(found[0], other) for other in found)


@needs_native
def test_what_ranks_machines_must_have_in_common() -> None:
    """Nothing, as far as the native core computes; a wider factor is PyTorch's to multiply."""

    def records(*specs: str) -> set[str]:
        found = set()
        for level in [*LEVELS, "reference"]:
            with at(level):
                found.add(str(machine_record([parse(spec) for spec in specs])))
        return found

    assert len(records("minmax", "topk(density=0.1)")) == 1
    assert len(records("minmax", "ef(powersgd(rank=((0, 16), (100, 4))))")) == 2, "with the core and without it"
    assert len(records("powersgd(rank=((0, 4), (100, 17)))")) == len(LEVELS) + 1
    assert len(records("powersgd", "fft(theta=0.85)")) == len(LEVELS) + 1
