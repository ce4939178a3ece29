"""IntDIANA as a compressor: the algorithm, where IntSGD stalls, checkpoints, steps not finite, other worlds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from test_wire import SHAPES, gradients, make, same, step_on
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from experiments.papers.intsgd import world
from experiments.papers.intsgd.world import Method
from harness import run_ranks, run_threads
from nets import assert_replicas_identical, batch, loss_of, make as make_model, resume, train, trained
from thinwire import Plan, Wire
from thinwire.plan import Filter
from thinwire.runtime import WireSettings

pytestmark = pytest.mark.filterwarnings("ignore:.*values were clipped")

NUMEL = sum(math.prod(shape) for shape in SHAPES.values())


class Convex:
    """``f_i(x) = ½ Σ_c s_ic (x_c − a_ic)²`` of every rank, whose mean is 1-smooth: the same optimum for nobody."""

    def __init__(self, num_ranks: int) -> None:
        random = torch.Generator().manual_seed(7)
        shares = 0.5 + torch.rand(num_ranks, NUMEL, generator=random)
        self.s = shares / shares.mean(0) * torch.logspace(-1.3, 0, NUMEL)
        self.a = 3 * torch.randn(num_ranks, NUMEL, generator=random)
        self.optimum = (self.s * self.a).sum(0) / self.s.sum(0)

    def gradients(self, x: torch.Tensor, rank: int) -> dict[str, torch.Tensor]:
        flat, found, start = self.s[rank] * (x - self.a[rank]), {}, 0
        for name, shape in SHAPES.items():
            found[name] = flat[start : start + math.prod(shape)].view(shape)
            start += math.prod(shape)
        return found


def descend(spec: str, num_ranks: int, steps: int = 160) -> tuple[list[float], float]:
    """Distances to the optimum by step, of the same gradient descent on all ranks, and the share that was clipped."""
    task = Convex(num_ranks)

    def run(transport):
        wire, x, distances = make(transport, spec), torch.zeros(NUMEL), []
        for _ in range(steps):
            means = step_on(wire, task.gradients(x, transport.rank))
            x = x - 0.5 * torch.cat([means[name].reshape(-1) for name in SHAPES])
            distances.append(float((x - task.optimum).norm()))
        return distances, wire.stats.clipped

    answers = run_threads(run, num_ranks)
    assert all(distances == answers[0][0] for distances, _ in answers)
    return answers[0]


@dataclass
class Workers:
    """`Convex` as the experiments take problems: points are [d, seeds], gradients [workers, d, seeds]."""

    task: Convex
    num_workers: int
    num_coordinates: int = NUMEL
    batch_share: float = 1.0

    def gradients(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        s, a = (values.double().numpy()[:, :, None] for values in (self.task.s, self.task.a))
        return s * (x - a), 0.5 * (s * (x - a) ** 2).sum(1).mean(0)

    def differences(self, x, w, uniform, step) -> np.ndarray:
        raise NotImplementedError


def test_it_is_the_algorithm_that_the_experiments_run() -> None:
    """Rounded to nearest by both."""
    problem, method = Workers(Convex(3), 3), Method("intdiana", "IntDIANA", shifts=True, integers=True)

    def halves(seed: int):
        return (lambda step, shape: np.full(shape, 0.5),) * 3

    expected = world.run(problem, method, [0], 40, 0.5, draws=halves).values[:, 0]

    def run(transport):
        shapes = {"x": (NUMEL,)}
        plan = Plan.build(shapes, "intdiana(bits=32, rounding=determ)", Filter(min_dim=1))
        wire, x, values = Wire(plan, shapes, transport, WireSettings()), torch.zeros(NUMEL), []
        for _ in range(41):
            values.append(problem.gradients(x.double().numpy()[:, None])[1][0])
            wire.begin_step()
            gradient = problem.task.s[transport.rank] * (x - problem.task.a[transport.rank])
            x = x - 0.5 * wire.reduce(gradient, (("x", (NUMEL,)),)).wait()
        return values

    least = problem.gradients(problem.task.optimum.double().numpy()[:, None])[1][0]
    found = np.array(run_threads(run, 3)[0])
    assert expected[-1] - least < 0.1 * (expected[0] - least)
    np.testing.assert_allclose(found - least, expected - least, rtol=1e-3)


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_it_converges_linearly_with_two_bits_where_ranks_disagree(num_ranks: int) -> None:
    distances, clipped = descend("intdiana(bits=2)", num_ranks)
    assert distances[80] < 0.2 * distances[0]
    assert distances[-1] < 0.2 * distances[80]
    assert clipped < 0.05


@pytest.mark.parametrize("spec", ["intsgd(bits=2)", "intsgd(bits=8)"])
def test_intsgd_stalls_there(spec: str) -> None:
    distances, _ = descend(spec, 3)
    assert distances[-1] > 0.5 * distances[80]


def _sends(rank: int, spec: str) -> tuple[float, dict]:
    torch.manual_seed(0)
    model = DDP(torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 256)))
    wire = thinwire.compress(model, spec, skip_if_slower=False)
    sent = []
    for step in range(3):
        before = wire.stats.payload_sent_bytes
        model(torch.randn(8, 512, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean().backward()
        sent.append(wire.stats.payload_sent_bytes - before)
    assert sent[2] == sent[1] == wire.wire_bytes_per_step()
    numel = sum(p.numel() for p in model.parameters())
    num_ranks = torch.distributed.get_world_size()
    return 8 * sent[2] / (2 * (num_ranks - 1) / num_ranks * numel), wire.stats.to_dict()


@pytest.mark.parametrize(("num_ranks", "bits"), [(2, 2.5), (4, 3.0)])
@pytest.mark.parametrize("spec", ["intdiana(bits=2)", "intsgd(bits=2)"])
def test_two_bits_take_at_most_three_over_gloo(spec: str, num_ranks: int, bits: float) -> None:
    """A rank's bytes on the wire, all of them counted, as bits of a ring all-reduce's coordinates."""
    for found, _ in run_ranks(_sends, num_ranks, spec):
        assert bits < found < 1.05 * bits


# ---- The algorithm --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
@pytest.mark.parametrize("spec", ["intdiana(bits=2)", "intdiana(bits=8, block=global, beta=0.9)", "intdiana(bits=32)"])
def test_the_mean_shift_is_the_mean_of_the_shifts_and_what_arrived(spec: str, num_ranks: int) -> None:
    def run(transport):
        wire, found = make(transport, spec), []
        for step in range(5):
            means = step_on(wire, gradients(transport.rank, step), loss_scale=8.0)
            found.append((means, wire.state_dict()))
        return found

    answers = run_threads(run, num_ranks)
    for step in range(5):
        for rank, found in enumerate(answers):
            means, state = found[step]
            assert same(means, answers[0][step][0])
            for name in SHAPES:
                assert torch.equal(state[f"rank{rank}/mean_shift/{name}"].view(SHAPES[name]), means[name])
        for name, shape in SHAPES.items():
            shifts = [answers[rank][step][1][f"rank{rank}/shift/{name}"] for rank in range(num_ranks)]
            assert torch.allclose(torch.stack(shifts).mean(0).view(shape), answers[0][step][0][name], atol=1e-5)
            if step == 0:
                assert torch.equal(shifts[0].view(shape), gradients(0, 0)[name])


def test_what_arrives_is_unbiased_where_nothing_is_clipped() -> None:
    """Of gradients near the shifts: the mean over seeds of what arrives is the mean gradient."""

    def near(rank: int, step: int) -> dict[str, torch.Tensor]:
        moved = gradients(rank, 10 + step)
        return {name: 10 * x + 0.1 * step * moved[name] for name, x in gradients(rank, 0).items()}

    def run(transport):
        total = torch.zeros(SHAPES["b.weight"])
        for seed in range(60):
            wire = make(transport, "intdiana(bits=4)", seed=seed)
            step_on(wire, near(transport.rank, 0))
            total += step_on(wire, near(transport.rank, 1))["b.weight"] / 60
            assert wire.stats.saturated == 0
        return total

    wanted = torch.stack([near(rank, 1)["b.weight"] for rank in range(2)]).mean(0)
    first = torch.stack([near(rank, 0)["b.weight"] for rank in range(2)]).mean(0)
    for total in run_threads(run, 2):
        # The standard deviation of one seed is half of a unit of 2·√2·|mean| at most.
        unit = 2 * float(first.square().mean().sqrt())
        off = (total - wanted) / (unit / math.sqrt(60))
        assert float(off.square().mean()) < 0.5
        assert abs(float(off.mean())) < 5 * float(off.std()) / 64


# ---- State ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_step_that_is_not_finite_leaves_no_trace(poison: float) -> None:
    def run(transport):
        wire = make(transport, "intdiana(bits=2)")
        for step in range(3):
            step_on(wire, gradients(transport.rank, step))
        before = wire.state_dict()
        means = step_on(wire, gradients(transport.rank, 3, poison if transport.rank == 1 else None))
        assert bool(torch.isnan(means["b.weight"]).all())
        assert bool(torch.isfinite(means["a.weight"]).all())
        after = wire.state_dict()
        slots = [key for key in before if "/" in key]
        assert slots
        assert all(torch.equal(before[key], after[key]) for key in slots)
        return step_on(wire, gradients(transport.rank, 4)), wire.stats.nonfinite_steps

    answers = run_threads(run, 3)
    for means, skipped in answers:
        assert skipped == 1
        assert same(means, answers[0][0])
        assert all(bool(torch.isfinite(mean).all()) for mean in means.values())


@pytest.mark.parametrize("poison", [math.nan, -math.inf])
def test_a_first_step_that_is_not_finite_is_made_again(poison: float) -> None:
    def run(transport):
        wire = make(transport, "intdiana(bits=2)")
        step_on(wire, gradients(transport.rank, 0, poison if transport.rank == 0 else None))
        return step_on(wire, gradients(transport.rank, 1))

    exact = [gradients(rank, 1) for rank in range(2)]
    for means in run_threads(run, 2):
        for name, mean in means.items():
            assert torch.allclose(mean, torch.stack([g[name] for g in exact]).mean(0), atol=1e-6)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (3, 1)])
def test_in_another_world_all_ranks_start_from_the_mean_shift(before: int, after: int) -> None:
    def first(transport):
        wire = make(transport, "intdiana(bits=2)")
        for step in range(3):
            step_on(wire, gradients(transport.rank, step))
        return wire.state_dict()

    merged = {key: value for state in run_threads(first, before) for key, value in state.items()}

    def second(transport):
        wire = make(transport, "intdiana(bits=2)")
        wire.load_state_dict(merged)
        return wire.state_dict(), step_on(wire, gradients(transport.rank, 3))

    answers = run_threads(second, after)
    for rank, (state, means) in enumerate(answers):
        assert same(means, answers[0][1])
        for name in SHAPES:
            mean = merged[f"rank0/mean_shift/{name}"]
            assert torch.equal(state[f"rank{rank}/mean_shift/{name}"], mean)
            assert torch.allclose(state[f"rank{rank}/shift/{name}"], mean, atol=1e-5)


def _resumes(rank: int, spec: str) -> tuple[bytes, bytes]:
    def attach(model: DDP, **options: int) -> tuple[torch.optim.Optimizer, thinwire.Wire]:
        optimizer = torch.optim.SGD(trained(model), lr=0.03, momentum=0.9)
        return optimizer, thinwire.compress(model, spec, skip_if_slower=False, **options)

    straight, resumed, _ = resume(rank, partial(attach, seed=9), attach, at=4, steps=8)
    return straight, resumed


@pytest.mark.parametrize("spec", ["intdiana(bits=2)", "intsgd(bits=2)", "intsgd(bits=4, block=global)"])
def test_resume_is_bit_identical(spec: str) -> None:
    for straight, resumed in run_ranks(_resumes, 2, spec):
        assert straight == resumed


def _trains(rank: int, spec: str, dtype: torch.dtype) -> tuple[list[float], int]:
    model = make_model(rank, dtype=dtype)
    wire = thinwire.compress(model, spec, skip_if_slower=False, checks=thinwire.Checks(1))
    losses = train(model, rank, 30, lr=0.03)
    assert_replicas_identical(model)
    return losses, wire.stats.parity_checks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("spec", "num_ranks"), [("intdiana(bits=2)", 3), ("intsgd(bits=4)", 3), ("intsgd(bits=2)", 2)])
def test_it_trains_and_replicas_stay_identical(spec: str, num_ranks: int, dtype: torch.dtype) -> None:
    for losses, checks in run_ranks(_trains, num_ranks, spec, dtype):
        assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
        assert checks == 30


def _simulated(rank: int, simulate: bool) -> torch.Tensor:
    model = make_model(rank)
    thinwire.compress(model, "intdiana(bits=2)", skip_if_slower=False, simulate=simulate)
    for step in range(4):
        model.zero_grad()
        loss_of(model, batch(rank, step)).backward()
    return torch.cat([p.grad.reshape(-1) for p in trained(model) if p.grad is not None])


def test_simulation_gives_what_integers_would() -> None:
    real, simulated = (run_ranks(_simulated, 3, simulate)[1] for simulate in (False, True))
    assert torch.allclose(real, simulated, rtol=1e-4, atol=1e-6)


def test_the_loss_scale_changes_no_bit() -> None:
    def run(transport, scale: float):
        wire = make(transport, "intdiana(bits=2)")
        return [step_on(wire, gradients(transport.rank, step), loss_scale=scale) for step in range(4)]

    plain, scaled = (run_threads(partial(run, scale=scale), 2)[0] for scale in (1.0, 4096.0))
    assert all(same(a, b) for a, b in zip(plain, scaled, strict=True))
