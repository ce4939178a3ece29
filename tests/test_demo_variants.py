"""The ways in which the demo's gradients travel, on real ranks."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import Tensor

from thinwire.repro.gpt import GPTConfig, next_token_loss
from thinwire.repro.train import POWERSGD_RANK, VARIANTS, Replica, Task, distributed

TASK = Task(model=GPTConfig(context=16, width=32, layers=2, heads=2), bucket_cap_mb=0.05)
STEPS = 4


def _gradients(rank: int, name: str) -> tuple[list[Tensor], float, float | None]:
    """Gradients after some backward passes on batches that differ between ranks, and the bytes they took."""
    torch.set_num_threads(1)
    replica = Replica(TASK)
    ddp = distributed(replica, VARIANTS[name])
    attached = VARIANTS[name].attach(ddp, TASK)
    tokens = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(rank))
    for _ in range(STEPS):
        replica.optimizer.zero_grad()
        next_token_loss(ddp(tokens[:, :-1]), tokens[:, 1:]).backward()
    found = [parameter.grad.clone() for parameter in replica.parameters if parameter.grad is not None]
    sizes = attached.payload_bytes(STEPS), attached.formula_bytes()
    attached.detach()
    dist.barrier()
    return found, *sizes


def _error(found: list[Tensor], exact: list[Tensor]) -> float:
    difference = sum(float((a - b).square().sum()) for a, b in zip(found, exact, strict=True))
    return (difference / sum(float(b.square().sum()) for b in exact)) ** 0.5


@pytest.fixture(scope="module")
def exact() -> list[Tensor]:
    one, other = (answer[0] for answer in run_ranks(_gradients, 2, "fp32"))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    return one


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("bf16", 1e-4, 2**-8),
        ("thinwire", 0.01, 0.2),
        ("powersgd", 1e-3, 0.9),
        ("control", 0.5, 50.0),
    ],
)
def test_ranks_agree_and_the_error_is_that_of_the_format(
    exact: list[Tensor], name: str, least: float, most: float
) -> None:
    (one, *_), (other, *_) = run_ranks(_gradients, 2, name)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert least < _error(one, exact) < most


def test_without_communication_every_rank_has_its_own_gradient(exact: list[Tensor]) -> None:
    (one, *_), (other, *_) = run_ranks(_gradients, 2, "noop")
    assert _error(one, exact) > 0.1
    assert _error([(a + b) / 2 for a, b in zip(one, other, strict=True)], exact) < 1e-6


def test_powersgd_bytes_are_two_dense_steps_and_then_the_factors() -> None:
    (_, sent, _), _ = run_ranks(_gradients, 2, "powersgd")
    dense = factors = 0
    for parameter in Replica(TASK).parameters:
        numel, rows = parameter.numel(), parameter.shape[0]
        dense += numel
        low = (rows + numel // rows) * POWERSGD_RANK
        factors += low if parameter.ndim > 1 and 2 * low < numel else numel
    assert factors < dense
    # Two ranks: a ring all-reduce sends each byte once.
    assert sent == 4 * (2 * dense + (STEPS - 2) * factors)


def test_thinwire_sends_the_formulas_bytes_in_every_step() -> None:
    (_, sent, formula), _ = run_ranks(_gradients, 2, "thinwire")
    assert formula is not None
    # The first step has other DDP buckets, so other headers.
    assert sent == pytest.approx(STEPS * formula, rel=0.05)


def test_one_bucket_is_one_bucket() -> None:
    assert run_ranks(_buckets, 2, "powersgd") == [1, 1]
    assert run_ranks(_buckets, 2, "fp32")[0] > 3


def _buckets(rank: int, name: str) -> int:
    replica = Replica(TASK)
    ddp = distributed(replica, dataclasses.replace(VARIANTS[name]))
    seen: list[int] = []
    ddp.register_comm_hook(seen, _note)
    tokens = torch.randint(256, (2, 17))
    for _ in range(3):
        seen.clear()
        next_token_loss(ddp(tokens[:, :-1]), tokens[:, 1:]).backward()
    return len(seen)


def _note(state, bucket):
    state.append(bucket.index())
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
