"""Sums of activations over ranks, compressed before and after they are added, and the layers that they are of."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import thinwire
from harness import on_ranks, run_threads
from ranks import of_ranks
from thinwire.collectives import MessageError
from thinwire.compressors import parse
from thinwire.pipeline.stats import PipelineStats
from thinwire.pipeline.tensor_parallel import SampleSum

BITS_4 = "maxabs(bits=4)"
WIDTH, HIDDEN, LENGTH, BATCH, SAMPLES = 16, 32, 4, 4, 12


def values(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sample_sum(transport: Any, spec: str, store: thinwire.store.Memory | None = None) -> SampleSum:
    store = store or thinwire.store.Memory()
    return SampleSum(transport, parse(spec), store, name="layer0", seed=3, stats=PipelineStats())


def sums(function: Callable[[SampleSum, int], Any], num_ranks: int, spec: str, **options: Any) -> list[Any]:
    """``function(sum, rank)`` of each rank."""
    return run_threads(lambda transport: function(sample_sum(transport, spec, **options), transport.rank), num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_first_visit_is_the_sum_and_raw_changes_are_too(num_ranks: int) -> None:
    for spec, shape in itertools.product(("delta(raw)", f"delta({BITS_4})", "raw"), ((5,), (3, 7), (3, 130))):

        def visits(own: SampleSum, rank: int, shape: tuple[int, ...] = shape) -> list[Tensor]:
            return [own(values(2, *shape, seed=10 * visit + rank), [7, 9]) for visit in range(3)]

        for visit, arrived in enumerate(zip(*sums(visits, num_ranks, spec), strict=True)):
            assert all(torch.equal(one, arrived[0]) for one in arrived), "all ranks have the same"
            expected = sum(values(2, *shape, seed=10 * visit + rank) for rank in range(num_ranks))
            if visit == 0 or "raw" in spec:
                torch.testing.assert_close(arrived[0], expected)


def test_what_is_left_out_shrinks_from_visit_to_visit_and_stays_where_nothing_is_kept() -> None:
    def errors(own: SampleSum, rank: int) -> list[float]:
        parts = [values(2, 8, 32, seed=which) for which in range(3)]
        own(parts[rank] + values(2, 8, 32, seed=9), [0, 1])
        return [float((own(parts[rank], [0, 1]) - torch.stack(parts).sum(0)).abs().max()) for _ in range(6)]

    delta, direct = (sums(errors, 3, spec)[0] for spec in (f"delta({BITS_4})", BITS_4))
    assert delta[-1] < 0.02 * delta[0]
    assert direct[-1] > 0.5 * direct[0]
    assert delta[-1] < 0.02 * direct[-1]


def test_bytes_are_those_of_messages_and_kept_is_what_is_said() -> None:
    for num_ranks in (2, 4):
        share, numel, links = 512 // num_ranks, 2 * 512, 2 * (num_ranks - 1)

        def visit(own: SampleSum, rank: int, share=share, numel=numel, links=links) -> None:
            coded = 2 * parse(BITS_4).wire_bytes((share,))
            for payload in (4 * numel // own.transport.world_size, coded, coded):
                before = own.stats.forward_sent_bytes
                own(values(2, 8, 64, seed=rank), [4, 5])
                assert own.stats.forward_sent_bytes - before == links * (64 + payload), "a header and what follows"
            assert own.store is not None
            assert own.store.num_bytes == 2 * 4 * (numel // 2 * 2 + share)
            assert own.stats.dense_bytes == 3 * links * 4 * numel // own.transport.world_size

        sums(visit, num_ranks, f"delta({BITS_4})")


def test_samples_without_room_are_sent_whole_and_those_with_nan_are_not_kept() -> None:
    def visit(own: SampleSum, rank: int) -> tuple[list[int], int]:
        own(values(2, 8, 32, seed=rank), [0, 1])
        own(values(2, 8, 32, seed=rank), [1, 2])
        found = own(values(2, 8, 32, seed=5), [2, 3])
        torch.testing.assert_close(found, 2 * values(2, 8, 32, seed=5))
        bad = values(2, 8, 32, seed=rank)
        if rank == 1:
            bad[1, 0, 0] = torch.nan
        assert torch.isnan(own(bad, [0, 1])[1, 0, 0])
        assert own.store is not None
        return [sample for sample in range(4) if own.store.visits(sample)], own.stats.nonfinite

    record = 4 * (2 * 256 + 128)
    store = thinwire.store.Memory(budget_bytes=2 * record)
    assert sums(visit, 2, f"delta({BITS_4})", store=store) == [([0], 1)] * 2


def test_samples_and_shapes_are_checked() -> None:
    def visit(own: SampleSum, rank: int) -> None:
        with pytest.raises(ValueError, match="are not those of 3 samples"):
            own(torch.zeros(2, 8), [0, 1, 2])
        own(torch.zeros(2, 8), [0, 1])
        with pytest.raises(ValueError, match="pad samples to one length"):
            own(torch.zeros(2, 9), [0, 1])
        own(torch.zeros(1, 8), [rank])

    with pytest.raises(MessageError, match="out of step"):
        sums(visit, 2, f"delta({BITS_4})")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.more, self.back = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.tanh(self.up(x)))
        return x + self.back(torch.tanh(self.more(x)))


def network(style: Any, mesh: DeviceMesh | None = None) -> Net:
    net = Net()
    mesh = mesh or init_device_mesh("cpu", (2,))
    plan = {"up": ColwiseParallel(), "down": style, "more": ColwiseParallel(), "back": style}
    parallelize_module(net, mesh, plan)
    return net


def train(style: Any, net: Net, steps: range) -> list[float]:
    x = values(SAMPLES, LENGTH, WIDTH, seed=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    losses = []
    for step in steps:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(step * BATCH // SAMPLES))
        ids = order.roll(-step * BATCH)[:BATCH]
        if isinstance(style, thinwire.CompressedRowwiseParallel):
            style.set_sample_ids(ids)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x[ids]), x[ids].flip(2))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@on_ranks(2)
def test_raw_layers_train_as_pytorchs_do_and_compressed_ones_nearly(rank: int) -> None:
    ends = {}
    for spec in (None, "raw", f"delta({BITS_4})", "direct(maxabs(bits=2))"):
        style = RowwiseParallel() if spec is None else thinwire.CompressedRowwiseParallel(spec)
        net = network(style)
        losses = train(style, net, range(18))
        net.eval()
        with torch.no_grad():
            out = net(values(2, LENGTH, WIDTH, seed=2))
        (one, one_out), (other, other_out) = of_ranks((losses, out))
        assert one == other, "ranks have the same outputs, and so the same losses"
        assert torch.equal(one_out, other_out)
        if spec == "raw":
            torch.testing.assert_close(losses, ends[None][0], rtol=1e-5, atol=0)
            torch.testing.assert_close(out, ends[None][1], rtol=1e-4, atol=1e-5)
        elif isinstance(style, thinwire.CompressedRowwiseParallel) and "delta" in str(spec):
            assert style.stats.kept_samples == 2 * SAMPLES
            assert style.stats.store_bytes == 2 * SAMPLES * 4 * LENGTH * WIDTH * 5 // 2
        ends[spec] = losses, out
    plain, _, delta, rough = (losses[-1] for losses, _ in ends.values())
    assert abs(delta - plain) < 0.02 * plain < abs(rough - plain)


@on_ranks(2)
def test_a_style_goes_on_from_its_state_bit_by_bit(rank: int) -> None:
    spec = "delta(maxabs(bits=3, rounding=stochastic))"
    style, again = (thinwire.CompressedRowwiseParallel(spec) for _ in range(2))
    net, other = network(style), network(again)
    train(style, net, range(5))
    weights, state = copy.deepcopy(net.state_dict()), style.state_dict()
    rest = train(style, net, range(5, 9))
    other.load_state_dict(weights)
    again.load_state_dict(state)
    assert train(again, other, range(5, 9)) == rest
    with pytest.raises(ValueError, match="checksum differs"):
        again.load_state_dict({**state, "0/step": torch.tensor([9])})
    few = {key: value for key, value in state.items() if not key.startswith("1/")}
    with pytest.raises(ValueError, match="integers"):
        again.load_state_dict(few)


@on_ranks(4)
def test_replicas_of_a_layer_round_apart(rank: int) -> None:
    """What two replicas of a layer make of the same samples, by rounding."""
    mesh, x = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), values(2, LENGTH, WIDTH, seed=1)
    for rounding in ("nearest", "stochastic"):
        net = network(thinwire.CompressedRowwiseParallel(f"maxabs(bits=4, rounding={rounding})"), mesh["tp"])
        found = of_ranks(net(x).detach())
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[2], found[3])
        assert torch.equal(found[0], found[2]) == (rounding == "nearest")


@on_ranks(2)
def test_misuse_is_an_error_that_says_what_to_do(rank: int) -> None:
    style = thinwire.CompressedRowwiseParallel()
    net = network(style)
    x = values(BATCH, LENGTH, WIDTH, seed=1)
    with pytest.raises(ValueError, match="no sample ids"):
        net(x)
    style.set_sample_ids(range(BATCH))
    net(x)
    with pytest.raises(ValueError, match="cannot be run twice"):
        net(x)
    with pytest.raises(thinwire.DisagreementError, match="compressor"):
        network(thinwire.CompressedRowwiseParallel("maxabs(bits=4)" if rank else "maxabs(bits=5)"))
