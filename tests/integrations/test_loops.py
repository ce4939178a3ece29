"""Training loops that are not forward, backward, step: nothing of them is lost, and what they leave out is said."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import thinwire
from harness import on_ranks
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


FAULTS: list[tuple[Callable[[int, DDP], None], list[type[Exception]]]] = [
    (_breaks, [thinwire.PeerFailedError, ArithmeticError]),
    (_differs, [thinwire.ParityError, thinwire.ParityError]),
]
WAYS = ("plain", "checkpoints", "function")


@pytest.mark.parametrize("options", [{}, {"static_graph": True}], ids=["dynamic", "static"])
@on_ranks(2)
def test_an_error_reaches_the_loop_before_a_step(rank: int, options: dict) -> None:
    for fault, kinds in FAULTS:
        for way in WAYS:
            model, optimizer = _make(way, **options)
            wire = thinwire.compress(model, Breaks(), checks=thinwire.Checks(parity_every=1), **KEEP)
            for step in range(3):
                _step(model, optimizer, rank, step)
            assert wire.step == 2
            fault(rank, model)
            before = model.module.layers[2].weight.detach().clone()
            with pytest.raises(kinds[rank]):
                _step(model, optimizer, rank, 3)
            assert torch.equal(before, model.module.layers[2].weight), (fault, way)
            Breaks.broken = False


def _sharpness_aware(rank: int) -> None:
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
    assert wire.stats.parity_checks == 4


def _resync_while_accumulating(rank: int) -> None:
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
    assert wire.stats.resyncs == 1


@on_ranks(2)
def test_weights_that_each_rank_moves_and_puts_back_and_those_copied_within_a_step_are_no_difference(rank: int) -> None:
    _sharpness_aware(rank)
    _resync_while_accumulating(rank)


@contextmanager
def _told() -> Iterator[list[str]]:
    """What is warned of."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    said += [str(warning.message) for warning in caught]


@on_ranks(2)
def test_ranks_may_have_unequal_numbers_of_batches(rank: int) -> None:
    for kind in ("feedback", "momentum", "resync"):
        model, optimizer = _make()
        checks = thinwire.Checks(resync_every=2) if kind == "resync" else thinwire.Checks(parity_every=1)
        if kind == "momentum":
            optimizer = thinwire.optim.QuantizedAdam(model.parameters(), lr=1e-3, warmup=2)
        spec = "ef(minmax(bits=4))" if kind == "feedback" else "minmax(bits=4)"
        paired = optimizer if kind == "momentum" else None
        wire = thinwire.compress(model, spec, optimizer=paired, checks=checks, **KEEP)
        assert not accepts_uneven_inputs(model)
        with _told() as said, model.join():
            assert accepts_uneven_inputs(model)
            for step in range(4 + 3 * rank):
                _step(model, optimizer, rank, step)
        assert_replicas_identical(model)
        assert wire.step == 6
        assert ["resync_every" in text for text in said] == [True] * (kind == "resync")


@on_ranks(2)
def test_steps_whose_gradients_were_not_exchanged_are_said_once(rank: int) -> None:
    """Of two passes a step, those that are not exchanged; in the first case by a model that DDP does not know."""
    for left_out in (None, (0, 1), (1,), (0,)):
        model, optimizer = _make()
        thinwire.compress(model, "minmax(bits=8)", checks=thinwire.Checks(parity_every=0), **KEEP)
        other = nn.Linear(2, 2)
        with _told() as said:
            for step in range(16):
                with model.no_sync() if left_out and step % 2 in left_out else nullcontext():
                    (model if left_out else model.module)(_batch(rank, step)).square().mean().backward()
                if step % 2:
                    optimizer.step()
                    optimizer.zero_grad()
                # Those of another model are nobody's business.
                other(torch.ones(2)).sum().backward()
                torch.optim.SGD(other.parameters(), lr=0.1).step()
        assert len(said) == (left_out != (0,)), "gradients that are exchanged in the last pass before a step"
        assert all("SGD has taken 3 steps whose gradients were not exchanged" in text for text in said)
        assert all("no_sync()" in text for text in said)


@on_ranks(2)
def test_gradients_that_are_gone_without_a_step_and_copies_that_are_not_made_are_said_once(rank: int) -> None:
    for kind in ("dropped", "discarded", "accumulated", "no feedback", "eval()"):
        model, optimizer = _make()
        checks = thinwire.Checks(resync_every=2 * (kind == "eval()"))
        spec = "minmax(bits=4)" if kind == "no feedback" else "ef(minmax(bits=2))"
        wire = thinwire.compress(model.train(kind != "eval()"), spec, checks=checks, **KEEP)
        with _told() as said:
            for step in range(12):
                model(_batch(rank, step)).square().mean().backward()
                if step % 3 != 1 or kind == "eval()":
                    optimizer.step()
                if kind == "discarded" and step % 3 == 1:
                    wire.discard_step()
                if kind != "accumulated" or step % 3 != 1:
                    optimizer.zero_grad()
        said_of = {"dropped": ["wire.discard_step()"], "eval()": ["resync_every does nothing while"]}.get(kind, [])
        assert [text in warning for text, warning in zip(said_of, said, strict=True)] == [True] * len(said_of)


def _two_optimizers(rank: int) -> None:
    model, _ = _make()
    thinwire.compress(model, "minmax(bits=8)", **KEEP)
    matrices = torch.optim.SGD([p for p in model.parameters() if p.ndim > 1], lr=0.05)
    vectors = torch.optim.AdamW([p for p in model.parameters() if p.ndim == 1], lr=0.01)
    for step in range(6):
        model(_batch(rank, step)).square().mean().backward()
        for optimizer in (matrices, vectors):
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2)
def test_sharded_gradients_that_are_never_reduced_are_said_once(rank: int) -> None:
    for synchronized in (True, False):
        model = Net()
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        thinwire.compress(model, **KEEP)
        with _told() as said:
            for step in range(6):
                model.set_requires_gradient_sync(synchronized or step == 0)
                _step(model, optimizer, rank, step)
        assert sum("exchanged" in text for text in said) == (not synchronized)


def _adversaries(rank: int) -> None:
    critic, generator = (DDP(Net(), bucket_cap_mb=0.03) for _ in range(2))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (critic, generator)]
    for model in (critic, generator):
        thinwire.compress(model, "minmax(bits=8)", **KEEP)
    for step in range(5):
        critic(_batch(rank, step)).square().mean().backward()
        critic.requires_grad_(False)
        with critic.no_sync():
            critic(generator(_batch(rank, step))).mean().backward()
        critic.requires_grad_(True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2)
def test_two_optimizers_of_one_model_and_a_frozen_model_that_another_trains_through_leave_nothing_out(
    rank: int,
) -> None:
    with _told() as said:
        _two_optimizers(rank)
        _adversaries(rank)
    assert said == []


@on_ranks(2)
def test_a_layer_that_was_frozen_when_ddp_was_built_is_named(rank: int) -> None:
    for before_compress in (True, False):
        net = Net()
        net.layers[3].requires_grad_(False)
        model = DDP(net, bucket_cap_mb=0.03)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        if before_compress:
            net.layers[3].requires_grad_(True)
        thinwire.compress(model, "minmax(bits=8)", checks=thinwire.Checks(parity_every=0), **KEEP)
        with _told() as said:
            for step in range(6):
                net.layers[3].requires_grad_(before_compress or step > 2)
                _step(model, optimizer, rank, step)
        (text,) = said
        assert "layers.3.weight (2 such)" in text
        assert "frozen when DistributedDataParallel was built" in text


@on_ranks(2)
def test_what_cannot_be_is_refused(rank: int) -> None:
    """A model whose dtype changes after DDP was built, ways to train that have no buckets, and a state between
    backward and step where the step decides what is kept."""
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
    with pytest.raises(TypeError, match=r"is torch\.bfloat16 by now, and was torch\.float32"):
        model(_batch(rank, 4).to(torch.bfloat16))

    from torch.distributed.optim import _apply_optimizer_in_backward

    net = Net()
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.05})
    with pytest.raises(RuntimeError, match="_apply_optimizer_in_backward"):
        thinwire.compress(DDP(net), "minmax(bits=8)", **KEEP)

    model, _ = _make()
    optimizer = thinwire.optim.QuantizedAdam(model.parameters(), lr=1e-3, warmup=2)
    wire = thinwire.compress(model, "minmax(bits=4)", optimizer=optimizer, **KEEP)
    for step in range(4):
        _step(model, optimizer, rank, step)
        wire.state_dict()
    optimizer.zero_grad()
    model(_batch(rank, 4)).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(RuntimeError, match=r"save the state after optimizer\.step\(\)"):
        wire.state_dict()
    optimizer.step()
    wire.state_dict()
    model(_batch(rank, 5)).square().mean().backward()
    optimizer.zero_grad()
    wire.state_dict()


@on_ranks(2)
def test_state_takes_what_was_foreseen_also_when_ddp_rebuilds_its_buckets(rank: int) -> None:
    for spec in ("ef(minmax(bits=4))", "ef(minmax(bits=4), bits=8)", "powersgd(rank=2)", "minmax(bits=4)"):
        net = nn.Sequential(*[nn.Linear(128, 128, bias=False) for _ in range(8)])
        model = DDP(net, bucket_cap_mb=0.1)
        wire = thinwire.compress(model, spec, **KEEP)
        for _ in range(4):
            model.zero_grad()
            model(torch.randn(4, 128)).square().mean().backward()
            assert wire.engine.slots.num_bytes == wire.engine.planned_bytes, spec
            assert 0 < wire.stats.buffer_bytes <= wire.engine.planned_exchange_bytes, spec
        dist.barrier()
