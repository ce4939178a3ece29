"""``python -m experiments intsgd``: the data, the regression, the workers, what is trained."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from experiments.framework.methods import TimedReduction
from experiments.papers.intsgd import datasets, world
from experiments.papers.intsgd.convex import METHODS
from experiments.papers.intsgd.paper import SMOKE
from harness import on_ranks, run_ranks


def _problem(rows: int = 61, features: int = 7, workers: int = 4) -> datasets.Logistic:
    from scipy.sparse import csr_matrix

    random = np.random.default_rng(1)
    values = random.normal(size=(rows, features)) * (random.random((rows, features)) < 0.6)
    labels = np.where(random.random(rows) < 0.5, -1.0, 1.0)
    return datasets.Logistic(datasets.Data("d", "here", csr_matrix(values), labels), workers)


def test_gradients_are_those_of_the_loss() -> None:
    pytest.importorskip("scipy")
    problem = _problem()
    assert problem.m == 15
    x = np.random.default_rng(2).normal(size=(7, 3))
    gradients, values = problem.gradients(x)
    rows, labels = problem.data.rows.toarray(), problem.data.labels
    for seed in range(3):
        each = []
        for i in range(4):
            a, b = rows[15 * i : 15 * i + 15], labels[15 * i : 15 * i + 15]
            margins = b * (a @ x[:, seed])
            each.append(np.log1p(np.exp(-margins)).mean() + 0.5 * problem.penalty * (x[:, seed] ** 2).sum())
            expected = -(a * (b / (1 + np.exp(margins)))[:, None]).mean(0) + problem.penalty * x[:, seed]
            assert gradients[i, :, seed] == pytest.approx(expected)
        assert values[seed] == pytest.approx(np.mean(each))


def test_differences_on_minibatches_have_the_full_ones_mean() -> None:
    pytest.importorskip("scipy")
    problem, random = _problem(), np.random.default_rng(3)
    x, w = random.normal(size=(7, 1)), random.normal(size=(7, 1))
    draw = world._stacked([world.counter_draws(0)])[1]
    found = np.mean([problem.differences(x, w, draw, step) for step in range(20_000)], axis=0)
    assert found == pytest.approx(problem.gradients(x)[0] - problem.gradients(w)[0], abs=0.02)


def test_smoothness_and_optimum() -> None:
    pytest.importorskip("scipy")
    problem = _problem()
    rows = problem.data.rows.toarray()[:60]
    exact = np.linalg.eigvalsh(rows.T @ rows / 60).max() / 4 + problem.penalty
    assert exact <= problem.smoothness() <= 1.01 * exact
    best = datasets.optimum(problem, problem.smoothness())
    assert best.value <= best.descent <= best.value + 1e-12


def _method(name: str) -> world.Method:
    return next(method for method in METHODS if method.name == name)


def test_without_rounding_shifts_change_nothing() -> None:
    pytest.importorskip("scipy")
    problem = _problem()
    gd, diana = (world.run(problem, _method(name), [0], 40, 0.5) for name in ("gd", "diana"))
    assert gd.values == pytest.approx(diana.values, rel=1e-12)
    assert gd.bits[-1, 0] == 32 * 40


def test_seeds_side_by_side_are_what_they_are_alone() -> None:
    pytest.importorskip("scipy")
    problem = _problem()
    for name in ("intdiana", "vr-intdiana", "intdiana coordinates"):
        both = world.run(problem, _method(name), [5, 6], 30, 0.5, every=10)
        alone = world.run(problem, _method(name), [6], 30, 0.5, every=10)
        assert both.values[:, 1] == pytest.approx(alone.values[:, 0], rel=1e-12)
        assert np.array_equal(both.largest_sent[:, 1], alone.largest_sent[:, 0])


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
