"""CompressedAdamW on a model under FSDP2: the same steps as under DDP, checkpoints, what is refused."""

from __future__ import annotations

import io
import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import thinwire
from harness import run_ranks
from sharded import Net, batch, build, compress, same, train, whole
from thinwire.optim import CompressedAdamW

TWO_BITS = "gaussian(bits=2)"
ORDERS = ("pre", "update")


def _optimizer(model: nn.Module, order: Any, **options: Any) -> CompressedAdamW:
    return CompressedAdamW(model.parameters(), **({"lr": 5e-3, "betas": (0.9, 0.95), "order": order} | options))


def _as_under_ddp(rank: int, size: int, order: Any, shape: tuple[int, ...], clip: float | None) -> float:
    """How far sharded weights are from DDP's after steps whose messages are exact."""
    names = ("replicate", "shard")[-len(shape) :]
    sharded = build(init_device_mesh("cpu", shape, mesh_dim_names=names))
    optimizer = _optimizer(sharded, order, clip=clip)
    compress(sharded, optimizer=optimizer)
    train(sharded, 6, optimizer=optimizer)
    torch.manual_seed(0)
    net = Net()
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.2)
    replica = DistributedDataParallel(net)
    optimizer = _optimizer(net, order, clip=clip)
    thinwire.compress(replica, "raw", optimizer=optimizer)
    train(replica, 6, optimizer=optimizer)
    held = whole(sharded)
    return max(float((held[name] - p.detach()).abs().max()) for name, p in net.named_parameters())


@pytest.mark.parametrize(
    ("order", "shape", "clip"), [("pre", (2,), 0.2), ("update", (2,), None), ("pre", (2, 2), None)]
)
def test_steps_are_those_of_ddp(order: str, shape: tuple[int, ...], clip: float | None) -> None:
    size = math.prod(shape)
    assert all(far < 2e-5 for far in run_ranks(_as_under_ddp, size, size, order, shape, clip))


def _trained(rank: int, size: int, order: Any, stop: int | None) -> dict[str, Any]:
    def fresh() -> tuple[Any, ...]:
        model = build()
        optimizer = _optimizer(model, order)
        return model, optimizer, compress(model, "raw", TWO_BITS, optimizer=optimizer)

    model, optimizer, wire = fresh()
    losses: list[float] = []
    for step in range(12):
        losses += train(model, 1, first=step, optimizer=optimizer)
        if step + 1 == stop:
            buffer = io.BytesIO()
            torch.save([model.state_dict(), optimizer.state_dict(), wire.gather_state_dict()], buffer)
            buffer.seek(0)
            states = torch.load(buffer, weights_only=False)
            model, optimizer, wire = fresh()
            for part, of in zip((model, optimizer, wire), states, strict=True):
                part.load_state_dict(of)
    specs = {str(c) for name, c in wire.plan.layers.items() if name.startswith("gradients/")}
    return {"losses": losses, "weights": whole(model), "specs": specs}


def _goes_on(rank: int, size: int, order: str) -> list[dict[str, Any]]:
    return [_trained(rank, size, order, stop) for stop in (None, 7)]


@pytest.mark.parametrize("order", ORDERS)
def test_two_bits_train_and_a_run_goes_on_from_its_checkpoint(order: str) -> None:
    for answer, again in run_ranks(_goes_on, 2, 2, order):
        assert any(spec.startswith("ef(gaussian(bits=2") for spec in answer["specs"])
        assert sum(answer["losses"][-3:]) < 0.8 * sum(answer["losses"][:3])
        assert answer["losses"] == again["losses"]
        assert all(torch.equal(value, again["weights"][name]) for name, value in answer["weights"].items())


def _saved(rank: int, size: int) -> tuple[dict[str, Tensor], dict[str, Tensor], set[str]]:
    model = build()
    optimizer = _optimizer(model, "pre")
    wire = compress(model, "raw", TWO_BITS, optimizer=optimizer)
    train(model, 3, optimizer=optimizer)
    moments = {name: optimizer.local_state(p)["exp_avg_sq"] for name, p in model.named_parameters()}
    return wire.gather_state_dict(), moments, set(wire.state_dict_of(size))


def _loaded(rank: int, size: int, state: dict[str, Tensor]) -> dict[str, Tensor]:
    model = build()
    optimizer = _optimizer(model, "pre")
    compress(model, "raw", TWO_BITS, optimizer=optimizer).load_state_dict(state)
    return {name: optimizer.local_state(p)["exp_avg_sq"] for name, p in model.named_parameters()}


def test_another_world_starts_with_the_mean_moments() -> None:
    answers = run_ranks(_saved, 2, 2)
    state, template = answers[0][0], answers[0][2]
    assert set(state) == template
    for moments in run_ranks(_loaded, 3, 3, state):
        for name, found in moments.items():
            torch.testing.assert_close(found, torch.stack([of[name] for _, of, _ in answers]).mean(0))


def _detached(rank: int, size: int) -> dict[str, Tensor]:
    model = build()
    optimizer = _optimizer(model, "pre")
    wire = compress(model, "raw", TWO_BITS, optimizer=optimizer)
    train(model, 3, optimizer=optimizer)
    whole_moments = [optimizer.state[p]["exp_avg_sq"] for p in model.parameters()]
    assert all(m.shape == p.shape for m, p in zip(whole_moments, model.parameters(), strict=True))
    mean = [m.clone() for m in whole_moments]
    for m in mean:
        dist.all_reduce(m)
    wire.detach()
    before = whole(model)
    train(model, 1, first=3, optimizer=optimizer)
    moved = max(float((after - before[name]).abs().max()) for name, after in whole(model).items())
    assert 0 < moved < 20 * 5e-3  # a gradient taken for an update would have been a step of its own length
    for parameter, expected in zip(model.parameters(), mean, strict=True):
        found = optimizer.state[parameter]["exp_avg_sq"]
        assert found.to_local().numel() < parameter.numel()  # each rank keeps those of its shard alone
        assert bool((found.full_tensor() >= 0.95 * expected / size - 1e-12).all())
    return whole(model)


def test_after_detach_the_optimizer_gets_gradients_again() -> None:
    assert same(run_ranks(_detached, 2, 2))


def _skipped(rank: int, size: int) -> None:
    """Infinite gradients on one rank of a step that is not taken: nothing is left of them."""
    found = []
    for spoil in (True, False):
        model = build()
        optimizer = _optimizer(model, "pre")
        compress(model, "raw", TWO_BITS, optimizer=optimizer)
        train(model, 3, optimizer=optimizer)
        if spoil:
            x, y = batch(3, rank)
            ((model(x) - y).square().mean() * (float("inf") if rank else 1.0)).backward()
            optimizer.zero_grad()
        train(model, 1, first=4, optimizer=optimizer)
        assert all(bool(torch.isfinite(value).all()) for value in whole(model).values())
        found.append([optimizer.local_state(p)["exp_avg_sq"] for p in model.parameters()])
    for spoilt, clean in zip(*found, strict=True):
        torch.testing.assert_close(spoilt, clean, rtol=0.5, atol=1e-4)


def test_a_step_with_infinite_gradients_leaves_no_trace() -> None:
    run_ranks(_skipped, 2, 2)


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(7, 7)])
        self.head = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        (block,) = self.blocks
        return self.head(block(torch.tanh(block(x))))


def _refused(rank: int, size: int) -> dict[str, str]:
    """Gradients of which no mean is taken, an optimizer that lacks a parameter, feedback under another optimizer."""
    texts = {}
    for how in ("twice", "divided"):
        model = build(net=_Twice) if how == "twice" else build()
        optimizer = _optimizer(model, "pre")
        compress(model, optimizer=optimizer)
        for module in model.modules():
            if how == "divided" and hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(3.0)
        with pytest.raises((NotImplementedError, RuntimeError)) as error:
            train(model, 2, optimizer=optimizer)
        texts[how] = str(error.value)
    model = build()
    with pytest.raises(ValueError) as error:
        compress(model, "raw", TWO_BITS, optimizer=CompressedAdamW(itertools.islice(model.parameters(), 2)))
    with pytest.warns(UserWarning, match="CompressedAdamW"):
        compress(model, "raw", "ef(onebit)", optimizer=torch.optim.AdamW(model.parameters()))
    return {**texts, "lacking": str(error.value)}


def test_what_it_cannot_train_is_refused() -> None:
    for texts in run_ranks(_refused, 2, 2):
        assert "set_gradient_divide_factor" in texts["divided"]
        assert "reduced twice" in texts["twice"]
        assert "CompressedAdamW lacks" in texts["lacking"]


def test_a_sharded_model_without_compression_is_trained_as_a_whole_one() -> None:
    assert all(far < 2e-5 for far in run_ranks(_uncompressed, 2, 2))


def _uncompressed(rank: int, size: int) -> float:
    """Moments are then those of shards, of the mean gradient."""
    torch.manual_seed(0)
    single = Net()
    for parameter in single.parameters():
        nn.init.normal_(parameter, std=0.2)
    sharded = build()
    optimizers = _optimizer(sharded, "pre", clip=0.2), _optimizer(single, "pre", clip=0.2)
    for _ in range(5):
        for model, optimizer, ranks in ((sharded, optimizers[0], [rank]), (single, optimizers[1], range(size))):
            optimizer.zero_grad()
            for each in ranks:
                x, y = batch(0, each)
                ((model(x) - y).square().mean() / len(ranks)).backward()
            optimizer.step()
    held = whole(sharded)
    return max(float((held[name] - p.detach()).abs().max()) for name, p in single.named_parameters())
