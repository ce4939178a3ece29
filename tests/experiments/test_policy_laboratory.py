"""The policy laboratory: what policies are replayed on, and what they choose."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from experiments.papers.lgreco.gradients import Snapshot, Training
from experiments.policies.baselines import Bayes, ByPriority, Linear
from experiments.policies.candidates import FAMILIES, Family
from experiments.policies.methods import METHODS, Method
from experiments.policies.replay import against, fewer_bytes, less_error, replay
from experiments.tasks.words import WORDS
from thinwire import parse
from thinwire.plan import sent_bytes
from thinwire.policies import Evidence

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SHAPES = {"embedding": (64, 64), "middle": (32, 64), "norm": (64,), "head": (64, 48)}
FAST = tuple(method for method in METHODS if not method.sparse and method.name != "global")


def snapshot(step: int, seed: int, spread: float = 30.0) -> Snapshot:
    """Gradients of layers that differ in their norms."""
    draw = torch.Generator().manual_seed(seed)
    scales = dict(zip(SHAPES, (1.0, spread, 1.0, spread**0.5), strict=True))
    gradients = {name: scales[name] * torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
    return Snapshot(step, gradients, 0.1)


def training(seed: int = 0, steps: tuple[int, ...] = (4, 8), spread: float = 30.0) -> Training:
    return Training("toy", 0.01, tuple(snapshot(step, 10 * seed + step, spread) for step in steps))


TRAININGS = training(0), training(1)


def test_layers_are_in_the_buckets_that_ddp_put_them_in() -> None:
    rows = json.loads((BENCHMARKS / "lgreco/all.json").read_text())["results"]
    recorded = next(row for row in rows if row["name"] == "figure B.1/priority_slower")["layers"]["powersgd"]
    gradients = dict(WORDS.build(0).named_parameters())
    one = Training("GPT", WORDS.bucket_cap_mb, (Snapshot(1, gradients, 0.1),))
    assert one.bucket_of == {row["name"]: row["bucket"] for row in recorded}


def test_baselines_find_a_smaller_plan_within_the_budget() -> None:
    pytest.importorskip("sklearn")
    taken = snapshot(4, seed=1)
    reference = {name: parse("minmax(bits=4)") for name, shape in SHAPES.items() if len(shape) > 1}
    of = {name: taken.gradients[name] for name in reference}
    buckets = {name: at for at, name in enumerate(reference)}
    for policy in (Linear(), Bayes(trials=16), ByPriority()):
        found = policy.propose(Evidence(reference, reference, of, num_ranks=4, bucket_of=buckets))
        errors, allowed = (sum(e**0.5 for e in each.values()) for each in (found.errors, found.reference_errors))
        assert errors <= allowed * (1 + 1e-9), policy
        sent, asked = (
            sum(sent_bytes(c, SHAPES[name], 4) for name, c in plan.items()) for plan in (found.layers, reference)
        )
        assert sent < asked, policy


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_policies_keep_the_budget_of_every_level_and_plans_send_what_they_say(family: Family) -> None:
    bench = replay(TRAININGS, FAST, family)
    for name in ("lgreco", "kmeans", "linear"):
        decisions = bench.decisions[name]
        assert len(decisions) == 4 * len(family.levels)
        for one in decisions:
            at = bench.steps[one.training].index(one.step)
            uniform = bench.uniform[one.training][at][family.members.index(family.levels[one.level])]
            assert one.point.error <= uniform.error * (1 + 1e-9)
            if name == "lgreco":
                assert one.point.sent_bytes <= uniform.sent_bytes


def test_uniform_compression_saves_nothing_against_itself() -> None:
    itself = Method("itself", lambda table, level, memory: (table.uniform(level), memory))
    for family in FAMILIES:
        bench = replay(TRAININGS, [itself], family)
        for ratios in (fewer_bytes(bench, "itself"), less_error(bench, "itself"), against(bench, "itself", "itself")):
            # Of layers so small, two ranks may send the same bytes with other errors.
            assert ratios == pytest.approx((1.0, 1.0), abs=0.005)


def test_where_layers_differ_l_greco_saves_and_where_they_do_not_it_does_not() -> None:
    even, uneven = (
        fewer_bytes(replay([training(seed, (4,), spread) for seed in range(2)], FAST[:1], FAMILIES[0]), "lgreco")
        for spread in (1.0, 100.0)
    )
    assert even == pytest.approx((1.0, 1.0), abs=0.03)
    assert min(uneven) > 1.1
