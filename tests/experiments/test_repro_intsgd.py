"""``python -m experiments intsgd``: the data, the regression, the workers, what is trained."""

from __future__ import annotations

import bz2
import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import thinwire
from experiments.__main__ import main as experiments_main
from experiments.framework.methods import TimedReduction
from experiments.papers.intsgd import convex, datasets, figure_6, logistic, methods, world
from experiments.papers.intsgd.convex import METHODS, Source
from experiments.papers.intsgd.methods import NETWORKS
from experiments.papers.intsgd.paper import SMOKE
from experiments.tasks import words
from harness import run_ranks


def test_a_libsvm_file_is_one_more_data_set(tmp_path: Path) -> None:
    file = _write_libsvm(tmp_path / "little.txt", 60)
    scale = SMOKE.adapted(data=str(file))
    assert scale.sources == (*SMOKE.sources, Source("little", 40, 80, seeds=2, path=str(file)))
    big = tmp_path / "big.txt"
    big.write_bytes(b"x" * 2_500_000)
    assert convex.file_source(big, convex.SOURCES).steps == 500
    (found,) = convex.minimise(scale.sources[-1:], lambda _: None)
    assert convex.describe(found)["rows"] == 60
    assert found.traces["gd"].values[-1, 0] < found.traces["gd"].values[0, 0]


# --- the data


def _write_libsvm(path: Path, rows: int, labels: tuple[int, ...] = (-1, 1)) -> Path:
    random = np.random.default_rng(0)
    lines = []
    for row in range(rows):
        entries = " ".join(f"{column}:{random.normal():.3f}" for column in (1, 3, 7))
        lines.append(f"{labels[row % len(labels)]} {entries}\n")
    path.write_text("".join(lines))
    return path


def test_libsvm_files_are_read_plain_and_compressed_and_others_are_refused(tmp_path: Path, capsys: Any) -> None:
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
    assert "python -m experiments intsgd:" in capsys.readouterr().err


# --- logistic regression


def _problem(rows: int = 61, features: int = 7, workers: int = 4) -> logistic.Logistic:
    from scipy.sparse import csr_matrix

    random = np.random.default_rng(1)
    values = random.normal(size=(rows, features)) * (random.random((rows, features)) < 0.6)
    labels = np.where(random.random(rows) < 0.5, -1.0, 1.0)
    return logistic.Logistic(logistic.Data("d", "here", csr_matrix(values), labels), workers)


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
    best = logistic.optimum(problem, problem.smoothness())
    assert best.value <= best.descent <= best.value + 1e-12
    assert best.iterations < 5000
    with pytest.raises(ValueError, match="fewer than 80 workers"):
        logistic.Logistic(problem.data, 80)


# --- the workers


def _method(name: str) -> world.Method:
    return next(method for method in METHODS if method.name == name)


def test_without_rounding_shifts_change_nothing() -> None:
    pytest.importorskip("scipy")
    problem = _problem()
    gd, diana = (world.run(problem, _method(name), [0], 40, 0.5) for name in ("gd", "diana"))
    assert gd.values == pytest.approx(diana.values, rel=1e-12)
    assert gd.bits[-1, 0] == 32 * 40
    assert gd.gradients[-1, 0] == 40
    assert gd.largest_sent.max() == 0


def test_seeds_side_by_side_are_what_they_are_alone() -> None:
    pytest.importorskip("scipy")
    problem = _problem()
    for name in ("intdiana", "vr-intdiana", "intdiana coordinates"):
        both = world.run(problem, _method(name), [5, 6], 30, 0.5, every=10)
        alone = world.run(problem, _method(name), [6], 30, 0.5, every=10)
        assert both.values[:, 1] == pytest.approx(alone.values[:, 0], rel=1e-12)
        assert np.array_equal(both.largest_sent[:, 1], alone.largest_sent[:, 0])
        assert both.gradients[:, 1] == pytest.approx(alone.gradients[:, 0])
        assert both.steps.tolist() == [0, 10, 20, 30]


def test_int_gd_blows_up_and_int_diana_does_not() -> None:
    pytest.importorskip("scipy")
    problem = _problem()
    rate = 1 / problem.smoothness()
    best = logistic.optimum(problem, problem.smoothness()).value
    traces = {name: world.run(problem, _method(name), [0, 1], 200, rate) for name in ("gd", "intgd", "intdiana")}
    assert traces["intgd"].largest_sent[-1].min() > 1000 * traces["intdiana"].largest_sent.max()
    for trace in traces.values():
        assert trace.values[-1].max() - best < 1e-4 * (trace.values[0].min() - best)


def test_blocks_have_scales_of_their_own() -> None:
    edges = world._edges(3, 10)
    assert edges.tolist() == [0, 3, 6, 10]
    squares = np.array([[1.0], [4.0], [0.0]])
    alpha = world._scales(2 * 2 * squares, edges, d=10, eps=1e-3)[:, 0]
    expected = [math.sqrt(3 / (4 + 0.3e-6))] * 3 + [math.sqrt(3 / (16 + 0.3e-6))] * 3 + [math.sqrt(4 / 0.4e-6)] * 4
    assert alpha == pytest.approx(expected)
    assert world._edges("global", 10).tolist() == [0, 10]
    assert world._edges("coordinate", 3).tolist() == [0, 1, 2, 3]
    assert world.bits_of(np.array([0.0, 1.0, 2.0, 8.0])).tolist() == [1, 1, 2, 4]
    # The paper's own example: d = 10^10 and n = 100 are about 14 bits.
    assert 1 + math.log2(figure_6.bound(10**10, 100)) == pytest.approx(13.8, abs=0.1)


# --- the methods


def test_every_spec_is_a_compressor_and_means_what_its_title_says() -> None:
    for network in NETWORKS:
        for method in methods.METHODS:
            if method.kind == "thinwire":
                thinwire.parse(methods.on(network, method).spec)
    assert methods.on("pictures", methods.POWERSGD).spec == "powersgd(rank=2)"
    assert methods.on("words", methods.POWERSGD).spec == "powersgd(rank=4)"
    codec = thinwire.parse(methods.sensitive(0.5, 1e-4).spec)
    assert (getattr(codec, "beta", None), getattr(codec, "eps", None)) == (0.5, 1e-4)


def _reduced(rank: int) -> list[list[float]]:
    from torch.nn.parallel import DistributedDataParallel

    found = []
    for gather in (False, True):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(torch.nn.Linear(40, 40, bias=False))
        reduction = TimedReduction(ddp, gather=gather)
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(rank))
        ddp(x).square().sum().backward()
        weight = ddp.module.weight
        assert weight.grad is not None
        assert reduction.seconds > 0
        found.append(weight.grad.flatten().tolist())
    return found


def test_plain_reductions_average() -> None:
    (reduced, gathered), second = run_ranks(_reduced, 2)
    assert second == [reduced, gathered]
    assert gathered == pytest.approx(reduced, rel=1e-5, abs=1e-5)


# --- what is trained


@pytest.fixture(scope="module")
def language() -> words.LanguageTask:
    return SMOKE.words


def test_batches_are_a_function_of_seed_and_rank_rates_fall_and_norms_do_not_decay(
    language: words.LanguageTask,
) -> None:
    first, again, second = (list(language.batches(3, rank, 2)) for rank in (0, 0, 1))
    assert len(first) == language.steps
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, again, strict=True))
    assert any(not torch.equal(a[0], b[0]) for a, b in zip(first, second, strict=True))
    inputs, targets = first[0]
    assert inputs.shape == (language.batch, language.context)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert words.LanguageTask.from_json(dataclasses.asdict(language)) == language
    rates = [words.scheduled(1.0, step, 60, 10) for step in range(60)]
    assert rates[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert rates[10:] == pytest.approx([1.0] * 20 + [0.1] * 20 + [0.01] * 10)
    task = words.Pictures(width=8)
    groups = task.optimizer(task.build(0)).param_groups
    assert [group["weight_decay"] for group in groups] == [1e-4, 0]
    assert {parameter.ndim for parameter in groups[1]["params"]} == {1}


def test_every_held_out_word_is_scored_once_and_without_dropout(language: words.LanguageTask) -> None:
    model = dataclasses.replace(language, dropout=0.5).build(0)
    parts = [language.score(model, rank, 2, probe=False) for rank in (0, 1)]
    total, right, count = language.score(model, 0, 1, probe=False)
    assert model.training
    assert sum(part[2] for part in parts) == count == language.held_out_windows * language.context
    assert sum(part[1] for part in parts) == right
    assert sum(part[0] for part in parts) == pytest.approx(total, rel=1e-5)
    assert language.evaluate(model, 0, 1, probe=True)[1] == language.probe_windows * language.context
    assert total / count == pytest.approx(math.log(language.words), rel=0.1)


def _sent_norms(rank: int, clip_each_rank: bool) -> tuple[float, float, float]:
    """The norm of what a rank gives to be averaged, that of its gradient after the optimizer's step, and the loss."""
    language = dataclasses.replace(SMOKE.words, clip=0.01, clip_each_rank=clip_each_rank, dropout=0.3)
    model = language.distribute(language.build(0))
    sent: list[torch.Tensor] = []

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
    return float(torch.cat(sent).norm()), float(stepped), float(loss)


@pytest.mark.parametrize("clip_each_rank", [False, True])
def test_each_rank_may_clip_its_gradient_before_it_is_sent(clip_each_rank: bool) -> None:
    for sent, stepped, loss in run_ranks(_sent_norms, 2, clip_each_rank):
        assert stepped == pytest.approx(0.01, rel=1e-3)
        assert (sent == pytest.approx(0.01, rel=1e-3)) if clip_each_rank else sent > 0.05
        assert loss == pytest.approx(math.log(SMOKE.words.words), rel=0.1)
