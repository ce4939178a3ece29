"""Training loops that are not forward, backward, step: nothing of them is lost, and what they leave out is said."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import thinwire
from harness import run_ranks
from nets import assert_replicas_identical
from thinwire.compat import accepts_uneven_inputs

_WIDTH = 64
KEEP = {"skip_if_slower": False, "min_numel": 0}


class _Inner(torch.autograd.Function):
    """Differentiates a module in a backward pass of its own, as losses in chunks and implicit layers do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: nn.Module) -> torch.Tensor:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = module(ctx.x)
        return ctx.y.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        torch.autograd.backward(ctx.y, grads[0])
        return ctx.x.grad, None


class Net(nn.Module):
    """Linear layers, run in one of several ways."""

    def __init__(self, way: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(_WIDTH, _WIDTH) for _ in range(6)])
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = checkpoint(layer, x, use_reentrant=True) if self.way == "checkpoints" else layer(x)
        if self.way == "function":
            return _Inner.apply(x, self.layers[-1])
        return self.layers[-1](x)


class Breaks(thinwire.compressors.MinMax):
    """Encodes until it is told not to."""

    broken = False

    def encode(self, *args: Any, **kwargs: Any) -> None:
        if Breaks.broken:
            raise ArithmeticError("this compressor is broken")
        super().encode(*args, **kwargs)


def _batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, _WIDTH, generator=torch.Generator().manual_seed(100 * step + rank)).requires_grad_()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    optimizer.zero_grad()
    model(_batch(rank, step)).square().mean().backward()
    optimizer.step()


def _make(way: str = "plain", **options: Any) -> tuple[DDP, torch.optim.Optimizer]:
    model = DDP(Net(way), bucket_cap_mb=0.03, **options)
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def _differs(rank: int, model: DDP) -> None:
    with torch.no_grad():
        model.module.layers[0].weight += 1e-3 * rank


def _breaks(rank: int, model: DDP) -> None:
    Breaks.broken = rank == 1


# --- backward passes in a backward pass ---------------------------------------------------------------------------


FAULTS: list[tuple[Callable[[int, DDP], None], list[str]]] = [
    (_breaks, ["PeerFailedError", "ArithmeticError"]),
    (_differs, ["ParityError", "ParityError"]),
]
WAYS = ("plain", "checkpoints", "function")


def _fails_in(rank: int, options: dict) -> list[str]:
    found = []
    for fault, _ in FAULTS:
        for way in WAYS:
            model, optimizer = _make(way, **options)
            wire = thinwire.compress(model, Breaks(), checks=thinwire.Checks(parity_every=1), **KEEP)
            for step in range(3):
                _step(model, optimizer, rank, step)
            assert wire.step == 2
            fault(rank, model)
            before = model.module.layers[2].weight.detach().clone()
            with pytest.raises((thinwire.PeerFailedError, thinwire.ParityError, ArithmeticError)) as error:
                _step(model, optimizer, rank, 3)
            assert torch.equal(before, model.module.layers[2].weight), (fault, way)
            found.append(type(error.value).__name__)
            Breaks.broken = False
    return found


@pytest.mark.parametrize("options", [{}, {"static_graph": True}], ids=["dynamic", "static"])
def test_an_error_reaches_the_loop_before_a_step(options: dict) -> None:
    for rank, found in enumerate(run_ranks(_fails_in, 2, options)):
        assert found == [kinds[rank] for _, kinds in FAULTS for _ in WAYS]


def _quantized_adam(rank: int) -> None:
    for way in WAYS[1:]:
        model = DDP(Net(way), bucket_cap_mb=0.03)
        optimizer = thinwire.optim.QuantizedAdam(model.parameters(), lr=1e-3, warmup=2)
        thinwire.compress(model, "minmax(bits=4)", optimizer=optimizer, **KEEP)
        for step in range(5):
            _step(model, optimizer, rank, step)
        assert_replicas_identical(model)


def test_quantized_adam_trains_through_nested_passes() -> None:
    run_ranks(_quantized_adam, 2)


# --- weights that differ between ranks for a while ----------------------------------------------------------------


def _sharpness_aware(rank: int) -> int:
    model, optimizer = _make()
    wire = thinwire.compress(model, "minmax(bits=8)", checks=thinwire.Checks(parity_every=1), **KEEP)
    for step in range(4):
        optimizer.zero_grad()
        with model.no_sync():
            model(_batch(rank, step)).square().mean().backward()
        before = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad, alpha=0.05)
        optimizer.zero_grad()
        model(_batch(rank, step)).square().mean().backward()
        with torch.no_grad():
            for p, kept in zip(model.parameters(), before, strict=True):
                p.copy_(kept)
        optimizer.step()
    assert_replicas_identical(model)
    return wire.stats.parity_checks


def _resync_while_accumulating(rank: int) -> int:
    model, optimizer = _make()
    checks = thinwire.Checks(parity_every=2, resync_every=2)
    wire = thinwire.compress(model, "minmax(bits=8)", checks=checks, **KEEP)
    for step in range(4):
        if step == 2:
            _differs(rank, model)
        optimizer.zero_grad()
        with model.no_sync():
            model(_batch(rank, step)).square().mean().backward()
        model(_batch(rank, step)).square().mean().backward()
        optimizer.step()
    assert_replicas_identical(model)
    return wire.stats.resyncs


def _differ_for_a_while(rank: int) -> tuple[int, int]:
    return _sharpness_aware(rank), _resync_while_accumulating(rank)


def test_weights_that_each_rank_moves_and_puts_back_and_those_copied_within_a_step_are_no_difference() -> None:
    assert run_ranks(_differ_for_a_while, 2) == [(4, 1)] * 2


def _joins(rank: int) -> None:
    for kind in ("feedback", "momentum", "resync"):
        model, optimizer = _make()
        checks = thinwire.Checks(resync_every=2) if kind == "resync" else thinwire.Checks(parity_every=1)
        if kind == "momentum":
            optimizer = thinwire.optim.QuantizedAdam(model.parameters(), lr=1e-3, warmup=2)
        spec = "ef(minmax(bits=4))" if kind == "feedback" else "minmax(bits=4)"
        paired = optimizer if kind == "momentum" else None
        wire = thinwire.compress(model, spec, optimizer=paired, checks=checks, **KEEP)
        assert not accepts_uneven_inputs(model)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with model.join():
                assert accepts_uneven_inputs(model)
                for step in range(4 + 3 * rank):
                    _step(model, optimizer, rank, step)
        assert_replicas_identical(model)
        assert wire.step == 6
        assert ["resync_every" in str(warning.message) for warning in told] == [True] * (kind == "resync")


def test_ranks_may_have_unequal_numbers_of_batches() -> None:
    run_ranks(_joins, 2)


# --- what a loop leaves out ---------------------------------------------------------------------------------------


def _inner_module(model: DDP, step: int) -> tuple[nn.Module, Any]:
    return model.module, nullcontext()


def _never_synchronized(model: DDP, step: int) -> tuple[nn.Module, Any]:
    return model, model.no_sync()


def _as_it_should(model: DDP, step: int) -> tuple[nn.Module, Any]:
    return model, nullcontext() if step % 2 else model.no_sync()


def _one_too_early(model: DDP, step: int) -> tuple[nn.Module, Any]:
    return model, model.no_sync() if step % 2 else nullcontext()


def _told(rank: int) -> list[list[str]]:
    return [_said_of(choose, rank) for choose in (_inner_module, _never_synchronized, _one_too_early, _as_it_should)]


def _said_of(choose: Callable[[DDP, int], tuple[nn.Module, Any]], rank: int) -> list[str]:
    model, optimizer = _make()
    thinwire.compress(model, "minmax(bits=8)", checks=thinwire.Checks(parity_every=0), **KEEP)
    other = nn.Linear(2, 2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(16):
            used, context = choose(model, step)
            with context:
                used(_batch(rank, step)).square().mean().backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
            # Those of another model are nobody's business.
            other(torch.ones(2)).sum().backward()
            torch.optim.SGD(other.parameters(), lr=0.1).step()
    return [str(warning.message) for warning in told]


def test_steps_whose_gradients_were_not_exchanged_are_said_once() -> None:
    for *left_out, exchanged in run_ranks(_told, 2):
        for (text,) in left_out:
            assert "SGD has taken 3 steps whose gradients were not exchanged" in text
            assert "no_sync()" in text
        assert exchanged == [], "gradients that are exchanged in the last pass before a step"


def _two_optimizers(rank: int) -> list[str]:
    model, _ = _make()
    thinwire.compress(model, "minmax(bits=8)", **KEEP)
    matrices = torch.optim.SGD([p for p in model.parameters() if p.ndim > 1], lr=0.05)
    vectors = torch.optim.AdamW([p for p in model.parameters() if p.ndim == 1], lr=0.01)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(6):
            model(_batch(rank, step)).square().mean().backward()
            for optimizer in (matrices, vectors):
                optimizer.step()
                optimizer.zero_grad()
    return [str(warning.message) for warning in told]


def _sharded(rank: int) -> list[list[str]]:
    found = []
    for synchronized in (True, False):
        model = Net()
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        thinwire.compress(model, **KEEP)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for step in range(6):
                model.set_requires_gradient_sync(synchronized or step == 0)
                _step(model, optimizer, rank, step)
        found.append([text for warning in told if "exchanged" in (text := str(warning.message))])
    return found


def test_sharded_gradients_that_are_never_reduced_are_said_once() -> None:
    for synchronized, never in run_ranks(_sharded, 2):
        assert synchronized == []
        assert len(never) == 1


def _adversaries(rank: int) -> list[str]:
    critic, generator = (DDP(Net(), bucket_cap_mb=0.03) for _ in range(2))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (critic, generator)]
    for model in (critic, generator):
        thinwire.compress(model, "minmax(bits=8)", **KEEP)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(5):
            critic(_batch(rank, step)).square().mean().backward()
            critic.requires_grad_(False)
            with critic.no_sync():
                critic(generator(_batch(rank, step))).mean().backward()
            critic.requires_grad_(True)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return [str(warning.message) for warning in told]


def _nothing_to_say(rank: int) -> list[str]:
    return _two_optimizers(rank) + _adversaries(rank)


def test_two_optimizers_of_one_model_and_a_frozen_model_that_another_trains_through_leave_nothing_out() -> None:
    assert run_ranks(_nothing_to_say, 2) == [[], []]


def _unfrozen(rank: int) -> list[list[str]]:
    found = []
    for before_compress in (True, False):
        net = Net()
        net.layers[3].requires_grad_(False)
        model = DDP(net, bucket_cap_mb=0.03)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        if before_compress:
            net.layers[3].requires_grad_(True)
        thinwire.compress(model, "minmax(bits=8)", checks=thinwire.Checks(parity_every=0), **KEEP)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for step in range(6):
                net.layers[3].requires_grad_(before_compress or step > 2)
                _step(model, optimizer, rank, step)
        found.append([str(warning.message) for warning in told])
    return found


def test_a_layer_that_was_frozen_when_ddp_was_built_is_named() -> None:
    for (text,) in (told for found in run_ranks(_unfrozen, 2) for told in found):
        assert "layers.3.weight (2 such)" in text
        assert "frozen when DistributedDataParallel was built" in text


def _another_dtype(rank: int) -> str:
    net = Net()
    net.extra = nn.Linear(2, 2).requires_grad_(False)
    model = DDP(net, bucket_cap_mb=0.03)
    optimizer = torch.optim.SGD(net.layers.parameters(), lr=0.05)
    thinwire.compress(model, "minmax(bits=8)", **KEEP)
    for step in range(3):
        _step(model, optimizer, rank, step)
    # What is frozen may change: nothing of it is exchanged.
    model.module.extra.to(torch.float64)
    _step(model, optimizer, rank, 3)
    model.to(torch.bfloat16)
    with pytest.raises(TypeError) as error:
        model(_batch(rank, 4).to(torch.bfloat16))
    return str(error.value)


def test_a_model_whose_dtype_changes_after_ddp_was_built_is_refused() -> None:
    for text in run_ranks(_another_dtype, 2):
        assert "is torch.bfloat16 by now, and was torch.float32" in text


# --- what cannot be compressed is said at once --------------------------------------------------------------------


def _without_buckets(rank: int) -> list[str]:
    from torch.distributed.optim import _apply_optimizer_in_backward

    net = Net()
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.05})
    in_backward = DDP(net)
    torch._dynamo.config.optimize_ddp = "python_reducer"
    errors = []
    for model in (_make()[0], in_backward):
        with pytest.raises(RuntimeError) as error:
            thinwire.compress(model, "minmax(bits=8)", **KEEP)
        errors.append(str(error.value))
        torch._dynamo.config.optimize_ddp = True
    return errors


def test_ways_to_train_that_have_no_buckets_are_refused_by_name() -> None:
    for reducer, in_backward in run_ranks(_without_buckets, 2):
        assert 'optimize_ddp = "python_reducer"' in reducer
        assert "_apply_optimizer_in_backward" in in_backward


# --- states between two steps -------------------------------------------------------------------------------------


def _saves_before_the_step(rank: int) -> str:
    model, _ = _make()
    optimizer = thinwire.optim.QuantizedAdam(model.parameters(), lr=1e-3, warmup=2)
    wire = thinwire.compress(model, "minmax(bits=4)", optimizer=optimizer, **KEEP)
    for step in range(4):
        _step(model, optimizer, rank, step)
        wire.state_dict()
    optimizer.zero_grad()
    model(_batch(rank, 4)).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(RuntimeError) as error:
        wire.state_dict()
    optimizer.step()
    wire.state_dict()
    model(_batch(rank, 5)).square().mean().backward()
    optimizer.zero_grad()
    wire.state_dict()
    return str(error.value)


def test_a_state_between_backward_and_step_is_refused_where_the_step_decides_what_is_kept() -> None:
    for text in run_ranks(_saves_before_the_step, 2):
        assert "save the state after optimizer.step()" in text


# --- memory -------------------------------------------------------------------------------------------------------


SPECS = ("ef(minmax(bits=4))", "ef(minmax(bits=4), bits=8)", "powersgd(rank=2)", "minmax(bits=4)")


def _held(rank: int) -> None:
    for spec in SPECS:
        net = nn.Sequential(*[nn.Linear(128, 128, bias=False) for _ in range(8)])
        model = DDP(net, bucket_cap_mb=0.1)
        wire = thinwire.compress(model, spec, **KEEP)
        for _ in range(4):
            model.zero_grad()
            model(torch.randn(4, 128)).square().mean().backward()
            assert wire._engine.slots.num_bytes == wire.memory, spec
            assert wire.stats.buffer_bytes == sum(route.num_bytes for route in wire._engine.present_routes())
        dist.barrier()


def test_state_takes_what_was_foreseen_also_when_ddp_rebuilds_its_buckets() -> None:
    run_ranks(_held, 2)
