"""``python -m experiments intsgd``: the data, the regression, the workers, what is trained."""

from __future__ import annotations

import bz2
import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from experiments.__main__ import main as experiments_main
from experiments.framework.replicas import TimedReduction
from experiments.papers.intsgd import datasets, world
from experiments.papers.intsgd.convex import METHODS
from experiments.papers.intsgd.paper import SMOKE
from harness import on_ranks, run_ranks


def _write_libsvm(path: Path, rows: int, labels: tuple[int, ...] = (-1, 1)) -> Path:
    random = np.random.default_rng(0)
    lines = []
    for row in range(rows):
        entries = " ".join(f"{column}:{random.normal():.3f}" for column in (1, 3, 7))
        lines.append(f"{labels[row % len(labels)]} {entries}\n")
    path.write_text("".join(lines))
    return path


def test_libsvm_files_are_read_plain_and_compressed_and_others_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    plain = _write_libsvm(tmp_path / "two.txt", 30, labels=(1, 2))
    squeezed = tmp_path / "two.bz2"
    squeezed.write_bytes(bz2.compress(plain.read_bytes()))
    first, second = datasets.libsvm(plain), datasets.libsvm(squeezed)
    assert first.rows.shape == (30, 7)
    assert first.labels.tolist() == [-1.0, 1.0] * 15
    assert (first.rows != second.rows).nnz == 0
    for rows, labels, message in ((30, (0, 1, 2), "3 classes"), (30, (1,), "1 classes"), (20, (0, 1), "20 rows")):
        with pytest.raises(ValueError, match=message):
            datasets.libsvm(_write_libsvm(tmp_path / "odd.txt", rows, labels))
    plain.write_text("one two three\n" * 40)
    assert experiments_main(["intsgd", "--smoke", "--parts", "a", "--data", str(plain)]) == 64


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
    draw = world.draws([0], 1)
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
    for name in ("intdiana", "vr-intdiana"):
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
