"""Models are copied, hold parameters that no compressor takes, and are dropped, as they would be under stock DDP."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import sharded
import thinwire
from harness import run_ranks


def linear(group: dist.ProcessGroup | None = None) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), process_group=group)


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


def _copies(rank: int) -> dict[str, tuple[bool, bool, bool]]:
    stock, model = linear(), linear()
    wire = thinwire.compress(model, "minmax(bits=4)", skip_if_slower=False)
    exact, sent = backward(stock, rank), backward(model, rank)
    found = {}
    for name, copied in COPIES.items():
        other = copied(model)
        uncompressed = backward(other, rank)
        second = thinwire.compress(other, "minmax(bits=4)", skip_if_slower=False)
        compressed = backward(other, rank)
        found[name] = (
            all(torch.equal(a, b) for a, b in zip(uncompressed, exact, strict=True)),
            all(torch.equal(a, b) for a, b in zip(compressed, sent, strict=True)),
            second.stats.compressed_steps == 1,
        )
        second.detach()
    # The copied model goes on as before.
    backward(model, rank, 1)
    assert wire.stats.compressed_steps == 2
    return found


def test_a_copy_of_a_compressed_model_is_a_stock_model_that_may_be_compressed() -> None:
    for answers in run_ranks(_copies, 2):
        assert answers == dict.fromkeys(COPIES, (True, True, True))


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


def _odd(rank: int, exclude: list[str]) -> None:
    def model() -> DistributedDataParallel:
        torch.manual_seed(0)
        return DistributedDataParallel(Odd())

    stock, ours = model(), model()
    checks = thinwire.Checks(parity_every=1, resync_every=2)
    options: dict[str, Any] = {"skip_if_slower": False, "checks": checks}
    wire = thinwire.compress(ours, "minmax(bits=4)", exclude=exclude, min_numel=0, **options)
    assert set(wire.unsuited) == (set() if exclude else {"embed.weight", "exact.weight", "turn"})
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


@pytest.mark.parametrize("exclude", [[], ["embed*", "turn", "exact.weight"]])
def test_complex_sparse_and_double_parameters_are_those_of_stock_ddp(exclude: list[str]) -> None:
    run_ranks(_odd, 2, exclude)


def _counts() -> tuple[int, int, int]:
    """Python's threads, the system's, and open files."""
    return threading.active_count(), len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def _dropped(rank: int, kind: str) -> list[tuple[int, int, int]]:
    """The counts after some models were compressed, trained and dropped without a word."""
    counts = []
    for i in range(6):
        if kind == "ddp":
            model = linear()
            wire: Any = thinwire.compress(model, "ef(minmax(bits=4))", skip_if_slower=False)
            backward(model, rank)
        else:
            model = sharded.build()
            wire = sharded.compress(model, "raw", "ef(minmax(bits=4))")
            sharded.train(model, 1)
            wire.gather_state_dict()
        del model, wire
        gc.collect()
        if i == 1:
            counts.append(_settled(None))
    return [*counts, _settled(counts[0])]


def _settled(wanted: tuple[int, int, int] | None) -> tuple[int, int, int]:
    """The counts, once threads that were told to end have ended: at most so long."""
    end = time.monotonic() + (3.0 if wanted is None else 40.0)
    while time.monotonic() < end:
        gc.collect()
        if wanted is not None and all(a <= b for a, b in zip(_counts(), wanted, strict=True)):
            break
        if wanted is None and threading.active_count() == 1:
            break
        time.sleep(0.1)
    return _counts()


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_model_that_is_dropped_leaves_no_threads_and_no_connections(kind: str) -> None:
    for early, late in run_ranks(_dropped, 2, kind):
        assert all(a <= b + 1 for a, b in zip(late, early, strict=True)), (early, late)


def _refused(rank: int) -> list[tuple[int, int, int]]:
    """The counts after calls that fail for a sharded model: because of an argument, and because ranks disagree."""
    model, counts = sharded.build(), []
    for i in range(6):
        with pytest.raises(ValueError, match="weights must arrive in every step"):
            sharded.compress(model, "topk(density=0.1)", "raw")
        with pytest.raises(thinwire.DisagreementError):
            sharded.compress(model, f"minmax(bits={4 + rank}, bucket=64)", "raw")
        if i == 1:
            counts.append(_settled(None))
    return [*counts, _settled(counts[0])]


def test_calls_that_are_refused_for_a_sharded_model_leave_no_threads_and_no_connections() -> None:
    for early, late in run_ranks(_refused, 2, timeout_s=60.0):
        assert all(a <= b + 1 for a, b in zip(late, early, strict=True)), (early, late)


def _over_a_part(rank: int) -> list[tuple[int, int, int]]:
    """The counts after models over two of three ranks were compressed and detached."""
    group, counts = dist.new_group([0, 1]), []
    for i in range(12 if rank < 2 else 0):
        model = linear(group)
        network = thinwire.Network(streams=2)
        wire = thinwire.compress(model, "minmax(bits=4)", skip_if_slower=False, network=network)
        backward(model, rank)
        wire.detach()
        if i in (1, 11):
            counts.append(_settled(counts[0] if counts else None))
    return counts


def test_models_over_a_part_of_the_world_that_are_detached_leave_nothing() -> None:
    for early, late in run_ranks(_over_a_part, 3, timeout_s=60.0)[:2]:
        assert all(a <= b + 1 for a, b in zip(late, early, strict=True)), (early, late)


def _cycles(rank: int) -> tuple[list[tuple[int, int, int]], list[int]]:
    """The counts after 20 and after 200 times of compressing, training and detaching one model, and its memory."""
    model, counts, memory = linear(), [], []
    for cycle in range(200):
        wire = thinwire.compress(model, "ef(minmax(bits=4))", skip_if_slower=False)
        backward(model, rank, cycle)
        assert wire.stats.compressed_steps == 1
        wire.detach()
        if cycle in (19, 199):
            counts.append(_settled(counts[0] if counts else None))
            memory.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    return counts, memory


@pytest.mark.timeout(240)
def test_compressing_and_detaching_200_times_leaves_nothing() -> None:
    for (early, late), memory in run_ranks(_cycles, 2, timeout_s=200.0):
        assert all(a <= b + 1 for a, b in zip(late, early, strict=True)), (early, late)
        assert memory[1] - memory[0] < 32 << 20
