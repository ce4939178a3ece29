"""QuantizedAdam on a model under FSDP2: exact gradients in the warm-up, then few bits with error feedback."""

from __future__ import annotations

import io
from typing import Any

import torch

from harness import on_ranks
from ranks import alike
from sharded import batch, build, compress, initialized, train, whole
from thinwire.optim import CompressedAdamW, QuantizedAdam

TWO_BITS = "minmax(bits=2, bucket=128)"


@on_ranks(2)
def test_shards_are_trained_as_whole_parameters_are(rank: int, size: int) -> None:
    """A sharded model is as a whole one that sees all ranks' batches, after steps on both sides of T."""
    options: dict[str, Any] = {"lr": 1e-5, "betas": (0.9, 0.8), "warmup": "stable"}
    preconditioned: dict[str, Any] = {"lr": 5e-3, "betas": (0.9, 0.95), "clip": 0.2}
    for kind, given, steps, atol in ((QuantizedAdam, options, 20, 1e-6), (CompressedAdamW, preconditioned, 5, 2e-5)):
        sharded, single = build(), initialized()
        optimizers = [kind(model.parameters(), **given) for model in (sharded, single)]
        for _ in range(steps):
            for model, ranks, optimizer in ((sharded, [rank], optimizers[0]), (single, range(size), optimizers[1])):
                optimizer.zero_grad()
                for each in ranks:
                    x, y = batch(0, each)
                    ((model(x) - y).square().mean() / len(ranks)).backward()
                optimizer.step()
            assert kind is CompressedAdamW or optimizers[0].frozen_at == optimizers[1].frozen_at
        assert kind is CompressedAdamW or optimizers[0].frozen
        for mine, theirs in zip(sharded.parameters(), single.parameters(), strict=True):
            variances = optimizers[0].state[mine]["exp_avg_sq"].full_tensor(), optimizers[1].state[theirs]["exp_avg_sq"]
            torch.testing.assert_close(*variances, rtol=1e-4, atol=1e-9)
        torch.testing.assert_close(whole(sharded), dict(single.named_parameters()), rtol=0, atol=atol)


def _trained(rank: int, stop: int | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    def fresh() -> tuple[Any, ...]:
        model = build()
        optimizer = QuantizedAdam(model.parameters(), lr=1e-2, betas=(0.9, 0.95), warmup=5)
        return model, optimizer, compress(model, "raw", TWO_BITS, optimizer=optimizer)

    model, optimizer, wire = fresh()
    losses, sent = [], []
    for step in range(24):
        before = wire.stats.payload_sent_bytes
        losses += train(model, 1, first=step, optimizer=optimizer)
        sent.append(wire.stats.payload_sent_bytes - before)
        plan = str(wire.plan["gradients/blocks.0.up.weight"])
        assert plan == "raw()" if step < 5 else plan.startswith("ef(minmax(bits=2")
        if step + 1 == stop:
            buffer = io.BytesIO()
            torch.save([model.state_dict(), optimizer.state_dict(), wire.state_dict()], buffer)
            buffer.seek(0)
            states = torch.load(buffer, weights_only=False)
            model, optimizer, wire = fresh()
            for part, state in zip((model, optimizer, wire), states, strict=True):
                part.load_state_dict(state)
    assert max(sent[6:]) < 0.8 * min(sent[:5])
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
    return losses, whole(model)


@on_ranks(2)
def test_gradients_are_sent_compressed_after_the_warm_up_and_a_run_goes_on_from_its_checkpoint(rank: int) -> None:
    assert alike(_trained(rank, None), _trained(rank, 12))
