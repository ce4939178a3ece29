"""The Wire over threads: both ways of meeting, slots, checkpoints, other world sizes."""

from __future__ import annotations

import math
import time

import pytest
import torch

from harness import on_threads, run_threads
from states import resealed
from thinwire import Plan, TransportError, Wire
from thinwire.plan import Filter
from thinwire.runtime import BucketEngine, WireSettings

SHAPES = {"a.weight": (40, 100), "a.bias": (40,), "b.weight": (64, 64), "c.weight": (30, 70), "scalar": ()}
MIXED = {"a.weight": "ef(minmax(bits=2))", "b.weight": "ef(randk(density=0.2))", "c.*": "cast(bf16)", "scalar": "raw"}
BUCKETS = (("scalar", "c.weight"), ("b.weight", "a.bias", "a.weight"))


def make(transport, rules, **settings) -> Wire:
    return Wire(BucketEngine(Plan.build(SHAPES, rules, Filter()), SHAPES, transport, WireSettings(**settings)))


def gradients(rank: int, step: int, poison: float | None = None) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    found = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    if poison is not None:
        found["b.weight"][3, 3] = poison
    return found


def step_on(wire: Wire, found: dict[str, torch.Tensor], buckets=BUCKETS, loss_scale=1.0) -> dict[str, torch.Tensor]:
    """One backward pass with these buckets; the mean gradients."""
    wire.engine.begin_step()
    means, futures = {}, []
    for names in buckets:
        flat = torch.cat([found[name].reshape(-1) for name in names]) * loss_scale
        layers = tuple((name, SHAPES[name]) for name in names)
        futures.append((names, wire.engine.reduce(flat, layers, loss_scale=loss_scale)))
    for names, future in futures:
        flat, start = future.wait() / loss_scale, 0
        for name in names:
            numel = math.prod(SHAPES[name])
            means[name] = flat[start : start + numel].view(SHAPES[name])
            start += numel
    return means


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


OWING = [
    *("ef(minmax(bits=2))", "ef(minmax(bits=1, rounding=nearest))", "ef(randk(density=0.1))", "ef(qsgd(bits=6))"),
    *("ef(maxabs(bits=2, scale=row))", "ef(lattice(bits=1, bucket=128))", "ef(terngrad)", "onebit", "sign"),
    *("sign(bucket=128)", "ef(natural)", "ef(levels(bits=1, bucket=128, learn_at=(0, 3), min_numel=0))"),
    *("ef(rangefloat(bits=4))", "topk(density=0.05)", "topk(density=0.05, select=sampled)"),
    *("topk(density=0.05) | minmax(bits=4)", "threshold(lam=1.5)", "globaltopk(density=0.05)"),
    *("fft(theta=0.9, block=256)", "fft(theta=((0, 0.95), (3, 0.5)))", "powersgd(rank=1)"),
    *("ef(intsgd(bits=8, rounding=determ))", "ef(heuristic_intsgd(bits=8))"),
]
"""Rules under which there is a residual: error feedback, by name or by default."""


@pytest.mark.parametrize("rules", OWING)
def test_the_residual_plus_what_arrived_is_what_was_given_in_a_world_of_any_size(rules: str) -> None:
    """Law 7 across ranks: Σ inputs/n = Σ outputs + (Σ worker residuals)/n + owner residuals."""
    num_ranks, steps = 3, 6

    def trained(transport):
        wire = make(transport, rules)
        outputs = [step_on(wire, gradients(transport.rank, step)) for step in range(steps)]
        return outputs, wire.state_dict()

    def loaded(states, num_ranks: int):
        def run(transport):
            wire = make(transport, rules)
            wire.load_state_dict({key: value for state in states for key, value in state.items()})
            return wire.state_dict()

        return run_threads(run, num_ranks)

    answers = run_threads(trained, num_ranks)
    states = [state for _, state in answers]
    # A world of one has the residual of all ranks of the old one, also where another world was in between.
    (alone,), (by_two,) = loaded(states, 1), loaded(loaded(states, 2), 1)
    for name in ("a.weight", "b.weight", "c.weight"):
        given = sum(gradients(rank, step)[name] for rank in range(num_ranks) for step in range(steps)) / num_ranks
        arrived = sum(means[name] for means in answers[0][0])
        residual = alone[f"rank0/residual/{name}"]
        assert torch.allclose(given, arrived + residual, atol=1e-4), name
        assert float(residual.abs().max()) > 0.01
        assert torch.allclose(residual, by_two[f"rank0/residual/{name}"], atol=1e-5), name


MANY = {
    "a.weight": "powersgd(rank=2)",
    "a.bias": "ef(levels(bits=2, bucket=128, learn_at=(0, 1), min_numel=0))",
    "b.weight": "dgc(topk(density=0.05))",
    "c.*": "globaltopk(density=0.1)",
}
SCHEDULES = {"*": "fft(theta=((0, 0.9), (4, 0.5)))", "b.weight": "powersgd(rank=((0, 6), (4, 2)))"}


@pytest.mark.filterwarnings("ignore:load_state_dict.. continues with the compressors of the checkpoint")
@pytest.mark.parametrize(
    "rules", [MIXED, MANY, SCHEDULES, "ef(topk(density=0.02), bits=8)", "ef(rangefloat(bits=8, learn_at=(0, 4)))"]
)
@on_threads(2)
def test_resume_is_bit_identical_also_through_other_buckets(transport, rules) -> None:
    straight, resumed = make(transport, rules, seed=5), make(transport, "minmax(bits=4)")
    for step in range(3):
        step_on(straight, gradients(transport.rank, step))
    resumed.load_state_dict(straight.state_dict())
    for step, buckets in ((3, (("a.weight", "a.bias", "b.weight", "c.weight", "scalar"),)), (4, BUCKETS)):
        found = gradients(transport.rank, step)
        assert same(step_on(straight, found), step_on(resumed, found, buckets))


def test_a_schedule_of_ranks_is_followed() -> None:
    def run(transport) -> list[int]:
        wire = make(transport, {"b.weight": "powersgd(rank=((0, 6), (2, 3)))"})
        means = [step_on(wire, gradients(transport.rank, step))["b.weight"] for step in range(4)]
        return [int(torch.linalg.matrix_rank(mean, rtol=1e-4)) for mean in means]

    assert run_threads(run, 2) == [[6, 6, 3, 3]] * 2


def test_a_layer_trained_later_gets_its_compressor() -> None:
    def run(transport):
        shapes = {name: shape for name, shape in SHAPES.items() if name != "b.weight"}
        wire = Wire(BucketEngine(Plan.build(shapes, "ef(minmax(bits=2))"), shapes, transport))
        means = step_on(wire, gradients(transport.rank, 0))
        assert str(wire.plan["b.weight"]) == "ef(minmax(bits=2, bucket=128))"
        assert f"rank{transport.rank}/residual/b.weight" in wire.state_dict()
        return means

    first, second = run_threads(run, 2)
    assert same(first, second)


WRONG_STATES = {
    "not the state of a Wire: step missing": lambda s: s.pop("step"),
    "wire format 99": lambda s: s.update(format_version=torch.tensor(99)),
    "lacks rank0/residual/a.weight": lambda s: s.pop("rank0/residual/a.weight"),
    "has 3 elements": lambda s: s.update({"rank0/residual/a.weight": torch.zeros(3)}),
    "other layers": lambda s: s.update(plan=torch.tensor(list(b'{"x": "raw"}'), dtype=torch.uint8)),
    "JSON object": lambda s: s.update(plan=torch.tensor(list(b"[1]"), dtype=torch.uint8)),
    "lacks rank1/residual": lambda s: s.update(shares=torch.tensor([1, 1, 1])),
    "which no world does": lambda s: s.update(shares=torch.tensor([1, -1])),
}


@on_threads(1)
def test_a_wrong_state_is_refused(transport) -> None:
    wire = make(transport, MIXED)
    for message, change in WRONG_STATES.items():
        state = wire.state_dict()
        change(state)
        with pytest.raises(ValueError, match=message):
            wire.load_state_dict(resealed(state))


def test_a_silent_rank_is_waited_for_once() -> None:
    """Layers that meet in several ways, and a rank that stops: one timeout, not one for each of them."""
    rules = {"a.weight": "minmax(bits=4)", "b.weight": "topk(density=0.1)", "c.*": "threshold(lam=1.0)"}

    def run(transport) -> None:
        wire = make(transport, rules)
        step_on(wire, gradients(transport.rank, 0))
        if transport.rank == 2:
            return
        started = time.monotonic()
        with pytest.raises(TransportError, match="rank 2" if transport.rank == 1 else r"rank [12]"):
            step_on(wire, gradients(transport.rank, 1))
        assert time.monotonic() - started < 11.0

    run_threads(run, 3, timeout_s=6.0)
