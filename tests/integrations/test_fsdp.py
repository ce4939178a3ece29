"""FSDP2 with quantised weights and gradients: that it trains, in every setting that FSDP2 has."""

from __future__ import annotations

import os
import time
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

import thinwire
from harness import run_ranks
from sharded import Net, batch, build, compress, same, train, whole
from thinwire.integrations.fsdp import QuantisedAllGather
from thinwire_tools import lab
from thinwire_tools.bench.ranks import run_ranks as run_module

W8G8 = "minmax(bits=8, bucket=1024)"


def _raw_is_stock(rank: int, size: int, options: dict[str, Any], steps: int) -> dict[str, Any]:
    stock, ours = build(**options), build(**options)
    compress(ours)
    thinwire.prefetch(ours)
    before, after = train(stock, steps), train(ours, steps)
    return {"before": before, "after": after, "stock": whole(stock), "ours": whole(ours)}


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=["reshard", "keep"])
def test_raw_messages_train_as_stock_fsdp_does(num_ranks: int, options: dict[str, Any]) -> None:
    for answer in run_ranks(_raw_is_stock, num_ranks, num_ranks, options, 4):
        torch.testing.assert_close(answer["after"], answer["before"], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(answer["ours"], answer["stock"], rtol=1e-5, atol=1e-6)


def _policies(rank: int, size: int, policy: dict[str, torch.dtype]) -> dict[str, Any]:
    made = MixedPrecisionPolicy(**policy)
    stock, raw, coded = (build(mp_policy=made) for _ in range(3))
    compress(raw)
    wire = compress(coded, W8G8, W8G8)
    losses = [train(model, 12) for model in (stock, raw, coded)]
    return {"losses": losses, "whole": whole(coded), "overlapped": wire.stats.overlapped, "sent": wire.stats.ratio}


@pytest.mark.parametrize(
    ("param_dtype", "reduce_dtype"),
    [(None, None), ("bfloat16", "float32"), ("bfloat16", "bfloat16"), (None, "float16"), ("float16", "float16")],
)
def test_mixed_precision_policies(param_dtype: str | None, reduce_dtype: str | None) -> None:
    given = {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype}
    policy = {key: getattr(torch, name) for key, name in given.items() if name}
    answers = run_ranks(_policies, 2, 2, policy)
    for answer in answers:
        stock, raw, coded = answer["losses"]
        assert raw[-1] == pytest.approx(stock[-1], rel=0.01)
        assert coded[-1] == pytest.approx(stock[-1], rel=0.05)
        assert answer["sent"] > 1.2
        # A gradient that is cast, or divided later, is read at once.
        assert (answer["overlapped"] > 0) == (reduce_dtype in (None, "float32"))
    assert same([answer["whole"] for answer in answers])


def _same_weights(rank: int, size: int, specs: dict[str, str], options: dict[str, Any]) -> list[dict[str, Any]]:
    """What every rank computes with, in forward and in backward, by step."""
    model = build()
    compress(model, **specs, **options)
    seen: list[dict[str, Any]] = []
    now: dict[str, Any] = {}
    original = QuantisedAllGather.__call__

    def gather(self: Any, output_tensor: torch.Tensor, **rest: Any) -> Any:
        work = original(self, output_tensor, **rest)
        work.wait()
        layer = self.attached.unit.name
        now[f"{layer} {sum(key.startswith(layer + ' ') for key in now)}"] = output_tensor.clone()
        return work

    QuantisedAllGather.__call__ = gather  # type: ignore[method-assign] # pyright: ignore[reportAttributeAccessIssue]
    for step in range(4):
        train(model, 1, first=step)
        seen.append(dict(now))
        now.clear()
    return seen


@pytest.mark.parametrize("options", [{}, {"master": False}], ids=["master", "quantised"])
@pytest.mark.parametrize("spec", ["minmax(bits=4, bucket=64)", "lattice(bits=4, bucket=64)", "qsgd(bits=4, bucket=64)"])
def test_all_ranks_compute_with_the_same_weights_in_forward_and_backward(spec: str, options: dict[str, Any]) -> None:
    answers = run_ranks(_same_weights, 3, 3, {"weights": spec, "gradients": W8G8}, options)
    for step in range(4):
        assert same([answer[step] for answer in answers]), "ranks differ"
        of = answers[0][step]
        for name in ("blocks.0", "blocks.1"):
            assert torch.equal(of[f"{name} 0"], of[f"{name} 1"]), "backward differs from forward"
        if step:
            assert not torch.equal(of["blocks.0 0"], answers[0][step - 1]["blocks.0 0"])


def _keeps_quantised(rank: int, size: int) -> dict[str, Any]:
    model = build(reshard_after_forward=True)
    compress(model, "minmax(bits=3, bucket=64)", "raw", master=False)
    x, y = batch(0, rank)
    (model(x) - y).square().mean().backward()
    name, parameter = "blocks.0.up.weight", model.blocks[0].up.weight
    local = parameter.to_local().detach().reshape(-1)
    levels = [len(part.unique()) for part in local.split(64)]
    before = whole(model)[name]
    train(model, 20, first=1)
    return {"levels": max(levels), "changed": float((whole(model)[name] - before).abs().max()), "whole": whole(model)}


def test_without_masters_the_weights_are_what_was_sent() -> None:
    answers = run_ranks(_keeps_quantised, 2, 2)
    assert all(answer["levels"] <= 8 for answer in answers)
    assert all(answer["changed"] > 1e-3 for answer in answers)
    assert same([answer["whole"] for answer in answers])


def _accumulates(rank: int, size: int, specs: dict[str, str]) -> dict[str, Any]:
    stock, ours = build(), build()
    wire = compress(ours, **specs)
    before, after = (train(model, 5, accumulate=3) for model in (stock, ours))
    stats = wire.stats
    return {"before": before, "after": after, "counts": (stats.steps, stats.reductions, stats.gathers)}


def test_gradient_accumulation() -> None:
    for answer in run_ranks(_accumulates, 2, 2, {"weights": "raw", "gradients": "raw"}):
        torch.testing.assert_close(answer["after"], answer["before"], rtol=1e-5, atol=1e-6)
        # Two blocks and the root; three micro-batches, in which the blocks are gathered twice, the root once.
        assert answer["counts"] == (5, 15, 5 * 3 * (2 + 2 + 1))
    for answer in run_ranks(_accumulates, 2, 2, {"weights": W8G8, "gradients": W8G8}):
        assert answer["after"][-1] == pytest.approx(answer["before"][-1], rel=0.05)


def _accumulates_shards(rank: int, size: int) -> Any:
    """Micro-batches that are reduced one by one: gradients are added to those that are there."""
    models = [build(), build()]
    wire = compress(models[1])
    grads = []
    for model in models:
        for part in range(3):
            x, y = batch(part, rank)
            (model(x) - y).square().mean().backward()
        grads.append([p.grad.full_tensor() for p in model.parameters()])
    return grads, wire.stats.overlapped


def test_gradients_are_added_to_those_that_are_there() -> None:
    for (before, after), overlapped in run_ranks(_accumulates_shards, 2, 2):
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)
        assert overlapped == 3


def _divided(rank: int, size: int, how: str) -> Any:
    grads = []
    for ours in (False, True):
        model = build()
        if how == "factor":
            model.set_gradient_divide_factor(1.0)
            for block in model.blocks:
                block.set_gradient_divide_factor(8.0)
        else:
            for module in (model, *model.blocks):
                module.set_force_sum_reduction_for_comms(True)
        if ours:
            compress(model)
        elif how == "factor":
            # gloo has no PREMUL_SUM: what stock FSDP2 would do with it.
            for module, factor in ((model, 1.0), *((block, 8.0) for block in model.blocks)):
                module.set_gradient_divide_factor(float(size))
                module.factor = size / factor
        x, y = batch(0, rank)
        (model(x) - y).square().mean().backward()
        if how == "factor" and not ours:
            for module in (*model.blocks, model):
                for parameter in module.parameters():
                    if not getattr(parameter, "seen", False):
                        parameter.seen = True
                        parameter.grad.mul_(module.factor)
        grads.append([p.grad.full_tensor() for p in model.parameters()])
    return grads


@pytest.mark.parametrize("how", ["factor", "sum"])
def test_gradient_divide_factors(how: str) -> None:
    for before, after in run_ranks(_divided, 2, 2, how):
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)


def _tied_and_frozen(rank: int, size: int) -> dict[str, Any]:
    models = []
    for _ in range(2):
        model = build(net=lambda: Net(tied=True, spare=True))
        model.blocks[1].up.weight.requires_grad_(False)
        models.append(model)
    stock, ours = models
    stock.blocks[0].set_reduce_scatter_unused_params(True)
    wire = compress(ours)
    frozen = whole(ours)["blocks.1.up.weight"]
    losses = [train(model, 4, optimizer=torch.optim.SGD(model.parameters(), lr=0.01)) for model in models]
    kept = torch.equal(whole(ours)["blocks.1.up.weight"], frozen)
    for model in models:
        model.blocks[1].up.weight.requires_grad_(True)
    for found, model in zip(losses, models, strict=True):
        found += train(model, 4, first=4, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
    names = [name for name in wire.plan if name.startswith("weights/")]
    return {"losses": losses, "kept": kept, "names": names, "whole": whole(ours), "stock": whole(stock)}


def test_tied_frozen_thawed_and_unused_parameters() -> None:
    answers = run_ranks(_tied_and_frozen, 2, 2)
    for answer in answers:
        stock, ours = answer["losses"]
        torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(answer["whole"], answer["stock"], rtol=1e-5, atol=1e-6)
        assert answer["kept"]
        assert answer["names"].count("weights/head.weight") == 1
        assert "weights/tail.weight" not in answer["names"]


def _other_dimension(rank: int, size: int, spec: str) -> dict[str, Any]:
    def place(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % 2 == 0 else None

    models = [build(net=lambda: Net(width=36), shard_placement_fn=place) for _ in range(2)]
    compress(models[1], spec, spec)
    losses = [train(model, 8) for model in models]
    dims = {p.placements[0].dim for p in models[1].parameters()}
    return {"losses": losses, "dims": dims, "whole": whole(models[1]), "stock": whole(models[0])}


def test_shards_of_another_dimension() -> None:
    for answer in run_ranks(_other_dimension, 2, 2, "raw"):
        assert answer["dims"] == {0, 1}
        torch.testing.assert_close(answer["whole"], answer["stock"], rtol=1e-5, atol=1e-6)
    for answer in run_ranks(_other_dimension, 2, 2, W8G8):
        assert answer["losses"][1][-1] == pytest.approx(answer["losses"][0][-1], rel=0.05)


def _secondary(rank: int, size: int, spec: str) -> dict[str, Any]:
    models = [build(), build(reshard_after_forward=2)]
    wires = [compress(model, spec, spec) for model in models]
    losses = [train(model, 4) for model in models]
    counts = [(wire.stats.gathers, wire.stats.local_gathers) for wire in wires]
    return {"losses": losses, "whole": [whole(model) for model in models], "counts": counts}


@pytest.mark.parametrize("spec", ["raw", W8G8])
def test_a_secondary_shard_inside_the_node_keeps_backward_local(spec: str) -> None:
    for answer in run_ranks(_secondary, 4, 4, spec):
        # Bit for bit what backward would have gathered from all ranks.
        assert answer["losses"][0] == answer["losses"][1]
        assert same(answer["whole"])
        (all_of_them, none), (fewer, local) = answer["counts"]
        assert none == 0
        assert local > 0
        # Four steps and three units, the root among them: forward from all ranks, backward from two.
        assert (fewer, local) == (12, 12)
        assert all_of_them == 4 * (2 + 2 + 1)


def _hsdp(rank: int, size: int, kind: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    stock = build(mesh)
    if kind == "native":
        ours = build(mesh)
        wire = compress(ours, W8G8, W8G8)
    else:
        ours = build(mesh["shard"])
        specs = {"inside": ("raw", "raw"), "both": (W8G8, W8G8)}[kind]
        wire = compress(ours, *specs, replicas=mesh["replicate"].get_group(), across="minmax(bits=8, bucket=128)")
    losses = [train(model, 10) for model in (stock, ours)]
    return {"losses": losses, "whole": whole(ours), "overlapped": wire.stats.overlapped, "plan": list(wire.plan)}


@pytest.mark.parametrize("kind", ["native", "inside", "both"])
def test_hsdp(kind: str) -> None:
    answers = run_ranks(_hsdp, 4, 4, kind)
    assert same([answer["whole"] for answer in answers]), "replicas differ"
    for answer in answers:
        assert answer["losses"][1][-1] == pytest.approx(answer["losses"][0][-1], rel=0.05)
        assert answer["overlapped"] == 0
        assert ("across/stem.weight" in answer["plan"]) == (kind != "native")


def _across_nodes(rank: int, size: int, algorithm: str) -> dict[str, Any]:
    os.environ["THINWIRE_NODE"] = f"node {rank // 2}"
    model = build()
    wire = compress(model, W8G8, W8G8, network=thinwire.Network(algorithm=algorithm, transport="group"))
    losses = train(model, 10)
    return {"losses": losses, "whole": whole(model), "sent": wire.stats.payload_sent_bytes}


@pytest.mark.parametrize("algorithm", ["hierarchical(inside=dense)", "hierarchical(inside=same)", "ring", "tree"])
def test_algorithms(algorithm: str) -> None:
    answers = run_ranks(_across_nodes, 4, 4, algorithm)
    assert same([answer["whole"] for answer in answers])
    for answer, losses in zip(answers, _flat_losses(), strict=True):
        assert answer["losses"][-1] == pytest.approx(losses[-1], rel=0.1)


@cache
def _flat_losses() -> list[list[float]]:
    return [answer["losses"] for answer in run_ranks(_across_nodes, 4, 4, "sra")]


def _bytes(rank: int, size: int) -> tuple[int, int]:
    model = build(reshard_after_forward=False)
    wire = compress(model, W8G8, "minmax(bits=4, bucket=128)")
    train(model, 3)
    return wire.stats.payload_sent_bytes, 3 * (wire.gather_bytes() + wire.reduce_bytes())


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_bytes_are_those_of_the_formula(num_ranks: int) -> None:
    for sent, foreseen in run_ranks(_bytes, num_ranks, num_ranks):
        assert sent == foreseen


@pytest.mark.alone
@pytest.mark.network
@pytest.mark.skipif(lab.unavailable() is not None, reason=str(lab.unavailable()))
@pytest.mark.parametrize(("weights", "gradients"), [(W8G8, W8G8), (W8G8, "minmax(bits=4, bucket=128)"), ("raw", "raw")])
def test_bytes_on_the_interface_are_those_of_the_formula(weights: str, gradients: str) -> None:
    """By the kernel's counters of each node's interface, of which nothing that is sent can escape."""
    config = {"weights": weights, "gradients": gradients}
    counted = [0]
    with lab.Network(2) as network:
        for steps in (2, 12):
            by_formula = run_module("fsdp_link_training", {"steps": steps, **config}, 2, network)
            counted.append(sum(network.interface_bytes(rank)[0] for rank in range(2)))
    first, second = counted[1] - counted[0], counted[2] - counted[1]
    # What both runs do before they train, and after, cancels out. Full packets are 1514 bytes for 1448 of a message.
    assert (second - first) * 1448 / 1514 == pytest.approx(10 * by_formula, rel=0.03)


def _compiled(rank: int, size: int) -> dict[str, Any]:
    models = [build(), build()]
    for model in models:
        compress(model, W8G8, W8G8)
    eager = train(models[0], 3)
    compiled = train(torch.compile(models[1], backend="aot_eager"), 3)  # pyright: ignore[reportArgumentType]
    return {"eager": eager, "compiled": compiled}


def test_torch_compile() -> None:
    for answer in run_ranks(_compiled, 2, 2, timeout_s=120.0):
        torch.testing.assert_close(answer["compiled"], answer["eager"], rtol=1e-4, atol=1e-5)


def _read_at_once(rank: int, size: int) -> Any:
    """An optimizer inside backward reads each gradient as soon as it is there."""
    found = []
    for ours in (False, True):
        model = build()
        optimizers = {p: torch.optim.SGD([p], lr=0.05) for p in model.parameters()}

        def step(parameter: torch.Tensor, optimizers: Any = optimizers) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        wire = compress(model) if ours else None
        for i in range(4):
            x, y = batch(i, rank)
            (model(x) - y).square().mean().backward()
        found.append(whole(model))
    assert wire is not None
    return found, wire.stats.overlapped


def test_gradients_that_a_hook_reads_are_waited_for() -> None:
    for (before, after), overlapped in run_ranks(_read_at_once, 2, 2):
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)
        assert overlapped == 0


def _detaches(rank: int, size: int) -> dict[str, Any]:
    stock, ours = build(), build()
    wire = compress(ours)
    losses = [train(model, 3) for model in (stock, ours)]
    wire.detach()
    losses = [a + train(model, 3, first=3) for a, model in zip(losses, (stock, ours), strict=True)]
    again = compress(ours, W8G8, W8G8)
    more = train(ours, 2, first=6)
    return {"losses": losses, "more": more, "steps": (wire.stats.steps, again.stats.steps), "rank": dist.get_rank()}


def test_detaching_leaves_stock_fsdp_and_compressing_again_works() -> None:
    for answer in run_ranks(_detaches, 2, 2):
        torch.testing.assert_close(answer["losses"][1], answer["losses"][0], rtol=1e-5, atol=1e-6)
        assert answer["steps"] == (3, 2)
        assert answer["more"][-1] < answer["losses"][0][0]


def _threads(rank: int, size: int) -> list[int]:
    counts = []
    for _ in range(4):
        model = build()
        wire = compress(model, W8G8, W8G8)
        train(model, 1)
        wire.detach()
        counts.append(_num_threads())
    # A thread that has been joined may still be in the list for a moment.
    end = time.monotonic() + 20.0
    while counts[-1] > counts[0] and time.monotonic() < end:
        time.sleep(0.05)
        counts[-1] = _num_threads()
    return counts


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted by Linux's /proc")
def test_detaching_ends_the_threads_and_connections_of_a_wire() -> None:
    for counts in run_ranks(_threads, 2, 2):
        assert counts[-1] <= counts[0] + 1  # three more models have come and gone
