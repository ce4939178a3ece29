"""FSDP2 with quantized weights and gradients: that it trains, in every setting that FSDP2 has."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import thinwire
from fsdp_link_training import measure
from gathers import gathered
from harness import on_ranks
from ranks import alike, assert_alike
from sharded import Net, Shared, batch, build, compress, train, whole
from thinwire.compat import fill_unused
from thinwire_tools import lab
from thinwire_tools.ranks import run_ranks

W8G8 = "minmax(bits=8, bucket=1024)"
COARSE = "ef(minmax(bits=2, bucket=128))"


@pytest.mark.parametrize("size", [1, 3])
@on_ranks()
def test_raw_messages_train_as_stock_fsdp_does(rank: int, size: int) -> None:
    for keep in (False, True):
        stock, ours = build(reshard_after_forward=not keep), build(reshard_after_forward=not keep)
        compress(ours)
        thinwire.prefetch(ours)
        before, after = train(stock, 4), train(ours, 4)
        torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(whole(ours), whole(stock), rtol=1e-5, atol=1e-6)


POLICIES = [
    MixedPrecisionPolicy(),
    MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16),
    MixedPrecisionPolicy(None, torch.float16),
    MixedPrecisionPolicy(torch.float16, torch.float16),
]


@on_ranks(2)
def test_mixed_precision_policies(rank: int, size: int) -> None:
    for policy in POLICIES:
        stock, raw, coded = (build(mp_policy=policy) for _ in range(3))
        compress(raw)
        wire = compress(coded, W8G8, W8G8)
        exact, of_raw, of_coded = (train(model, 4)[-1] for model in (stock, raw, coded))
        assert of_raw == pytest.approx(exact, rel=0.01), policy
        assert of_coded == pytest.approx(exact, rel=0.05), policy
        assert wire.stats.ratio > 1.2
        # A gradient that is cast, or divided later, is read at once.
        assert (wire.stats.overlapped > 0) == (policy.reduce_dtype in (None, torch.float32)), policy
        assert_alike(whole(coded))


@on_ranks(3)
def test_all_ranks_compute_with_the_same_weights_in_forward_and_backward(rank: int, size: int) -> None:
    for net, (weights, options) in itertools.product((Net, Shared), WEIGHTS):
        model, before = build(net=net), {}
        wire = compress(model, weights, COARSE if net is Shared else W8G8, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
        with gathered() as seen:
            for step in range(3):
                train(model, 1, first=step, optimizer=optimizer)
                assert_alike(seen)
                for name in ("blocks.0", "blocks.1"):
                    first, *more = seen[name]
                    assert more
                    assert all(torch.equal(first, other) for other in more), f"backward differs: {weights}"
                assert not step or not torch.equal(seen["blocks.0"][0], before["blocks.0"][0])
                before = dict(seen)
                seen.clear()
        assert wire.step == 2
        wire.detach()


WEIGHTS: list[tuple[str, dict[str, Any]]] = [
    ("minmax(bits=4, bucket=64)", {}),
    ("lattice(bits=4, bucket=64)", {}),
    ("qsgd(bits=4, bucket=64)", {}),
    ("qsgd(bits=4, bucket=64)", {"master": False}),
]


@on_ranks(2)
def test_without_masters_the_weights_are_what_was_sent(rank: int, size: int) -> None:
    model = build(reshard_after_forward=True)
    compress(model, "minmax(bits=3, bucket=64)", "raw", master=False)
    x, y = batch(0, rank)
    (model(x) - y).square().mean().backward()
    name, parameter = "blocks.0.up.weight", model.blocks[0].up.weight
    local = parameter.to_local().detach().reshape(-1)
    assert all(len(part.unique()) <= 8 for part in local.split(64))
    before = whole(model)[name]
    train(model, 5, first=1)
    assert float((whole(model)[name] - before).abs().max()) > 1e-3
    assert_alike(whole(model))


Pair = tuple[Any, Any]
"""What FSDP2 alone makes, and what it makes with raw messages of ours."""


def _accumulates(rank: int, size: int) -> Pair:
    stock, raw, coded = build(), build(), build()
    wire = compress(raw)
    compress(coded, W8G8, W8G8)
    before, after, losses = (train(model, 4, accumulate=3) for model in (stock, raw, coded))
    assert losses[-1] == pytest.approx(before[-1], rel=0.05)
    # Two blocks and the root; three micro-batches, in which the blocks are gathered twice, the root once.
    stats = wire.stats
    assert (stats.steps, stats.reductions, stats.gathers) == (4, 12, 4 * 3 * (2 + 2 + 1))
    return before, after


def _accumulates_shards(rank: int, size: int) -> Pair:
    """Micro-batches that are reduced one by one: gradients are added to those that are there."""
    stock, ours = build(), build()
    wire = compress(ours)
    for model in (stock, ours):
        for part in range(3):
            x, y = batch(part, rank)
            (model(x) - y).square().mean().backward()
    assert wire.stats.overlapped == 3
    return _grads(stock), _grads(ours)


def _grads(model: Any) -> list[torch.Tensor]:
    return [p.grad.full_tensor() for p in model.parameters()]


def _divided_by_factors(rank: int, size: int) -> Pair:
    stock, ours = build(), build()
    x, y = batch(0, rank)
    for model in (stock, ours):
        for module, factor in ((model, 1.0), *((block, 8.0) for block in model.blocks)):
            # gloo has no PREMUL_SUM: what stock FSDP2 would do with it.
            module.set_gradient_divide_factor(factor if model is ours else float(size))
            module.factor = size / factor
    compress(ours)
    for model in (stock, ours):
        (model(x) - y).square().mean().backward()
    for name, parameter in stock.named_parameters():
        parameter.grad.mul_(stock.blocks[0].factor if name.startswith("blocks") else stock.factor)
    return _grads(stock), _grads(ours)


def _summed(rank: int, size: int) -> Pair:
    stock, ours = build(), build()
    x, y = batch(0, rank)
    compress(ours)
    for model in (stock, ours):
        for module in (model, *model.blocks):
            module.set_force_sum_reduction_for_comms(True)
        (model(x) - y).square().mean().backward()
    return _grads(stock), _grads(ours)


def _tied_and_frozen(rank: int, size: int) -> Pair:
    stock, ours = (build(net=lambda: Net(tied=True, spare=True)) for _ in range(2))
    for model in (stock, ours):
        model.blocks[1].up.weight.requires_grad_(False)
    fill_unused(stock.blocks[0], True)
    wire = compress(ours)
    names = [name for name in wire.plan if name.startswith("weights/")]
    assert names.count("weights/head.weight") == 1
    assert "weights/tail.weight" not in names
    frozen = whole(ours)["blocks.1.up.weight"]
    optimizers = {model: torch.optim.SGD(model.parameters(), lr=0.01) for model in (stock, ours)}
    losses = [train(model, 4, optimizer=optimizer) for model, optimizer in optimizers.items()]
    assert torch.equal(whole(ours)["blocks.1.up.weight"], frozen)
    for found, (model, optimizer) in zip(losses, optimizers.items(), strict=True):
        model.blocks[1].up.weight.requires_grad_(True)
        found += train(model, 4, first=4, optimizer=optimizer)
    return (losses[0], whole(stock)), (losses[1], whole(ours))


def _sharded_together(rank: int, size: int) -> Pair:
    """Modules that were sharded together have one buffer."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 7))
        mesh = init_device_mesh("cpu", (size,))
        fully_shard([model[0], model[2]], mesh=mesh)
        models.append(fully_shard(model, mesh=mesh))
    wire = compress(models[1])
    before, after = (train(model, 4) for model in models)
    assert wire.stats.gathers == 8
    return before, after


def _read_at_once(rank: int, size: int) -> Pair:
    """An optimizer inside backward reads each gradient as soon as it is there."""
    stock, ours = build(), build()
    for model in (stock, ours):
        optimizers = {p: torch.optim.SGD([p], lr=0.05) for p in model.parameters()}

        def step(parameter: torch.Tensor, optimizers: Any = optimizers) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
    wire = compress(ours)
    for model in (stock, ours):
        for i in range(4):
            x, y = batch(i, rank)
            (model(x) - y).square().mean().backward()
    assert wire.stats.overlapped == 0
    return whole(stock), whole(ours)


LIKE_STOCK = [_accumulates, _accumulates_shards, _divided_by_factors, _summed, _tied_and_frozen]
LIKE_STOCK += [_sharded_together, _read_at_once]


@on_ranks(2)
def test_raw_messages_change_nothing_in_settings_of_fsdp(rank: int, size: int) -> None:
    for run in LIKE_STOCK:
        before, after = run(rank, size)
        name = run.__name__
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@on_ranks(4)
def test_a_secondary_shard_inside_the_node_keeps_backward_local(rank: int, size: int) -> None:
    for spec in ("raw", W8G8):
        models = [build(), build(reshard_after_forward=2)]
        wires = [compress(model, spec, spec) for model in models]
        first, second = (train(model, 2) for model in models)
        # Bit for bit what backward would have gathered from all ranks.
        assert first == second
        assert alike(*map(whole, models))
        # Two steps and three units, the root among them: forward from all ranks, backward from two.
        counts = [(wire.stats.gathers, wire.stats.local_gathers) for wire in wires]
        assert counts == [(2 * (2 + 2 + 1), 0), (6, 6)]


ALGORITHMS = ["sra", "hierarchical(inside=dense)", "hierarchical(inside=same)", "ring", "tree"]


@on_ranks(4)
def test_algorithms(rank: int, size: int) -> None:
    os.environ["THINWIRE_NODE"] = f"node {rank // 2}"
    flat = None
    for algorithm in ALGORITHMS:
        model = build()
        wire = compress(model, W8G8, W8G8, network=thinwire.Network(algorithm=algorithm, transport="group"))
        loss = train(model, 3)[-1]
        flat = flat or loss
        assert loss == pytest.approx(flat, rel=0.1), algorithm
        assert_alike(whole(model))
        wire.detach()


@pytest.mark.alone
@pytest.mark.network
@pytest.mark.skipif(lab.unavailable() is not None, reason=str(lab.unavailable()))
def test_bytes_on_the_interface_are_those_of_the_formula() -> None:
    """By the kernel's counters of each node's interface, of which nothing that is sent can escape."""
    config = {"weights": W8G8, "gradients": "minmax(bits=4, bucket=128)"}
    counted = [0]
    with lab.Network(2) as network:
        for steps in (2, 12):
            by_formula = run_ranks(measure, {"steps": steps, **config}, 2, network)
            counted.append(sum(network.interface_bytes(rank)[0] for rank in range(2)))
    first, second = counted[1] - counted[0], counted[2] - counted[1]
    # What both runs do before they train, and after, cancels out. Full packets are 1514 bytes for 1448 of a message.
    assert (second - first) * 1448 / 1514 == pytest.approx(10 * by_formula, rel=0.03)
