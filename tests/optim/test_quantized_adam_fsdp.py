"""QuantizedAdam on a model under FSDP2: exact gradients in the warm-up, then few bits with error feedback."""

from __future__ import annotations

import io
from typing import Any

import torch

from harness import run_ranks
from sharded import Net, batch, build, compress, train, whole
from thinwire.optim import QuantizedAdam

TWO_BITS = "minmax(bits=2, bucket=128)"


def _alike(rank: int, size: int) -> float:
    """How far a sharded model is from a whole one that sees all ranks' batches, after steps on both sides of T."""
    sharded = build()
    torch.manual_seed(0)
    single = Net()
    for parameter in single.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    options: dict[str, Any] = {"lr": 1e-5, "betas": (0.9, 0.8), "warmup": "stable"}
    optimizers = QuantizedAdam(sharded.parameters(), **options), QuantizedAdam(single.parameters(), **options)
    for _ in range(20):
        for model, ranks, optimizer in ((sharded, [rank], optimizers[0]), (single, range(size), optimizers[1])):
            optimizer.zero_grad()
            for each in ranks:
                x, y = batch(0, each)
                ((model(x) - y).square().mean() / len(ranks)).backward()
            optimizer.step()
        assert optimizers[0].frozen_at == optimizers[1].frozen_at
    assert optimizers[0].frozen
    variances = {n: optimizers[1].state[p]["exp_avg_sq"] for n, p in single.named_parameters()}
    for name, parameter in sharded.named_parameters():
        torch.testing.assert_close(
            optimizers[0].state[parameter]["exp_avg_sq"].full_tensor(), variances[name], rtol=1e-4, atol=1e-9
        )
    held = whole(sharded)
    return max(float((held[n] - p.detach()).abs().max()) for n, p in single.named_parameters())


def test_shards_are_trained_as_whole_parameters_are() -> None:
    assert all(far < 1e-6 for far in run_ranks(_alike, 2, 2))


def _trained(rank: int, stop: int | None) -> dict[str, Any]:
    def fresh() -> tuple[Any, ...]:
        model = build()
        optimizer = QuantizedAdam(model.parameters(), lr=1e-2, betas=(0.9, 0.95), warmup=5)
        return model, optimizer, compress(model, "raw", TWO_BITS, optimizer=optimizer)

    model, optimizer, wire = fresh()
    losses, sent, plans = [], [], []
    for step in range(24):
        before = wire.stats.payload_sent_bytes
        losses += train(model, 1, first=step, optimizer=optimizer)
        sent.append(wire.stats.payload_sent_bytes - before)
        plans.append(str(wire.plan["gradients/blocks.0.up.weight"]))
        if step + 1 == stop:
            buffer = io.BytesIO()
            torch.save([model.state_dict(), optimizer.state_dict(), wire.state_dict()], buffer)
            buffer.seek(0)
            states = torch.load(buffer, weights_only=False)
            model, optimizer, wire = fresh()
            for part, state in zip((model, optimizer, wire), states, strict=True):
                part.load_state_dict(state)
    return {"losses": losses, "sent": sent, "plans": plans, "weights": whole(model)}


def _straight_and_resumed(rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    return _trained(rank, None), _trained(rank, 12)


def test_gradients_are_sent_compressed_after_the_warm_up_and_a_run_goes_on_from_its_checkpoint() -> None:
    for answer, again in run_ranks(_straight_and_resumed, 2):
        assert set(answer["plans"][:5]) == {"raw()"}
        assert all(plan.startswith("ef(minmax(bits=2") for plan in answer["plans"][5:])
        assert max(answer["sent"][6:]) < 0.8 * min(answer["sent"][:5])
        assert sum(answer["losses"][-5:]) < 0.6 * sum(answer["losses"][:5])
        assert answer["losses"] == again["losses"]
        assert all(torch.equal(value, again["weights"][name]) for name, value in answer["weights"].items())
