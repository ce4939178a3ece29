"""The ways in which the demo's gradients travel, on real ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from harness import run_ranks
from thinwire_tools.compare.gpt import GPTConfig, next_token_loss
from thinwire_tools.compare.tasks import GPTTask
from thinwire_tools.compare.variants import VARIANTS, Attached

TASK = GPTTask(model=GPTConfig(context=16, width=32, layers=2, heads=2), bucket_cap_mb=0.05)
STEPS = 4


def _attached(name: str) -> tuple[DistributedDataParallel, torch.optim.Optimizer, Attached]:
    ddp, optimizer = VARIANTS[name].prepare(TASK, TASK.build(0))
    return ddp, optimizer, VARIANTS[name].attach(ddp, optimizer, 0)


def _backward(ddp: DistributedDataParallel, rank: int, steps: int) -> Tensor:
    tokens = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(rank))
    for _ in range(steps):
        ddp.zero_grad()
        next_token_loss(ddp(tokens[:, :-1]), tokens[:, 1:]).backward()
    return torch.cat([p.grad.flatten() for p in ddp.parameters() if p.grad is not None])


def _of_ranks(mine: Tensor) -> tuple[Tensor, Tensor]:
    gathered = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(gathered, mine)
    return gathered[0], gathered[1]


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def _sends_gradients(rank: int) -> None:
    torch.set_num_threads(1)
    found = {}
    for name in VARIANTS:
        ddp, _, attached = _attached(name)
        found[name] = _of_ranks(_backward(ddp, rank, STEPS))
        assert name != "local" or attached.sent(STEPS) == 0
        attached.close()
    exact, (one, other) = found["fp32"][0], found["alone"]
    assert torch.equal(exact, found["fp32"][1])
    assert _error(one, exact) > 0.1
    assert _error((one + other) / 2, exact) < 1e-6
    assert not torch.equal(*found["local"])
    limits = {"bf16": (1e-4, 2**-8), "thinwire": (0.01, 0.2), "powersgd": (1e-3, 0.9), "control": (0.5, 50.0)}
    for name, (least, most) in limits.items():
        assert torch.equal(*found[name]), name
        assert least < _error(found[name][0], exact) < most, name


def test_ranks_agree_and_the_error_is_that_of_the_format() -> None:
    run_ranks(_sends_gradients, 2)


def _note(state, bucket):
    state.add(bucket.index())
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _rest(rank: int) -> None:
    for name in ("local", "muloco"):
        ddp, optimizer, attached = _attached(name)
        for _ in range(VARIANTS[name].every + 2):
            _backward(ddp, rank, 1)
            optimizer.step()
        sent = attached.sent(0)
        attached.finish()
        attached.close()
        ends = torch.nn.utils.parameters_to_vector(ddp.parameters()).detach()
        assert 0 < sent < ends.numel()
        assert torch.equal(*_of_ranks(ends))
    for name, buckets in (("powersgd", 1), ("fp32", 2)):
        seen: set[int] = set()
        ddp, _ = VARIANTS[name].prepare(TASK, TASK.build(0))
        ddp.register_comm_hook(seen, _note)
        _backward(ddp, rank, 3)
        assert len(seen) == buckets


def test_local_updates_are_sent_once_a_round_and_at_the_end_and_powersgd_gets_one_bucket() -> None:
    run_ranks(_rest, 2)
