"""IntSGD through compress() on DDP models over gloo: it trains, survives an overflow, and counts its bytes."""

from __future__ import annotations

import pytest
import torch

import thinwire
from harness import run_ranks
from nets import assert_replicas_identical, batch, loss_of, make, train, trained

SPECS = {"intsgd(bits=32)": 2, "intsgd(bits=8, block=global)": 4, "heuristic_intsgd(bits=32, rounding=random)": 2}
"""And on how many ranks."""


def _trains(rank: int, spec: str, num_ranks: int) -> None:
    model, is_profiled = make(rank), "heuristic" in spec
    wire = thinwire.compress(model, spec, skip_if_slower=False, checks=thinwire.Checks(1))
    losses, stats = train(model, rank, 30, lr=0.03), wire.stats
    assert_replicas_identical(model)
    assert sum(losses[-5:]) < 0.3 * sum(losses[:5])
    sizes = [p.numel() for p in trained(model)]
    assert stats.compressed_steps == stats.parity_checks == 30
    assert stats.encoded == (30 if is_profiled else 29) * sum(sizes)
    # A quarter of fp32's, or all of it, and for each layer what fills up 64 bytes, and the flag or a round of maxima.
    width, flag = 4 if "32" in spec else 1, 0 if is_profiled else 25
    padded = sum(-(-(numel + flag) * width // 64) * 64 for numel in sizes) + 4 * len(sizes) * is_profiled
    per_step = wire.wire_bytes_per_step()
    assert per_step == pytest.approx(2 * (num_ranks - 1) / num_ranks * padded, abs=8)
    first = per_step if is_profiled else stats.dense_bytes / 30
    assert stats.payload_sent_bytes - 29 * per_step == pytest.approx(first, abs=8)
    assert is_profiled or stats.clipped < 0.01


@pytest.mark.parametrize(("spec", "num_ranks"), SPECS.items())
def test_it_trains_and_replicas_stay_identical(spec: str, num_ranks: int) -> None:
    run_ranks(_trains, num_ranks, spec, num_ranks)


def _first_steps(rank: int) -> list[list[torch.Tensor]]:
    """Gradients of some steps: uncompressed, from step 0 and from step 2 on compressed, and simulated."""
    found, counts = [], []
    for start, options in ((4, {}), (0, {}), (2, {}), (0, {"simulate": True})):
        model = make(rank)
        wire = thinwire.compress(model, "intsgd(bits=8)", skip_if_slower=False, start=start, **options)
        found.append([])
        for step in range(4):
            model.zero_grad()
            loss_of(model, batch(rank, step)).backward()
            found[-1].append(torch.cat([p.grad.reshape(-1) for p in trained(model)]))
        counts.append((wire.stats.encoded, wire.stats.payload_sent_bytes))
    assert counts[1] == counts[3]
    return found


def test_the_first_compressed_step_is_exact_and_no_other_and_a_simulation_is_alike() -> None:
    exact, *compressed, simulated = run_ranks(_first_steps, 3)[1]
    for start, got in zip((0, 2), compressed, strict=True):
        same = [torch.allclose(a, b, rtol=1e-5, atol=1e-8) for a, b in zip(got, exact, strict=True)]
        assert same == [step <= start for step in range(4)]
        assert all(float((a - b).norm()) < 1.2 * float(b.norm()) for a, b in zip(got, exact, strict=True))
    # The same integers and scales: only the order of additions differs.
    assert torch.allclose(compressed[0][-1], simulated[-1], rtol=1e-5, atol=1e-8)
