"""DiLoCo: exact trajectories, streaming, compression, unequal work, checkpoints, and what it refuses."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import sharded
import thinwire
from harness import on_ranks, run_ranks
from ranks import alike, assert_alike, of_ranks
from thinwire.local import DiLoCo, Nesterov, send_nothing
from thinwire.local.fragments import balanced_fragments, exchange_plan
from thinwire.runtime.checkpoint import sealed

AVERAGING = Nesterov(lr=1.0, momentum=0.0)


class Two(nn.Module):
    """Two scalars, which a fixed gradient of 2 moves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(2)])
        for layer in self.layers:
            nn.init.ones_(layer.weight)


def _trajectory(
    rank: int, overlap: int, alpha: float, states: tuple[dict, dict] | None = None, steps: int = 15
) -> tuple[list[list[float]], tuple[dict, dict]]:
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"every": 6, "fragments": 2, "overlap": overlap, "mix": alpha, "compressor": "raw"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        local = DiLoCo(model, optimizer, outer=Nesterov(lr=2.0, momentum=0.0), **options)
    if states is not None:
        model.load_state_dict(states[0])
        local.load_state_dict(states[1])
    history = [[p.item() for p in model.parameters()]]
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.full_like(p, 2.0)
        optimizer.step()
        local.step()
        history.append([p.item() for p in model.parameters()])
    states = model.state_dict(), local.state_dict()
    local.close()
    return history, states


# Six trajectories of torchft's regression tests (test_fixtures/*.json): gradient 2, inner lr 1, outer SGD with
# lr 2, an exchange of one of two fragments every 3 steps. Weights of both layers after every third step.
TORCHFT = {
    (0, 0.0): [(-11, -5), (-17, -23), (-35, -29), (-41, -47), (-59, -53)],
    (0, 0.5): [(-8, -5), (-14, -17), (-24.5, -23), (-30.5, -32), (-40.25, -38)],
    (0, 1.0): [(-5, -5), (-11, -11), (-17, -17), (-23, -23), (-29, -29)],
    (1, 0.0): [(-7, -5), (-13, -19), (-27, -25), (-33, -39), (-47, -45)],
    (1, 0.5): [(-6, -5), (-12, -15), (-21.5, -21), (-27.5, -29), (-35.75, -35)],
    (1, 1.0): [(-5, -5), (-11, -11), (-17, -17), (-23, -23), (-29, -29)],
}


@on_ranks(2)
def test_trajectories_of_torchft_also_with_a_worker_that_is_replaced(rank: int) -> None:
    """Of all settings, and that of a worker that gets the weights and the state of rank 0 after nine steps."""
    for key, expected in TORCHFT.items():
        assert [tuple(weights) for weights in _trajectory(rank, *key)[0][3::3]] == expected
    states = [_trajectory(rank, 0, 0.0, steps=9)[1]]
    dist.broadcast_object_list(states, 0)
    replaced = _trajectory(rank, 0, 0.0, states[0], 12)[0][::3]
    assert replaced == [[-35, -29], [-41, -47], [-59, -53], [-65, -71], [-83, -77]]


@on_ranks(2)
def test_the_trajectory_of_maxtext(rank: int) -> None:
    """Worked by hand in MaxText's tests: two replicas, inner SGD at 0.1, three steps, outer Nesterov (1.0, 0.9)."""
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[2.0, 1.0]]))
        model.bias.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="gain"):
        local = DiLoCo(model, optimizer, every=3, outer=Nesterov(lr=1.0, momentum=0.9), compressor="raw")
    inputs = torch.tensor([[[0.0, 1.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]])[rank]
    labels = torch.tensor([[[1.0], [2.0]], [[2.0], [3.0]]])[rank]
    for step, expected in enumerate((1.0, 0.65, 0.4481, 0.574244)):
        optimizer.zero_grad()
        loss = (model(inputs) - labels).square().mean()
        loss.backward()
        assert sum(of_ranks(loss.item())) / 2 == pytest.approx(expected, rel=1e-5, abs=1e-5)
        optimizer.step()
        local.step()
        if step == 2:
            assert _flat(model).tolist() == pytest.approx([1.5345, 1.0494, 0.5839], rel=1e-4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(32, 256), nn.BatchNorm1d(256), nn.Linear(256, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


def _batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1000 * step + rank))
    return x, x[:, :8].argmax(1)


class Training:
    """A worker that learns which of the first eight inputs is the largest."""

    def __init__(self, rank: int, **options) -> None:
        torch.manual_seed(rank)
        self.rank, self.model = rank, Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.local = DiLoCo(self.model, self.optimizer, **options)

    def run(self, steps: int, first: int = 0) -> None:
        for step in range(first, first + steps):
            x, y = _batch(self.rank, step)
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
            self.local.step()

    def loss(self) -> float:
        x, y = (torch.cat(parts) for parts in zip(*(_batch(7, step) for step in range(50)), strict=True))
        self.model.eval()
        with torch.no_grad():
            loss = nn.functional.cross_entropy(self.model(x), y).item()
        self.model.train()
        return loss

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


OPTIONS = {
    "whole": {"every": 10, "compressor": "minmax(bits=4)"},
    "2 bits": {"every": 10},
    "ring": {"every": 10, "compressor": "minmax(bits=4)", "network": thinwire.Network("ring")},
    "whole, no feedback": {"every": 10, "compressor": "minmax(bits=4)", "feedback": False},
    "low rank": {"every": 10, "compressor": "powersgd(rank=2)"},
    "mixing": {"every": 12, "fragments": 3, "overlap": 1, "mix": 0.5, "compressor": "minmax(bits=4)"},
    "streaming": {"every": 10, "fragments": 2, "overlap": 2, "compressor": "minmax(bits=4)"},
}
OPTIONS["in few bits"] = OPTIONS["streaming"] | {
    "outer": Nesterov(dtype=torch.bfloat16),
    "compressor": "ef(minmax(bits=4), bits=8)",
}
OPTIONS["on the CPU"] = OPTIONS["streaming"] | {"outer_device": "cpu"}


@on_ranks(2)
def test_workers_learn_and_end_with_the_same_weights(rank: int) -> None:
    """Wherever the outer state is kept, with the same bits."""
    found = {}
    for name, options in OPTIONS.items():
        training = Training(rank, **options)
        start = training.loss()
        training.run(63)
        training.local.finish()
        assert training.loss() < 0.75 * start, name
        training.local.close()
        found[name] = training.weights()
        assert_alike(found[name], [b for b in training.model.buffers() if b.is_floating_point()])
    assert torch.equal(found["on the CPU"], found["streaming"])


SHAPES = {"hidden": (64, 64), "bias": (64,), "scale": (8,), "small": (16, 16)}
"""A layer, and three that gradients leave raw."""


def test_quantizers_with_feedback_take_biases_and_small_layers_too() -> None:
    raw = exchange_plan(SHAPES, "raw")
    for compressor, feedback, taken in (
        # The scale of eight is shorter as it is: payloads come in multiples of 64 bytes.
        ("gaussian(bits=2, bucket=256)", True, {"hidden", "bias", "small"}),
        ("ef(minmax(bits=4))", False, {"hidden", "bias", "small"}),
        ("minmax(bits=4)", False, {"hidden"}),
        ("powersgd(rank=2)", True, {"hidden"}),
        ("chunktopk", True, {"hidden"}),
        ("raw", True, set()),
    ):
        plan = exchange_plan(SHAPES, compressor, feedback=feedback)
        assert {name for name in SHAPES if str(plan[name]) != "raw()"} == taken
        assert all(plan[name].wire_bytes(shape) <= raw[name].wire_bytes(shape) for name, shape in SHAPES.items())


@on_ranks(2)
def test_a_training_that_streams_resumes_bit_for_bit_before_and_after_an_exchange_and_while_one_is_under_way(
    rank: int,
) -> None:
    straight = Training(rank, **OPTIONS["in few bits"])
    straight.run(37)
    straight.local.finish()
    for at in (19, 20, 21, 24):
        stopped, again = (Training(rank, **OPTIONS["in few bits"]) for _ in range(2))
        stopped.run(at)
        saved = stopped.local.state_dict()
        parts = copy.deepcopy((stopped.model.state_dict(), stopped.optimizer.state_dict()))
        stopped.run(3, first=at)
        again.model.load_state_dict(parts[0])
        again.optimizer.load_state_dict(parts[1])
        again.local.load_state_dict(saved)
        again.run(37 - at, first=at)
        again.local.finish()
        assert torch.equal(straight.weights(), again.weights()), at


@on_ranks(2)
def test_a_state_of_other_compressors_says_so(rank: int) -> None:
    saved = Training(rank, every=10, compressor="minmax(bits=4)").local.gather_state_dict()
    local = Training(rank, every=10, compressor="minmax(bits=8)").local
    with pytest.warns(UserWarning, match=r"with the compressors of the checkpoint.*bits=4.*, not ef\(minmax\(bits=8"):
        local.load_state_dict(saved)


State = dict[str, torch.Tensor]


def _sealed_again(state: State, added: State, without: str = "") -> State:
    """A state with other entries than it was saved with, and their checksums."""
    wires = {key: value for key, value in state.items() if key.startswith("wire/")}
    own = {key: value for key, value in state.items() if key not in (*wires, "checksums", without)}
    return wires | sealed(own | added)


DAMAGES: dict[str, Callable[[State], State]] = {
    "changed": lambda state: state | {"anchor/first.weight": state["anchor/first.weight"] + 1.0},
    "missing": lambda state: _sealed_again(state, {}, without="momentum/last.bias"),
    "of more fragments": lambda state: _sealed_again(state, {"sent_at/2": torch.tensor(0)}),
    "of no number of workers": lambda state: state | {"gathered": torch.tensor([])},
}


@on_ranks(2)
def test_a_state_that_is_damaged_or_of_another_run_on_one_worker_is_refused_on_all(rank: int) -> None:
    training, other_run = (Training(rank, **OPTIONS["streaming"]) for _ in range(2))
    training.run(13)
    other_run.run(13, first=100)
    state, states = training.local.state_dict(), (training.local.state_dict(), other_run.local.state_dict())
    training.run(3, first=13)
    before = training.local.state_dict()
    for damage in DAMAGES.values():
        with pytest.raises(ValueError if rank == 1 else thinwire.PeerFailedError) as error:
            training.local.load_state_dict(damage(state) if rank == 1 else state)
        theirs, own = of_ranks(str(error.value))
        assert own in theirs
    with pytest.raises(thinwire.DisagreementError, match=r"rank 0 has 'anchor/first\.weight: checksum 0x") as differing:
        training.local.load_state_dict(states[rank])
    assert_alike(str(differing.value))
    assert alike(training.local.state_dict(), before)
    training.local.load_state_dict(state)


@on_ranks(2)
def test_workers_may_have_saved_after_unequal_numbers_of_steps(rank: int) -> None:
    training, again = (Training(rank, every=10) for _ in range(2))
    training.run(12 + rank)
    again.model.load_state_dict(training.model.state_dict())
    again.local.load_state_dict(training.local.state_dict())
    again.run(8 - rank, first=12 + rank)
    again.local.finish()
    assert_alike(again.weights())


def _gathered(rank: int) -> tuple[State, torch.Tensor]:
    training = Training(rank, **OPTIONS["whole"])
    training.run(14)
    state = training.local.gather_state_dict()
    with training.local.shared_weights():
        assert_alike(state, training.weights())
        return state, training.weights()


def _continues(rank: int, state: State, shared: torch.Tensor) -> None:
    training = Training(rank, **OPTIONS["whole"])
    with pytest.warns(UserWarning, match="is of 2 workers, and now there are 3: tune"):
        training.local.load_state_dict(state)
    assert torch.equal(training.weights(), shared)


def test_another_number_of_workers_starts_from_the_shared_weights_of_the_gathered_state() -> None:
    run_ranks(_continues, 3, *run_ranks(_gathered, 2)[0])


@on_ranks(2)
def test_workers_count_by_the_tokens_of_the_steps_since_a_fragments_last_exchange(rank: int) -> None:
    """Two steps, each of which exchanges one of two fragments; then what is left. The state is loaded after ``at``."""
    options = {"every": 2, "fragments": 2, "outer": AVERAGING, "compressor": "raw", "weighted": True}
    for at in (None, 1):
        model = Two()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        local = DiLoCo(model, optimizer, total_steps=99, **options)
        for step, tokens in enumerate(((100, 300), (300, 100))):
            for p in model.parameters():
                p.grad = torch.full_like(p, 4.0 * rank)
            optimizer.step()
            local.step(tokens=tokens[rank])
            if step == at:
                states = copy.deepcopy(model.state_dict()), local.state_dict()
                local = DiLoCo(model, optimizer, total_steps=99, **options)
                model.load_state_dict(states[0])
                local.load_state_dict(states[1])
        local.finish()
        # The first fragment is at -2 after its exchange, and rank 1's last step takes it to -6 with a quarter of the
        # tokens. The second one's exchange is after both steps, of which rank 1 has -8, with the same weight.
        assert [p.item() for p in model.parameters()] == [-3.0, -1.0]


def _said(model: nn.Module, **options: Any) -> tuple[Nesterov, str]:
    """The outer optimizer and the warnings of local updates of a model."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        local = DiLoCo(model, torch.optim.SGD(model.parameters(), lr=1.0), compressor="raw", **options)
    local.close()
    return local.outer, "\n".join(str(warning.message) for warning in caught)


@on_ranks(2)
def test_a_training_of_few_exchanges_averages_weights_and_is_warned_of_too_few(rank: int) -> None:
    outers = [_said(Two(), every=8, total_steps=total)[0] for total in (96, 159, 160, None)]
    assert outers == [AVERAGING, AVERAGING, Nesterov(), Nesterov()]
    for total in (40, 50):
        assert ("every=25 leaves" in _said(Two(), every=25, total_steps=total)[1]) == (total == 40)


@on_ranks(2)
def test_shared_weights_of_a_bf16_model_are_fp32(rank: int) -> None:
    model = nn.Linear(64, 64).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = DiLoCo(model, optimizer, every=2, compressor="minmax(bits=4)")
    for step in range(4):
        model(torch.full((2, 64), float(rank + step), dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        local.step()
    assert model.weight.dtype is torch.bfloat16
    assert_alike(model.weight.detach())


DIFFERENCES = {
    "every": 20,
    "outer": Nesterov(lr=0.5),
    "compressor": "minmax(bits=4)",
    "feedback": False,
    "fragments": 2,
    "overlap": 3,
    "mix": 0.5,
    "weighted": True,
    "network.algorithm": thinwire.Network(algorithm="ring"),
    "network.transport": thinwire.Network(transport="group"),
    "network.timeout": thinwire.Network(timeout=timedelta(seconds=19)),
    "seed": 1,
    "total_steps": 100,
}
"""What rank 1 alone is given, by the argument's name."""
NO_DIFFERENCE = {"model", "inner_optimizer", "group", "outer_device"}
"""Their own on each worker. Workers may keep the outer state where they like: it changes no bit."""
NAMED = {"total_steps": "outer", "compressor": "layer", "feedback": "layer"}
"""What the error names in place of an argument that settles it."""


def _quiet(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> DiLoCo:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return DiLoCo(model, optimizer, **options)


def _disagree(rank: int) -> None:
    for name, given in DIFFERENCES.items():
        model = nn.Linear(64, 64)
        options = {"every": 10, **({name.split(".")[0]: given} if rank else {})}
        optimizer = torch.optim.SGD(model.parameters())
        with pytest.raises(thinwire.DisagreementError, match=f"'{NAMED.get(name, name).split('.')[-1]}") as error:
            _quiet(model, optimizer, **options)
        assert_alike(str(error.value))
    # Two workers gather each other's messages by default.
    _quiet(model, optimizer, every=10, network=thinwire.Network("allgather" if rank else None)).close()


def test_every_argument_that_differs_is_named() -> None:
    assert {name.split(".")[0] for name in DIFFERENCES} | NO_DIFFERENCE == set(inspect.signature(DiLoCo).parameters)
    run_ranks(_disagree, 2, timeout_s=60.0)


def test_fragments_are_balanced_and_strided() -> None:
    sizes = {"embed": 100, **{f"block.{i}": 40 for i in range(6)}, "norm": 1}
    parts = balanced_fragments(sizes, 3)
    assert sorted(name for part in parts for name in part) == sorted(sizes)
    loads = [sum(sizes[name] for name in part) for part in parts]
    assert max(loads) - min(loads) <= 40
    assert balanced_fragments({f"block.{i}": 8 for i in range(6)}, 3) == [
        ["block.0", "block.3"],
        ["block.1", "block.4"],
        ["block.2", "block.5"],
    ]


def _flat(model: nn.Module) -> torch.Tensor:
    values = (p.detach() for p in model.parameters())
    return torch.cat([(p.to_local() if isinstance(p, DTensor) else p).flatten() for p in values])


@on_ranks(4)
def test_shards_are_exchanged_with_their_peers(rank: int) -> None:
    for outer_device, steps in ((None, 42), ("cpu", 7)):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        model = sharded.build(mesh["shards"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        options = {"every": 5, "compressor": "minmax(bits=4)", "outer_device": outer_device}
        local = DiLoCo(model, optimizer, group=mesh.get_group("replicas"), **options)
        own = sum(p.to_local().numel() for p in model.parameters())
        assert sum(v.numel() for key, v in local.state_dict().items() if key.startswith("anchor/")) == own
        losses = []
        for step in range(steps):
            x, y = sharded.batch(step, rank, size=16)
            loss = (model(x) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            local.step()
            losses.append(loss.item())
        local.finish()
        first, second, third, fourth = of_ranks(_flat(model))
        assert torch.equal(first, third)
        assert torch.equal(second, fourth)
        assert not torch.equal(first, second)
        assert sum(losses[-5:]) < 0.7 * sum(losses[:5]) or outer_device


@on_ranks(4)
def test_evaluation_leaves_shards_alone(rank: int) -> None:
    found = []
    for evaluates in (False, True):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        model = sharded.build(mesh["shards"])
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        local = DiLoCo(model, optimizer, group=mesh.get_group("replicas"), every=4, compressor="raw", outer=AVERAGING)
        for step in range(8):
            sharded.train(model, 1, first=step, optimizer=optimizer)
            for weights in (nullcontext, local.shared_weights) if evaluates else ():
                with weights(), torch.no_grad():
                    model(sharded.batch(0, rank)[0])
            local.step()
        found.append(_flat(model))
    assert torch.equal(*found)


@on_ranks(3)
def test_equal_buffers_keep_their_bits_and_nan_of_one_worker_does_not_spread(rank: int) -> None:
    model = nn.Linear(4, 4)
    equal = torch.full((2,), torch.finfo(torch.float32).min), torch.full((2,), 0.1, dtype=torch.bfloat16)
    for name, value in zip(("mask", "scale", "seen"), (*equal, torch.zeros(2)), strict=True):
        model.register_buffer(name, value.clone())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = DiLoCo(model, optimizer, every=1, compressor="raw", outer=AVERAGING)
    model.seen.copy_(torch.tensor([rank, torch.nan if rank == 1 else 1.0]))
    local.step()
    assert torch.equal(model.mask, equal[0])
    assert torch.equal(model.scale, equal[1])
    assert model.seen.tolist() == [1.0, 1.0]


@on_ranks(2)
def test_frozen_layers_start_alike_and_what_changes_after_diloco_is_made_is_said(rank: int) -> None:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = DiLoCo(model, optimizer, every=1)
    assert_alike(model[0].weight.detach())
    model.requires_grad_(True)
    with pytest.warns(UserWarning, match="0.weight is trained by now"):
        local.step()
    DiLoCo(model, optimizer, every=1)
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    with pytest.raises(RuntimeError, match="load a model first, and make DiLoCo then"):
        optimizer.step()


@on_ranks(4)
def test_workers_of_a_node_average_gradients_and_nodes_exchange_progress(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    model = DistributedDataParallel(net, process_group=pairs[rank // 2])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    local = DiLoCo(model, optimizer, every=5, compressor="minmax(bits=4)")
    for step in range(13):
        x, y = _batch(rank, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        local.step()
    first, second, third, _ = of_ranks(_flat(model))
    assert torch.equal(first, second)
    assert not torch.equal(first, third)
    local.finish()
    assert_alike(_flat(model))


@on_ranks(2)
def test_a_warning_says_that_ddp_sends_what_local_updates_are_to_save(rank: int) -> None:
    own = [dist.new_group([r]) for r in range(2)][rank]
    for group, sends in ((None, True), (None, False), (own, True)):
        model = DistributedDataParallel(nn.Linear(4, 4), process_group=group)
        if not sends:
            send_nothing(model)
        told = "all-reduces the gradients of all workers" in _said(model)[1]
        assert told == (sends and group is None)
