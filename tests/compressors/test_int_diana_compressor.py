"""IntDIANA as a compressor: the algorithm, where IntSGD stalls, steps not finite, other worlds."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from test_wire import SHAPES, gradients, make, same, step_on

from harness import run_threads

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


def descend(spec: str, num_ranks: int, steps: int = 120) -> tuple[list[float], float]:
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


def test_it_converges_linearly_with_two_bits_where_ranks_disagree_and_intsgd_stalls() -> None:
    distances, clipped = descend("intdiana(bits=2)", 3)
    assert distances[60] < 0.3 * distances[0]
    assert distances[-1] < 0.3 * distances[60]
    assert clipped < 0.05
    distances, _ = descend("intsgd(bits=8)", 3)
    assert distances[-1] > 0.5 * distances[60]


@pytest.mark.parametrize(
    ("spec", "num_ranks"), [("intdiana(bits=2)", 3), ("intdiana(bits=8, block=global, beta=0.9)", 5)]
)
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


@pytest.mark.parametrize("spec", ["intdiana(bits=2)", "intsgd(bits=8)"])
def test_a_first_step_that_is_not_finite_is_made_again(spec: str) -> None:
    def run(transport):
        wire = make(transport, spec)
        step_on(wire, gradients(transport.rank, 0, -math.inf if transport.rank == 0 else None))
        return step_on(wire, gradients(transport.rank, 1))

    exact = [gradients(rank, 1) for rank in range(2)]
    for means in run_threads(run, 2):
        for name, mean in means.items():
            assert torch.allclose(mean, torch.stack([g[name] for g in exact]).mean(0), atol=1e-6)


@pytest.mark.parametrize("spec", ["intdiana(bits=2)", "intsgd(bits=8)"])
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
def test_in_another_world_all_ranks_start_from_the_mean_shift_and_the_scales(
    before: int, after: int, spec: str
) -> None:
    def first(transport):
        wire = make(transport, spec)
        for step in range(3):
            step_on(wire, gradients(transport.rank, step))
        return wire.state_dict()

    merged = {key: value for state in run_threads(first, before) for key, value in state.items()}

    def second(transport):
        wire = make(transport, spec)
        wire.load_state_dict(merged)
        return wire.state_dict(), step_on(wire, gradients(transport.rank, 3)), wire.stats.encoded

    answers = run_threads(second, after)
    for rank, (state, means, encoded) in enumerate(answers):
        assert same(means, answers[0][1])
        assert encoded == (NUMEL if after > 1 else 0)
        for name, slot in product(SHAPES, ("mean_shift", "r")):
            if f"rank0/{slot}/{name}" in merged:
                assert torch.equal(state[f"rank{rank}/{slot}/{name}"], merged[f"rank0/{slot}/{name}"])
        for name in SHAPES if "diana" in spec else ():
            assert torch.allclose(state[f"rank{rank}/shift/{name}"], merged[f"rank0/mean_shift/{name}"], atol=1e-5)
