"""``python -m experiments intsgd``: what is trained."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from experiments.framework.methods import TimedReduction
from experiments.papers.intsgd.paper import SMOKE
from harness import on_ranks, run_ranks


def _reduced(rank: int) -> None:
    found = []
    for gather in (False, True):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(torch.nn.Linear(40, 40, bias=False))
        reduction = TimedReduction(ddp, gather=gather)
        ddp(torch.randn(8, 40, generator=torch.Generator().manual_seed(rank))).square().sum().backward()
        assert reduction.seconds > 0
        found.append(ddp.module.weight.grad)
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)
    torch.distributed.all_reduce(total := found[0].clone())
    assert torch.equal(total, 2 * found[0])


def test_plain_reductions_average() -> None:
    run_ranks(_reduced, 2)


LANGUAGE = SMOKE.words


def test_every_held_out_word_is_scored_once_and_without_dropout() -> None:
    model = dataclasses.replace(LANGUAGE, dropout=0.5).build(0)
    parts = [LANGUAGE.score(model, rank, 2, probe=False) for rank in (0, 1)]
    total, right, count = LANGUAGE.score(model, 0, 1, probe=False)
    assert sum(part[2] for part in parts) == count == LANGUAGE.held_out_windows * LANGUAGE.context
    assert sum(part[1] for part in parts) == right
    assert sum(part[0] for part in parts) == pytest.approx(total, rel=1e-5)
    assert total / count == pytest.approx(math.log(LANGUAGE.words), rel=0.1)


@pytest.mark.parametrize("clip_each_rank", [False, True])
@on_ranks(2)
def test_each_rank_may_clip_its_gradient_before_it_is_sent(rank: int, clip_each_rank: bool) -> None:
    language = dataclasses.replace(LANGUAGE, clip=0.01, clip_each_rank=clip_each_rank, dropout=0.3)
    model, sent = language.distribute(language.build(0)), []

    def hook(state, bucket):
        sent.append(bucket.buffer().clone())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, hook)
    optimizer = language.optimizer(model.module)
    loss = language.loss(model, next(language.batches(0, rank, 2)))
    loss.backward()
    optimizer.step()
    stepped = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert float(stepped) == pytest.approx(0.01, rel=1e-3)
    given = float(torch.cat(sent).norm())
    assert (given == pytest.approx(0.01, rel=1e-3)) if clip_each_rank else given > 0.05
    assert float(loss.detach()) == pytest.approx(math.log(LANGUAGE.words), rel=0.1)
