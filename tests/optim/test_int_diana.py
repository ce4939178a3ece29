"""IntDIANA: against a transcription of the algorithm, on quadratics, over gloo, resumed, refused."""

from __future__ import annotations

import copy
import io
import math
import warnings
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from experiments.papers.intsgd import world
from harness import run_ranks, run_threads
from thinwire.collectives import LoopbackTransport, Transport
from thinwire.kernels import derive_key, site_id
from thinwire.kernels.rng import random16, row_key
from thinwire.optim import IntDIANA
from thinwire.optim.integers import IntegerSum, bits_of

# The keys of the optimizer's draws.
ROUNDING, COIN, SHARED = 1, 2, -1

Estimator = Literal["gd", "minibatch", "lsvrg"]


class Quadratic:
    """``f_i(x) = (1/m) Σ_j ½ Σ_c s_jc (x_c − a_jc)²`` of every worker: the same minimum for nobody."""

    def __init__(self, workers: int, coordinates: int, samples: int, dtype: torch.dtype = torch.float64) -> None:
        random = torch.Generator().manual_seed(7)
        self.a = torch.randn(workers, samples, coordinates, generator=random, dtype=torch.float64)
        self.a += 3 * torch.randn(workers, 1, coordinates, generator=random, dtype=torch.float64)
        self.s = 0.5 + torch.rand(workers, samples, coordinates, generator=random, dtype=torch.float64)
        self.a, self.s = self.a.to(dtype), self.s.to(dtype)

    @property
    def optimum(self) -> Tensor:
        return (self.s * self.a).sum((0, 1)) / self.s.sum((0, 1))

    def loss(self, x: Tensor, worker: int, picked: Tensor | slice = slice(None)) -> Tensor:
        a, s = self.a[worker][picked], self.s[worker][picked]
        return 0.5 * (s * (x - a) ** 2).sum(-1).mean()

    def pick(self, step: int, worker: int) -> Tensor:
        """The mini-batch of a step."""
        samples = self.a.shape[1]
        return torch.randint(samples, (2,), generator=torch.Generator().manual_seed(1000 * worker + step))


def train(
    transport: Transport, task: Quadratic, steps: int, parts: tuple[int, ...], **options: Any
) -> tuple[list[Tensor], IntDIANA]:
    """The points after every step, and the optimizer."""
    dtype = task.a.dtype
    pieces = [torch.nn.Parameter(torch.zeros(numel, dtype=dtype)) for numel in parts]
    optimizer = IntDIANA(pieces, transport=transport, **options)
    points = [
        _point(pieces) for step in range(steps) if _step(optimizer, pieces, task, transport.rank, step) is not None
    ]
    return points, optimizer


def _point(pieces: list[torch.nn.Parameter]) -> Tensor:
    return torch.cat([piece.detach() for piece in pieces])


def _step(optimizer: IntDIANA, pieces: list[torch.nn.Parameter], task: Quadratic, rank: int, step: int) -> float:
    def closure(picked: Tensor | slice) -> Callable[[], float]:
        def evaluate() -> float:
            loss = task.loss(torch.cat(list(pieces)), rank, picked)
            loss.backward()
            return float(loss.detach())

        return evaluate

    estimator = optimizer.param_groups[0]["estimator"]
    if estimator == "lsvrg":
        return optimizer.step(closure(task.pick(step, rank)), closure(slice(None)))
    return optimizer.step(closure(task.pick(step, rank) if estimator == "minibatch" else slice(None)))


# --- the algorithm


class _Transcribed:
    """The same quadratic for `world.run`, which is algorithm 3 in numpy."""

    batch_share = 2.0

    def __init__(self, task: Quadratic) -> None:
        self.task = task
        self.num_workers, _, self.num_coordinates = task.a.shape

    def gradients(self, x: Any) -> tuple[Any, Any]:
        a, s = self.task.a.numpy(), self.task.s.numpy()
        each = s * (x[:, 0] - a)
        value = 0.5 * (s * (x[:, 0] - a) ** 2).sum(-1).mean()
        return each.mean(1)[:, :, None], np.array([value])

    def differences(self, x: Any, w: Any, uniform: Any, step: int) -> Any:
        found = []
        for worker in range(self.num_workers):
            s = self.task.s[worker][self.task.pick(step, worker)].numpy()
            found.append((s * (x - w)[:, 0]).mean(0))
        return np.stack(found)[:, :, None]


def _draws(workers: int, parts: tuple[int, ...]) -> Callable[[int], tuple[Any, Any, Any]]:
    """The draws that the optimizer takes, for the transcription."""

    def of(seed: int) -> tuple[Any, Any, Any]:
        def rounding(step: int, shape: tuple[int, ...]) -> Any:
            rows = []
            for worker in range(workers):
                key = derive_key(seed, step, ROUNDING, worker)
                parts_of = [
                    random16(0, numel, *row_key(key, site_id(str(index))), torch.device("cpu"))
                    for index, numel in enumerate(parts)
                ]
                rows.append(torch.cat(parts_of).numpy() / 65536.0)
            return np.stack(rows)

        def coin(step: int, shape: tuple[int, ...]) -> Any:
            return np.array([derive_key(seed, step, COIN, SHARED) / 2**64])

        return rounding, rounding, coin

    return of


@pytest.mark.parametrize("estimator", ["gd", "lsvrg"])
@pytest.mark.parametrize(("block", "blocks"), [("global", "global"), ("layer", 2), ("coordinate", "coordinate")])
@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_it_is_the_algorithm(
    estimator: Estimator, block: str, blocks: str | int, beta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, steps, parts = Quadratic(3, 8, 5), 25, (4, 4)
    options = {"lr": 0.3, "estimator": estimator, "p": 0.3, "block": block, "beta": beta, "seed": 11}
    found = run_threads(lambda transport: train(transport, task, steps, parts, **options), 3)
    method = world.Method("", "", shifts=True, integers=True, reference=estimator == "lsvrg", blocks=blocks)
    problem, points = _Transcribed(task), []
    evaluate = problem.gradients
    monkeypatch.setattr(problem, "gradients", lambda x: (points.append(x[:, 0].copy()), evaluate(x))[1])
    draws = _draws(3, parts)
    trace = world.run(problem, method, [11], steps, 0.3, p=0.3, beta=beta, every=1, draws=draws)
    for own, optimizer in found:
        # The transcription looks at its last point last.
        np.testing.assert_allclose(own[-1].numpy(), points[-1], rtol=1e-5, atol=2e-6)
        values = [float(np.mean([task.loss(point, worker) for worker in range(3)])) for point in own]
        np.testing.assert_allclose(values, trace.values[1:, 0], rtol=1e-5)
        assert optimizer.stats.steps == steps
    assert max(optimizer.stats.largest_sent for _, optimizer in found) == int(trace.largest_sent.max())
    assert found[0][1].stats.largest_sum == int(trace.largest_sum.max())


@pytest.mark.parametrize("estimator", ["gd", "lsvrg"])
@pytest.mark.parametrize("bits", [8, 32])
def test_it_converges_linearly_where_workers_disagree(estimator: Estimator, bits: int) -> None:
    task = Quadratic(4, 40, 6)
    found = run_threads(
        lambda transport: train(transport, task, 200, (30, 10), lr=0.3, estimator=estimator, p=0.3, bits=bits), 4
    )
    for points, optimizer in found:
        errors = [float((point - task.optimum).norm()) for point in points]
        assert errors[-1] < 1e-7 * errors[0]
        assert errors[99] < 1e-3 * errors[0]
        # While the shifts are those of the start, and never again, is there much to send.
        assert optimizer.stats.last_sent <= 8
    assert len({tuple(points[-1].tolist()) for points, _ in found}) == 1


def test_without_shifts_the_integers_would_blow_up() -> None:
    problem = _Transcribed(Quadratic(4, 40, 6))
    ways = [world.Method("", "", shifts=shifts, integers=True) for shifts in (False, True)]
    without, with_shifts = (world.run(problem, way, [0], 60, 0.5) for way in ways)
    assert without.largest_sent[-1] > 1e5
    assert with_shifts.largest_sent.max() < 20


class _Convex:
    """``f_i(x) = ½ Σ_c s_ic (x_c − a_ic)²`` whose mean is 1-smooth and 1/20-strongly convex, for `world.run`."""

    num_workers, num_coordinates, batch_share = 4, 64, 1.0
    smoothness, convexity = 1.0, 0.05

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        shares = random.uniform(0.5, 1.5, (self.num_workers, self.num_coordinates))
        self.s = shares / shares.mean(0) * np.geomspace(self.convexity, self.smoothness, self.num_coordinates)
        self.a = 3 * random.normal(size=self.s.shape)
        self.optimum = ((self.s * self.a).sum(0) / self.s.sum(0))[:, None]
        self.points: list[Any] = []

    def gradients(self, x: Any) -> tuple[Any, Any]:
        self.points.append(x.copy())
        return self.s[:, :, None] * (x - self.a[:, :, None]), np.zeros(x.shape[1])

    def differences(self, x: Any, w: Any, uniform: Any, step: int) -> Any:
        raise NotImplementedError

    def descent(self, constant: float, rate: float, steps: int) -> tuple[Any, Any, Any]:
        """Means over 40 seeds, by step: ``‖x − x*‖²``, ``‖g̃‖²``, and of the rounding's error ``‖g̃ − ∇f(x)‖²``."""
        self.points.clear()
        world.run(self, world.Method("", "", shifts=True, integers=True, constant=constant), range(40), steps, rate)
        points = np.stack(self.points)
        estimates = (points[:-1] - points[1:]) / rate
        errors = estimates - self.s.mean(0)[:, None] * (points[:-1] - self.optimum)
        return tuple((v**2).sum(1).mean(1) for v in (points - self.optimum, estimates, errors))


@pytest.mark.parametrize(("constant", "weight", "rate", "contraction"), [(1, 1, 1 / 2, 1 / 2), (2, 3, 1 / 4, 2 / 3)])
def test_theorem_4s_lyapunov_function_contracts(
    constant: float, weight: float, rate: float, contraction: float
) -> None:
    """With α = √d / (√(cn)·‖g̃_before‖) the rounding's variance is at most d/(4nα²) = c/4·‖g̃_before‖².

    Hence E‖g̃‖² ≤ 2L(f − f*) + c/4·‖g̃_before‖², and descent on a μ-strongly convex f contracts
    V = ‖x − x*‖² + A·η²·‖g̃_before‖² by max(1 − ημ, (1 + A)/A · c/4) for η ≤ 1/((1 + A)L).
    """
    task = _Convex()
    distances, squares, errors = task.descent(constant, rate / task.smoothness, 150)
    assert np.all(errors[1:] <= constant / 4 * squares[:-1])
    assert np.median(errors[1:] / squares[:-1]) > constant / 8
    potentials = distances[1:-1] + weight * rate**2 * squares[:-1]
    assert np.all(potentials[1:] <= max(1 - rate * task.convexity, contraction) * potentials[:-1])
    assert potentials[-1] < 0.03 * potentials[0]


def test_the_rounding_of_two_ns_costs_no_step_and_that_of_more_than_four_diverges() -> None:
    """The bound of the contraction needs c < 4. At η = 1/L: c = 2 is as fast as c = 1, and c = 8 diverges."""
    task = _Convex()
    last = {constant: task.descent(constant, 1.0, 120)[0] for constant in (1, 2, 8)}
    rates = {constant: (found[-1] / found[20]) ** (1 / (len(found) - 21)) for constant, found in last.items()}
    assert rates[1] == pytest.approx((1 - task.convexity) ** 2, rel=0.02)
    assert rates[2] == pytest.approx(rates[1], rel=0.01)
    assert rates[8] > 1


def test_minibatches_are_rounded_without_bias() -> None:
    task = Quadratic(2, 20, 6)
    found = run_threads(lambda t: train(t, task, 400, (20,), lr=0.05, estimator="minibatch", beta=0.9), 2)
    points = found[0][0]
    mean = torch.stack(points[100:]).mean(0)
    assert float((mean - task.optimum).norm()) < 0.25 * float((points[-1] - points[-2]).norm() + task.optimum.norm())


def test_the_first_step_is_exact() -> None:
    task = Quadratic(3, 10, 4)
    for points, optimizer in run_threads(lambda t: train(t, task, 1, (10,), lr=0.1), 3):
        gradient = torch.stack([(task.s[i] * -task.a[i]).mean(0) for i in range(3)]).mean(0)
        torch.testing.assert_close(points[0], -0.1 * gradient, rtol=1e-12, atol=0)
        assert optimizer.stats.largest_sent == 0
        assert optimizer.stats.sent_bytes == 2 * 2 * 10 * 8 // 3


# --- ranks


def _parameters(rank: int) -> list[torch.nn.Parameter]:
    # Different on every rank: what rank 0 has counts.
    random = torch.Generator().manual_seed(rank)
    return [torch.nn.Parameter(torch.randn(numel, generator=random)) for numel in (5, 3)]


def _rank(rank: int, steps: int, resume_at: int, estimator: str) -> tuple[list[float], int, float]:
    task = Quadratic(2, 8, 6, torch.float32)
    pieces = _parameters(rank)
    optimizer = IntDIANA(pieces, 0.2, estimator=estimator, p=0.4, bits=8, seed=3)  # pyright: ignore[reportArgumentType]
    for step in range(steps):
        if step == resume_at:
            buffer = io.BytesIO()
            torch.save({"x": pieces, "optimizer": optimizer.state_dict()}, buffer)
            buffer.seek(0)
            saved = torch.load(buffer, weights_only=True)
            pieces = saved["x"]
            optimizer = IntDIANA(pieces, 0.7, estimator="gd", seed=99)
            optimizer.load_state_dict(saved["optimizer"])
        _step(optimizer, pieces, task, rank, step)
    return _point(pieces).tolist(), optimizer.stats.sent_bytes, float((_point(pieces) - task.optimum).norm())


@pytest.mark.parametrize("estimator", ["gd", "minibatch", "lsvrg"])
def test_replicas_over_gloo_are_identical_and_resume_bit_for_bit(estimator: str) -> None:
    first, second = run_ranks(_rank, 2, 30, -1, estimator)
    assert first[0] == second[0]
    resumed = run_ranks(_rank, 2, 30, 13, estimator)
    assert [answer[0] for answer in resumed] == [first[0], first[0]]
    # Padded to 64 bytes a parameter, and two flags; in a ring of two a rank sends what it has once.
    assert first[1] == 8 * 4 + 29 * (64 + 64 + 2)
    if estimator == "gd":
        assert first[2] < 1e-2


def _beside_a_message(rank: int) -> tuple[list[float], list[float]]:
    """What arrives of a message that is under way in the same process group while steps are made, and the weights."""
    note = torch.full((64,), 5.0 * rank)
    sending = dist.isend(note, 0) if rank == 1 else None
    parameters = _parameters(0)
    optimizer = IntDIANA(parameters, lr=0.1)

    def closure() -> float:
        loss = sum((p - rank).square().sum() for p in parameters)
        assert isinstance(loss, Tensor)
        loss.backward()
        return float(loss.detach())

    for _ in range(3):
        optimizer.step(closure)
    if sending is None:
        dist.recv(note, 1)
    else:
        sending.wait()
    return note.tolist(), _point(parameters).tolist()


def test_a_message_of_the_user_in_the_same_group_is_left_alone() -> None:
    (note, weights), (_, others) = run_ranks(_beside_a_message, 2)
    assert note == [5.0] * 64
    assert weights == others


def test_a_world_of_one() -> None:
    task = Quadratic(1, 6, 4)
    pieces = [torch.nn.Parameter(torch.zeros(6, dtype=torch.float64))]
    optimizer = IntDIANA(pieces, 0.3)
    for step in range(120):
        _step(optimizer, pieces, task, 0, step)
    assert float((_point(pieces) - task.optimum).norm()) < 1e-6
    assert optimizer.stats.sent_bytes == 0


def test_groups_have_learning_rates_of_their_own() -> None:
    task = Quadratic(1, 6, 4)
    still, moving = (torch.nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(2))
    optimizer = IntDIANA([{"params": [still], "lr": 0.0}, {"params": [moving]}], 0.3)
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    for step in range(50):
        _step(optimizer, [still, moving], task, 0, step)
    assert float(still.detach().abs().max()) == 0
    assert float((moving.detach() - task.optimum[3:]).norm()) < 1e-2
    torch.testing.assert_close(still.grad, (task.s[0] * -task.a[0]).mean(0)[:3], rtol=1e-2, atol=1e-2)


# --- what is counted


def test_gradients_are_counted_and_integers_recorded() -> None:
    task = Quadratic(2, 16, 6)
    options: dict[str, Any] = {"lr": 0.2, "estimator": "lsvrg", "p": 0.25, "seed": 5}
    optimizer = run_threads(lambda transport: train(transport, task, 40, (16,), **options), 2)[0][1]
    coins = sum(derive_key(5, step, COIN, SHARED) < 0.25 * 2**64 for step in range(1, 40))
    assert 3 < coins < 20
    stats = optimizer.stats
    assert stats.evaluations == 1 + 2 * 39 + coins
    assert stats.values == 39 * 16
    assert 0 < stats.last_sent <= stats.largest_sent
    assert stats.bits_per_coordinate == 1 + math.log2(max(1, stats.last_sent))
    assert [bits_of(largest) for largest in (0, 1, 2, 4)] == [1, 1, 2, 3]


def test_integers_never_overflow_and_clipping_is_reported() -> None:
    # Gradients that grow a thousandfold from one step to the next, and 8 bits among 100.
    def grow(transport: Transport) -> tuple[int, float, list[float]]:
        x = torch.nn.Parameter(torch.zeros(4))
        optimizer = IntDIANA([x], 0.0, bits=8, transport=transport)
        for size in (1e-3, 1.0, 1.0, 1.0):
            optimizer.step(lambda size=size: (x * size).sum().backward())
        assert x.grad is not None
        return optimizer.stats.largest_sent, optimizer.stats.clipped_share, x.grad.tolist()

    with pytest.warns(UserWarning, match=r"clips 100\.0%.*bits=32"):
        found = run_threads(grow, 100)
    assert {largest for largest, _, _ in found} == {1}
    assert found[0][1] > 0
    for total in (found[0][2], found[57][2]):
        assert all(0.1 < value < 2 for value in total)


@pytest.mark.parametrize(("num_ranks", "bits"), [(1, 8), (127, 8), (1024, 32), (3, 32)])
def test_the_clip_leaves_room_for_all_ranks(num_ranks: int, bits: int) -> None:
    transport = LoopbackTransport.world(num_ranks)[0]
    clip = IntegerSum([4], bits, transport).clip
    assert clip >= 1
    assert num_ranks * clip <= 2 ** (bits - 1) - 1 < num_ranks * (clip + 1)


def test_alpha_is_finite_when_gradients_vanish() -> None:
    x = torch.nn.Parameter(torch.ones(4))
    optimizer = IntDIANA([x], 0.1)
    for size in (0.0, 0.0, 1.0, 0.0, 1e-30, 1e30, 1e30):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step(lambda size=size: (x * size).sum().backward())
        assert bool(torch.isfinite(x).all())
        assert bool(torch.isfinite(optimizer.state[x]["rms"]))


# --- errors


def test_a_gradient_that_is_not_finite_changes_nothing_on_any_rank() -> None:
    def poisoned(transport: Transport) -> list[float]:
        x, y = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
        optimizer = IntDIANA([x, y], 0.1, transport=transport)
        for _ in range(2):
            optimizer.step(lambda: (x.square() + y.square()).sum().backward())
        before, state = _point([x, y]).tolist(), copy.deepcopy(optimizer.state_dict())
        bad = math.nan if transport.rank == 1 else 1.0
        with pytest.raises(FloatingPointError, match="parameter 1 of 2"):
            optimizer.step(lambda: (x.square() + bad * y).sum().backward())
        assert _point([x, y]).tolist() == before
        for key, value in state["state"][0].items():
            assert torch.equal(value, optimizer.state_dict()["state"][0][key])
        optimizer.step(lambda: (x.square() + y.square()).sum().backward())
        return _point([x, y]).tolist()

    first, second = run_threads(poisoned, 2)
    assert first == second


def test_the_reference_point_is_left_again_when_the_closure_fails() -> None:
    task, pieces = Quadratic(1, 4, 4), [torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))]
    optimizer = IntDIANA(pieces, 0.1, estimator="lsvrg")
    for step in range(3):
        _step(optimizer, pieces, task, 0, step)
    before, calls = _point(pieces), []

    def fails_at_the_reference() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyError
        pieces[0].sum().backward()

    with pytest.raises(KeyError):
        optimizer.step(fails_at_the_reference, fails_at_the_reference)
    assert torch.equal(_point(pieces), before)


def test_states_of_other_ranks_and_worlds_are_refused() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    worlds = LoopbackTransport.world(1), LoopbackTransport.world(2)

    class Deaf(LoopbackTransport):
        def broadcast(self, x: Tensor) -> None:
            pass

    for transport in worlds[1]:
        transport.__class__ = Deaf
    alone, first, second = (IntDIANA(parameters, 0.1, transport=t) for t in (worlds[0][0], *worlds[1]))
    with pytest.raises(ValueError, match="world_size 1, this process has 2"):
        first.load_state_dict(alone.state_dict())
    with pytest.raises(ValueError, match="has rank 0, this process has 1"):
        second.load_state_dict(first.state_dict())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lr": -1.0}, ValueError, "lr"),
        ({"estimator": "sgd"}, ValueError, "estimator"),
        ({"block": "row"}, ValueError, "block"),
        ({"bits": 16}, ValueError, "8 or 32"),
        ({"p": 0.0}, ValueError, "p must"),
        ({"beta": 1.0}, ValueError, "beta"),
        ({"eps": 0.0}, ValueError, "eps"),
        ({"seed": -1}, ValueError, "seed"),
        ({"bits": 8, "transport": LoopbackTransport.world(128)[0]}, ValueError, "take bits=32"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        IntDIANA([torch.nn.Parameter(torch.zeros(2))], **{"lr": 0.1, **options})


def test_wrong_parameters_closures_and_groups_are_refused() -> None:
    with pytest.raises(TypeError, match="master copy"):
        IntDIANA([torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))], 0.1)
    with pytest.raises(NotImplementedError, match="CPU"):
        IntDIANA([torch.nn.Parameter(torch.zeros(2, device="meta"))], 0.1)
    x, y = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = IntDIANA([x], 0.1)
    with pytest.raises(TypeError, match="closure"):
        optimizer.step(None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="second one"):
        IntDIANA([y], 0.1, estimator="lsvrg").step(lambda: None)
    with pytest.raises(ValueError, match="only lr may differ"):
        optimizer.add_param_group({"params": [y], "beta": 0.5})
    optimizer.step(lambda: x.sum().backward())
    with pytest.raises(RuntimeError, match="make a new one"):
        optimizer.add_param_group({"params": [y]})
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    with pytest.raises(TypeError, match="dense"):
        IntDIANA(embedding.parameters(), 0.1).step(lambda: embedding(torch.tensor([1])).sum().backward())
