"""IntSGD through compress() on DDP models over gloo: it trains, survives an overflow, and counts its bytes."""

from __future__ import annotations

import pytest
import torch

import thinwire
from harness import run_ranks
from nets import assert_replicas_identical, batch, loss_of, make, train, trained

SPECS = {"intsgd(bits=32)": 2, "intsgd(bits=8, block=global)": 4}
"""And on how many ranks."""
NUMEL = 43584
"""Of all that is trained."""


def _trains(rank: int, spec: str) -> tuple[list[float], dict, int, dict[str, int]]:
    model = make(rank)
    wire = thinwire.compress(model, spec, skip_if_slower=False, checks=thinwire.Checks(1))
    losses = train(model, rank, 30, lr=0.03)
    assert_replicas_identical(model)
    sizes = {name: p.numel() for name, p in model.module.named_parameters() if p.requires_grad}
    return losses, wire.stats.to_dict(), wire.wire_bytes_per_step(), sizes


@pytest.mark.parametrize(("spec", "num_ranks"), SPECS.items())
def test_it_trains_and_replicas_stay_identical(spec: str, num_ranks: int) -> None:
    width = 4 if "32" in spec else 1
    for losses, stats, per_step, sizes in run_ranks(_trains, num_ranks, spec):
        assert sum(losses[-5:]) < 0.3 * sum(losses[:5])
        assert stats["compressed_steps"] == stats["parity_checks"] == 30
        assert stats["encoded"] == 29 * sum(sizes.values())
        assert stats["clipped"] < 0.01
        # A quarter of fp32's, or all of it, and for each layer the flag and what fills up 64 bytes.
        padded = sum(-(-(numel + 25) * width // 64) * 64 for numel in sizes.values())
        assert per_step == pytest.approx(2 * (num_ranks - 1) / num_ranks * padded, abs=8)
        first = stats["payload_sent_bytes"] - 29 * per_step
        assert first == pytest.approx(stats["dense_bytes"] / 30, abs=8)


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


def test_a_profiled_scale_costs_a_round_of_maxima() -> None:
    for losses, stats, per_step, sizes in run_ranks(_trains, 2, "heuristic_intsgd(bits=32, rounding=random)"):
        assert sum(losses[-5:]) < 0.3 * sum(losses[:5])
        assert stats["encoded"] == 30 * sum(sizes.values())
        padded = sum(-(-numel * 4 // 64) * 64 for numel in sizes.values())
        assert per_step == padded + len(sizes) * 4
        assert stats["payload_sent_bytes"] == 30 * per_step
