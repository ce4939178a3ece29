"""Models are copied, hold parameters that no compressor takes, and are dropped, as they would be under stock DDP."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import sharded
import thinwire
from harness import on_ranks
from ranks import alike, settled


def linear() -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))


def backward(model: nn.Module, rank: int, step: int = 0) -> list[torch.Tensor]:
    """Gradients of a batch of this rank's own."""
    model.zero_grad()
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * step + rank))
    model(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "AveragedModel": lambda model: AveragedModel(model).module,
}


@on_ranks(2)
def test_a_copy_of_a_compressed_model_is_a_stock_model_that_may_be_compressed(rank: int) -> None:
    stock, model = linear(), linear()
    wire = thinwire.compress(model, "minmax(bits=4)", skip_if_slower=False)
    exact, sent = backward(stock, rank), backward(model, rank)
    for name, copied in COPIES.items():
        other = copied(model)
        assert alike(backward(other, rank), exact), name
        second = thinwire.compress(other, "minmax(bits=4)", skip_if_slower=False)
        assert alike(backward(other, rank), sent), name
        assert second.stats.compressed_steps == 1
        second.detach()
    # The copied model goes on as before.
    backward(model, rank, 1)
    assert wire.stats.compressed_steps == 2


class Odd(nn.Module):
    """A complex parameter, one of double precision, and an embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 64, sparse=True)
        self.a = nn.Linear(64, 64)
        self.exact = nn.Linear(64, 64, dtype=torch.float64)
        self.turn = nn.Parameter(torch.randn(1, 64, dtype=torch.complex64))

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        return (self.exact(self.a(self.embed(samples)).double()).float() * self.turn).abs().square().mean()


@on_ranks(2)
def test_complex_sparse_and_double_parameters_are_those_of_stock_ddp(rank: int) -> None:
    for exclude in ([], ["embed*", "turn", "exact.weight"]):
        _odd(rank, exclude)


def _odd(rank: int, exclude: list[str]) -> None:
    def model() -> DistributedDataParallel:
        torch.manual_seed(0)
        return DistributedDataParallel(Odd())

    stock, ours = model(), model()
    checks = thinwire.Checks(parity_every=1, resync_every=2)
    options: dict[str, Any] = {"skip_if_slower": False, "checks": checks}
    wire = thinwire.compress(ours, "minmax(bits=4)", exclude=exclude, min_numel=0, **options)
    assert set(wire.unsuited) == (set() if exclude else {"embed.weight", "exact.weight", "turn"})
    assert exclude or wire.unsuited["embed.weight"].startswith("its gradients are sparse (Embedding(sparse=True)), and")
    for step in range(4):
        samples = torch.randint(0, 50, (6,), generator=torch.Generator().manual_seed(10 * step + rank))
        for m in (stock, ours):
            m.zero_grad()
            m(samples).backward()
        sparse, complex_ = ours.module.embed.weight.grad, ours.module.turn.grad
        assert sparse is not None
        assert complex_ is not None
        assert sparse.is_sparse
        torch.testing.assert_close(sparse.to_dense(), stock.module.embed.weight.grad.to_dense())
        assert complex_.dtype == torch.complex64
        torch.testing.assert_close(complex_, stock.module.turn.grad)
        assert torch.equal(ours.module.exact.weight.grad, stock.module.exact.weight.grad)
        assert not torch.equal(ours.module.a.weight.grad, stock.module.a.weight.grad), "it was compressed"
    assert wire.stats.compressed_steps == 4
    assert wire.stats.resyncs == 1
    wire.detach()
    for name, why in (("embed.weight", "its gradients are sparse"), ("turn", "its dtype is torch.complex64")):
        with pytest.raises(TypeError, match=f"{name}: {why}"):
            thinwire.compress(model(), {name: "minmax", "*": "raw"}, **options)


def _memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _dropped_ddp(rank: int) -> None:
    model = linear()
    thinwire.compress(model, "ef(minmax(bits=4))", skip_if_slower=False)
    backward(model, rank)


def _dropped_fsdp(rank: int) -> None:
    model = sharded.build()
    wire = sharded.compress(model, "raw", "ef(minmax(bits=4))")
    sharded.train(model, 1)
    wire.gather_state_dict()


def _refused(rank: int) -> None:
    """Because of an argument, and because ranks disagree."""
    model = sharded.build()
    with pytest.raises(ValueError, match="weights must arrive in every step"):
        sharded.compress(model, "topk(density=0.1)", "raw")
    with pytest.raises(thinwire.DisagreementError):
        sharded.compress(model, f"minmax(bits={4 + rank}, bucket=64)", "raw")


@pytest.mark.parametrize(("cycle_of", "cycles"), [(_dropped_ddp, 16), (_dropped_fsdp, 16), (_refused, 12)])
@on_ranks(2)
def test_what_is_dropped_or_refused_leaves_no_threads_connections_or_memory(
    rank: int, cycle_of: Callable[[int], None], cycles: int
) -> None:
    for _ in range(6):
        cycle_of(rank)
    early, before = settled(None), _memory()
    for _ in range(6, cycles):
        cycle_of(rank)
    late = settled(early)
    # But for a thread that has been told to end.
    assert all(a <= b + 1 for a, b in zip(late, early, strict=True)), (early, late)
    assert _memory() - before < 6 << 20
