"""The ways in which the demo's gradients travel, on real ranks."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from harness import run_ranks
from thinwire_tools.compare.gpt import GPTConfig, next_token_loss
from thinwire_tools.compare.tasks import GPTTask
from thinwire_tools.compare.variants import VARIANTS, Attached

TASK = GPTTask(model=GPTConfig(context=16, width=32, layers=2, heads=2), bucket_cap_mb=0.05)
STEPS = 4


@dataclasses.dataclass
class Sent:
    """What a rank ended up with after some backward passes on batches that differ between ranks."""

    gradients: list[Tensor]
    payload_bytes: float
    formula_bytes: float | None


def _send_all(rank: int) -> dict[str, Sent]:
    torch.set_num_threads(1)
    return {name: _send(rank, name) for name in VARIANTS}


def _attached(name: str) -> tuple[DistributedDataParallel, torch.optim.Optimizer, Attached]:
    model = TASK.build(0)
    ddp, optimizer = VARIANTS[name].prepare(TASK, model)
    return ddp, optimizer, VARIANTS[name].attach(ddp, optimizer, 0)


def _send(rank: int, name: str) -> Sent:
    ddp, _, attached = _attached(name)
    _backward(ddp, rank, STEPS)
    gradients = [parameter.grad.clone() for parameter in ddp.parameters() if parameter.grad is not None]
    sent = Sent(gradients, attached.sent(STEPS), attached.formula())
    attached.close()
    return sent


def _backward(ddp: DistributedDataParallel, rank: int, steps: int) -> None:
    tokens = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(rank))
    for _ in range(steps):
        ddp.zero_grad()
        next_token_loss(ddp(tokens[:, :-1]), tokens[:, 1:]).backward()


def _error(found: list[Tensor], exact: list[Tensor]) -> float:
    difference = sum(float((a - b).square().sum()) for a, b in zip(found, exact, strict=True))
    return (difference / sum(float(b.square().sum()) for b in exact)) ** 0.5


def _equal(found: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, other, strict=True))


@pytest.fixture(scope="module")
def sent() -> list[dict[str, Sent]]:
    return run_ranks(_send_all, 2)


def test_ranks_agree_and_the_error_is_that_of_the_format(sent: list[dict[str, Sent]]) -> None:
    limits = {"bf16": (1e-4, 2**-8), "thinwire": (0.01, 0.2), "powersgd": (1e-3, 0.9), "control": (0.5, 50.0)}
    for name, (least, most) in limits.items():
        one, other = (rank[name].gradients for rank in sent)
        assert _equal(one, other)
        assert least < _error(one, sent[0]["fp32"].gradients) < most


def test_fp32_is_the_mean_and_without_communication_every_rank_keeps_its_own(sent: list[dict[str, Sent]]) -> None:
    exact, one, other = sent[0]["fp32"].gradients, sent[0]["alone"].gradients, sent[1]["alone"].gradients
    assert _equal(exact, sent[1]["fp32"].gradients)
    assert _error(one, exact) > 0.1
    assert _error([(a + b) / 2 for a, b in zip(one, other, strict=True)], exact) < 1e-6


def test_local_updates_send_nothing_with_gradients(sent: list[dict[str, Sent]]) -> None:
    assert not _equal(sent[0]["local"].gradients, sent[1]["local"].gradients)
    assert sent[0]["local"].payload_bytes == 0


def _trained_locally(rank: int, name: str) -> tuple[float, list[Tensor]]:
    """A round of steps and two more, and the end of the training."""
    ddp, optimizer, attached = _attached(name)
    for _ in range(VARIANTS[name].every + 2):
        _backward(ddp, rank, 1)
        optimizer.step()
    sent = attached.sent(0)
    attached.finish()
    attached.close()
    return sent, [parameter.detach() for parameter in ddp.parameters()]


def _count_buckets(rank: int) -> dict[str, int]:
    counts = {}
    for name in ("powersgd", "fp32"):
        seen: set[int] = set()
        ddp, _ = VARIANTS[name].prepare(TASK, TASK.build(0))
        ddp.register_comm_hook(seen, _note)
        _backward(ddp, rank, 3)
        counts[name] = len(seen)
    return counts


def _note(state, bucket):
    state.add(bucket.index())
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _rest(rank: int) -> tuple[list[tuple[float, list[Tensor]]], dict[str, int]]:
    return [_trained_locally(rank, name) for name in ("local", "muloco")], _count_buckets(rank)


def test_local_updates_are_sent_once_a_round_and_at_the_end_and_powersgd_gets_one_bucket() -> None:
    (ours, buckets), (others, same) = run_ranks(_rest, 2)
    for (sent, one), (_, other) in zip(ours, others, strict=True):
        assert 0 < sent < sum(parameter.numel() for parameter in one)
        assert _equal(one, other)
    assert buckets == same == {"powersgd": 1, "fp32": 2}
