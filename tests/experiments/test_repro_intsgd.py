"""``python -m experiments intsgd``: the small version from end to end, the workers, the data, the judging."""

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
from experiments.papers.intsgd.paper import PAPER, SMOKE, IntSGDStudy
from experiments.tasks import words
from harness import run_ranks
from small_versions import Small, small_version

# --- the command


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    for name in ("sklearn", "matplotlib", "scipy"):
        pytest.importorskip(name)
    return small_version("intsgd", IntSGDStudy, tmp_path_factory.mktemp("intsgd"))


def test_the_small_version_makes_every_figure_and_judges_every_claim(small: Small) -> None:
    assert small.code == 0, small.shown
    for name in ("1", "2", "3", "4", "5", "6-breast_cancer", "6-digits"):
        assert (small.out / f"fig{name}.svg").read_text().startswith("<?xml")
    assert {f"{claim.figure}/{claim.row}" for claim in PAPER.claims} <= small.rows.keys()
    assert small.steps == {name: part.steps(SMOKE) for name, part in PAPER.parts.items()}
    assert small.rows["6/bits/intdiana"]["holds"] is True
    for table in ("2", "3"):
        for method in methods.METHODS:
            row = small.rows[f"{table}/step_s/{method.name}"]
            assert 0 < row["communication_s"] < row["value"]
            assert (row["overhead_s"] > 0) == (method.kind == "thinwire")
        # One seed and one round decide nothing.
        assert small.rows[f"{table}/quality/intsgd"]["holds"] is None
        assert small.rows[f"{table}/communication/intsgd over sgd"]["holds"] is None
    assert small.rows["6/gap/digits/gd"]["bits_per_coordinate"][-1] == 32 * 40
    assert len(small.rows["5/sensitivity/words"]["values"]) == 3


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parts", "a", "d"], "choose among a b times c"),
        (["--rate", "fast"], "not a rate"),
        (["--data", "/nonexistent/folder"], "unpack the binary version"),
    ],
)
def test_wrong_arguments_are_refused_and_nothing_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    out = tmp_path / "out"
    assert experiments_main(["intsgd", "--smoke", "--out", str(out), *arguments]) == 64
    assert message in " ".join(capsys.readouterr().err.split())
    assert not out.exists()


# --- the data


def _write_libsvm(path: Path, rows: int, labels: tuple[int, ...] = (-1, 1)) -> Path:
    random = np.random.default_rng(0)
    lines = []
    for row in range(rows):
        entries = " ".join(f"{column}:{random.normal():.3f}" for column in (1, 3, 7))
        lines.append(f"{labels[row % len(labels)]} {entries}\n")
    path.write_text("".join(lines))
    return path


def test_libsvm_files_are_read_plain_and_compressed(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    plain = _write_libsvm(tmp_path / "two.txt", 30, labels=(1, 2))
    squeezed = tmp_path / "two.bz2"
    squeezed.write_bytes(bz2.compress(plain.read_bytes()))
    first, second = datasets.libsvm(plain), datasets.libsvm(squeezed)
    assert first.rows.shape == (30, 7)
    assert first.labels.tolist() == [-1.0, 1.0] * 15
    assert (first.rows != second.rows).nnz == 0
    assert first.name == "two"


@pytest.mark.parametrize(
    ("rows", "labels", "message"), [(30, (0, 1, 2), "3 classes"), (30, (1,), "1 classes"), (20, (0, 1), "20 rows")]
)
def test_libsvm_files_of_another_kind_are_refused(
    tmp_path: Path, rows: int, labels: tuple[int, ...], message: str
) -> None:
    pytest.importorskip("sklearn")
    with pytest.raises(ValueError, match=message):
        datasets.libsvm(_write_libsvm(tmp_path / "odd.txt", rows, labels))


def test_a_file_that_is_none_of_libsvms_is_an_error_of_the_command(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("sklearn")
    file = tmp_path / "words.txt"
    file.write_text("one two three\n" * 40)
    assert experiments_main(["intsgd", "--smoke", "--parts", "a", "--data", str(file)]) == 64
    assert "python -m experiments intsgd:" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a5a", "mushrooms"])
def test_made_data_have_their_shapes_and_differ_between_workers(name: str) -> None:
    pytest.importorskip("scipy")
    shape = datasets.SHAPES[name]
    first, again = datasets.made(name, shape), datasets.made(name, shape)
    assert first.rows.shape == (shape.rows, shape.features)
    assert first.rows.nnz == shape.rows * shape.categories
    assert (first.labels > 0).mean() == pytest.approx(shape.positive, abs=0.01)
    assert (first.rows != again.rows).nnz == 0
    assert np.array_equal(first.labels, again.labels)
    ends = first.rows[: shape.rows // 12].mean(0), first.rows[-(shape.rows // 12) :].mean(0)
    assert float(np.abs(ends[0] - ends[1]).max()) > 0.2


def test_made_words_are_as_many_as_they_should_be() -> None:
    pytest.importorskip("scipy")
    shape = dataclasses.replace(datasets.SHAPES["real-sim"], rows=2000)
    found = datasets.made("real-sim", shape)
    assert found.rows.shape == (2000, 20958)
    # Some words are drawn twice.
    assert 0.8 * shape.entries < found.rows.nnz / 2000 < shape.entries
    norms = np.sqrt(found.rows.multiply(found.rows).sum(1))
    assert np.asarray(norms) == pytest.approx(1.0)


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


def test_draws_are_functions_of_seed_purpose_and_step() -> None:
    of = world.counter_draws(3)
    assert np.array_equal(of[0](7, (4, 2)), world.counter_draws(3)[0](7, (4, 2)))
    others = [of[0](8, (4, 2)), of[1](7, (4, 2)), world.counter_draws(4)[0](7, (4, 2))]
    assert not any(np.array_equal(of[0](7, (4, 2)), other) for other in others)


# --- judging


def test_the_bound_is_that_of_section_4_2() -> None:
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
    assert len({method.name for method in methods.METHODS}) == len(methods.METHODS)


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


def test_the_learning_rate_warms_up_and_falls_twice() -> None:
    rates = [words.scheduled(1.0, step, 60, 10) for step in range(60)]
    assert rates[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert rates[10:30] == [1.0] * 20
    assert rates[30:50] == pytest.approx([0.1] * 20)
    assert rates[50:] == pytest.approx([0.01] * 10)


def test_norms_have_no_weight_decay() -> None:
    task = words.Pictures(width=8)
    groups = task.optimizer(task.build(0)).param_groups
    assert [group["weight_decay"] for group in groups] == [1e-4, 0]
    assert {parameter.ndim for parameter in groups[1]["params"]} == {1}


@pytest.fixture(scope="module")
def language() -> words.LanguageTask:
    return SMOKE.words


def test_words_are_a_function_of_seed_and_rank(language: words.LanguageTask) -> None:
    first, again, second = (list(language.batches(3, rank, 2)) for rank in (0, 0, 1))
    assert len(first) == language.steps
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, again, strict=True))
    assert any(not torch.equal(a[0], b[0]) for a, b in zip(first, second, strict=True))
    inputs, targets = first[0]
    assert inputs.shape == (language.batch, language.context)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert int(inputs.max()) < language.words
    assert words.LanguageTask.from_json(dataclasses.asdict(language)) == language


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


def test_gradients_of_words_are_clipped_before_a_step(language: words.LanguageTask) -> None:
    model = language.build(0)
    optimizer = language.optimizer(model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 10.0)
    optimizer.step()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert float(norm) == pytest.approx(language.clip, rel=1e-3)


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
