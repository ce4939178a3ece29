"""Policies: what L-GreCo, Accordion and the others propose, and that nothing they propose errs more than it may."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire import parse
from thinwire.compressors import Compressor, Raw, Wrapper, ef
from thinwire.plan import (
    Accordion,
    Bayes,
    Evidence,
    KMeans,
    LGreco,
    Linear,
    Policy,
    Proposal,
    Speeds,
    Sync,
    balanced,
    sent_bytes,
)
from thinwire.plan.choices import Choices
from thinwire.plan.errors import squared_errors
from thinwire.plan.family import family, strength
from thinwire.plan.policy import norm_of

SHAPES = {"embed": (400, 64), "up": (128, 64), "down": (64, 128), "query": (64, 64), "out": (96, 64)}
REFERENCES = ("minmax(bits=4, bucket=128)", "ef(topk(density=0.02))", "ef(powersgd(rank=6))", "qsgd(bits=4)")
HYBRID = ("minmax(bits=3)", "topk(density=0.05)", "powersgd(rank=4)")


def gradients(seed: int = 0, shapes: Mapping[str, tuple[int, int]] | None = None) -> dict[str, Tensor]:
    """As unlike as those of a Transformer: a large embedding of little gradient, others nearly of low rank."""
    draw = torch.Generator().manual_seed(seed)
    found = {}
    for at, (name, shape) in enumerate((shapes or SHAPES).items()):
        low_rank = torch.randn(shape[0], 3, generator=draw) @ torch.randn(3, shape[1], generator=draw)
        noise = torch.randn(shape, generator=draw) ** 3
        found[name] = (low_rank * (at % 3) + noise) * 10.0 ** (at % 4 - 2)
    return found


def evidence(spec: str = REFERENCES[0], *, of: Mapping[str, Tensor] | None = None, **more) -> Evidence:
    reference = {name: parse(spec) for name in SHAPES}
    return Evidence(reference, reference, gradients() if of is None else of, num_ranks=4, **more)


def error_of(layers: Mapping[str, Compressor], of: Mapping[str, Tensor]) -> float:
    return sum(squared_errors(gradient, [layers[name]])[0] for name, gradient in of.items())


def bytes_of(layers: Mapping[str, Compressor], num_ranks: int = 4) -> float:
    return sum(sent_bytes(compressor, SHAPES[name], num_ranks) for name, compressor in layers.items())


def assert_within(proposal: Proposal, seen: Evidence, alpha: float = 1.0) -> None:
    """Nothing errs more than it may: by its own account, and by that of the compressors themselves."""
    assert set(proposal.layers) == set(seen.reference)
    assert sum(proposal.errors.values()) <= alpha * sum(proposal.reference_errors.values()) * (1 + 1e-9)
    allowed = alpha * error_of(seen.reference, seen.gradients)
    assert error_of(proposal.layers, seen.gradients) <= allowed * (1 + 1e-6)


@pytest.mark.parametrize("spec", REFERENCES)
@pytest.mark.parametrize("solver", ["dp", "exact"])
def test_lgreco_sends_less_at_no_more_error(spec: str, solver) -> None:
    seen = evidence(spec)
    proposal = LGreco(solver=solver).propose(seen)
    assert_within(proposal, seen)
    assert bytes_of(proposal.layers) < 0.95 * bytes_of(seen.reference)
    assert proposal.note == ""
    assert set(proposal.errors) == set(SHAPES)
    assert {type(c) for c in proposal.layers.values()} == {type(parse(spec))}, "what is owed survives"


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(REFERENCES), st.sampled_from([0.5, 1.0, 1.5]))
def test_lgreco_is_within_its_budget_always(seed: int, spec: str, alpha: float) -> None:
    seen = evidence(spec, of=gradients(seed))
    proposal = LGreco(alpha=alpha, steps=500).propose(seen)
    if "reference stays" in proposal.note:
        assert proposal.layers == seen.reference
    else:
        assert_within(proposal, seen, alpha)


def test_layers_without_a_gradient_keep_the_reference() -> None:
    of = gradients()
    of["embed"], of["up"] = torch.zeros(SHAPES["embed"]), torch.full(SHAPES["up"], torch.nan)
    del of["down"]
    of["query"][3, 3] = torch.inf
    seen = evidence(of=of)
    proposal = LGreco(alpha=30.0).propose(seen)
    assert {name for name in SHAPES if proposal.layers[name] != seen.reference[name]} == {"out"}
    assert set(proposal.errors) == {"out"}


def test_what_is_not_in_the_reference_is_not_decided() -> None:
    of = gradients() | {"bias": torch.ones(64)}
    assert set(LGreco().propose(evidence(of=of)).layers) == set(SHAPES)


def test_a_budget_that_nothing_meets_keeps_the_reference_and_says_so() -> None:
    seen = evidence("topk(density=0.02)")
    for solver in ("dp", "exact"):
        proposal = LGreco(alpha=1e-6, solver=solver).propose(seen)
        assert proposal.layers == seen.reference
        assert "no choice keeps the error" in proposal.note
        assert "reference stays" in proposal.note
        assert proposal.errors == proposal.reference_errors


def test_where_nothing_is_smaller_the_reference_stays() -> None:
    seen = evidence("minmax(bits=4)")
    proposal = LGreco(bounds=(4, 8)).propose(seen)
    assert proposal.layers == seen.reference
    assert "no plan is smaller" in proposal.note


def test_one_layer_alone() -> None:
    seen = replace(evidence(), reference={"up": parse(REFERENCES[0])})
    proposal = LGreco().propose(seen)
    assert proposal.layers == seen.reference
    assert LGreco(alpha=30.0).propose(seen).layers["up"] == parse("minmax(bits=2, bucket=128)")


def test_a_reference_without_error_stays() -> None:
    seen = evidence("ef(topk(density=1.0))")
    proposal = LGreco(solver="exact").propose(seen)
    assert sum(proposal.errors.values()) <= 1e-9 * error_of({n: parse("topk(0.01)") for n in SHAPES}, seen.gradients)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("solver", ["dp", "exact"])
def test_several_families_are_never_worse_than_the_best_of_them(seed: int, solver) -> None:
    seen = evidence("ef(topk(density=0.05))", of=gradients(seed))
    singles = [LGreco(families=(spec,), solver=solver).propose(seen) for spec in HYBRID]
    hybrid = LGreco(families=HYBRID, solver=solver).propose(seen)
    assert_within(hybrid, seen)
    assert bytes_of(hybrid.layers) <= min(bytes_of(single.layers) for single in singles) * (1 + 1e-5)
    assert all(isinstance(c, Wrapper) for c in hybrid.layers.values()), "feedback around all, if one wants it"
    assert len({type(c.inner) for c in hybrid.layers.values() if isinstance(c, Wrapper)}) > 1


@pytest.mark.parametrize("seed", [305, 478, 623])
def test_rounding_sets_no_family_above_all(seed: int, monkeypatch) -> None:
    # Of these errors, in so few steps, what is found of all candidates costs more than what is found of one kind.
    draw = np.random.default_rng(seed)
    candidates = [*family(parse("minmax(bits=4)"), (2, 6)), *family(parse("qsgd(bits=4)"), (2, 6))]
    table = {}
    for name in ("up", "down", "out"):
        errors, costs = (
            np.concatenate([np.sort(10 ** draw.uniform(*span) * draw.random(5)) for _ in range(2)])
            for span in ((-2, 2), (2, 5))
        )
        falling = np.concatenate([errors[:5][::-1], errors[5:][::-1]])
        table[name] = dict(zip(candidates, zip(falling, costs, strict=True), strict=True))

    def cost(kept: list[Compressor]) -> float:
        def known(name: str, *_: object) -> Choices:
            found = tuple(c for c in candidates if c in kept or c == candidates[2])
            errors, costs = (np.array([table[name][c][i] for c in found]) for i in (0, 1))
            return Choices(name, 1, 1.0, found, errors, costs, found.index(candidates[2]))

        monkeypatch.setattr(Choices, "of", known)
        layers = LGreco(steps=20).propose(evidence(of={name: gradients()[name] for name in table})).layers
        return sum(table[name][layers[name]][1] for name in table)

    assert cost(candidates) <= min(cost(candidates[:5]), cost(candidates[5:]))


def test_families_without_feedback_get_none() -> None:
    proposal = LGreco(families=("minmax(bits=4)", "qsgd(bits=4)")).propose(evidence())
    assert not [c for c in proposal.layers.values() if isinstance(c, Wrapper)]


def test_a_sum_of_norms_is_another_budget() -> None:
    seen = evidence()
    proposal = LGreco(error="l2").propose(seen)
    norms, reference_norms = (
        sum(value**0.5 for value in found.values()) for found in (proposal.errors, proposal.reference_errors)
    )
    assert norms <= reference_norms * (1 + 1e-9)
    assert proposal.layers != LGreco().propose(seen).layers


def alike() -> dict[str, Tensor]:
    """Gradients that differ in nothing that matters: what differs is where layers are sent."""
    return {name: torch.randn(96, 96, generator=torch.Generator().manual_seed(at)) for at, name in enumerate(SHAPES)}


def test_priority_compresses_later_buckets_more() -> None:
    seen = evidence("topk(density=0.05)", of=alike(), bucket_of={name: 5 * at for at, name in enumerate(SHAPES)})
    kept = [strength(c) for c in LGreco(objective="priority").propose(seen).layers.values()]
    assert kept[-1] < 0.5 * kept[0]
    assert kept == sorted(kept, reverse=True)


def timed(coefficients: tuple[float, float], plans: int = 6) -> list[Sync]:
    sizes = [(10_000 + 7919 * i % 50_000, 10_000 + 104_729 * i % 70_000) for i in range(plans)]
    return [Sync(s, 0.01 + s[0] * coefficients[0] + s[1] * coefficients[1]) for s in sizes for _ in range(6)]


def test_time_spends_the_error_where_bytes_cost_time() -> None:
    bucket_of = {name: int(at >= 2) for at, name in enumerate(SHAPES)}
    mean = {}
    for slow in (0, 1):
        cost = (1e-6, 1e-8) if slow == 0 else (1e-8, 1e-6)
        seen = evidence("topk(density=0.05)", of=alike(), bucket_of=bucket_of, syncs=timed(cost))
        layers = LGreco(objective="time").propose(seen).layers
        mean[slow] = [
            sum(strength(layers[name]) for name in SHAPES if bucket_of[name] == b) / list(bucket_of.values()).count(b)
            for b in (0, 1)
        ]
    assert mean[0][0] < mean[0][1]
    assert mean[1][1] < mean[1][0]


def test_until_times_are_known_other_plans_are_tried() -> None:
    seen = evidence("topk(density=0.05)", of=alike(), bucket_of={name: at for at, name in enumerate(SHAPES)})
    policy = LGreco(objective="time")
    assert policy.wants_syncs
    assert not LGreco().wants_syncs
    tried = [policy.propose(replace(seen, step=step)) for step in range(6)]
    assert len({tuple(map(str, proposal.layers.values())) for proposal in tried}) > 1
    for proposal in tried:
        assert sum(proposal.errors.values()) <= sum(proposal.reference_errors.values()) * (1 + 1e-9)
    assert policy.propose(seen).layers == policy.propose(seen).layers


def test_a_layer_of_no_known_bucket_weighs_like_the_others() -> None:
    known = {name: at % 2 for at, name in enumerate(SHAPES) if name != "out"}
    seen = evidence("topk(density=0.05)", of=alike(), bucket_of=known, syncs=timed((1e-6, 1e-6)))
    kept = {name: strength(c) for name, c in LGreco(objective="time").propose(seen).layers.items()}
    assert kept["out"] == pytest.approx(kept["up"], rel=0.4)


@pytest.mark.parametrize(("bandwidth", "raw"), [(1e15, True), (1e3, False)])
def test_a_fast_link_leaves_layers_raw_and_a_slow_one_compresses_them(bandwidth: float, raw: bool) -> None:
    seen = evidence("minmax(bits=4)")
    policy = LGreco(objective="link", alpha=8.0)
    timed_ones = policy.to_time(seen.reference)
    assert {strength(c) for c in timed_ones} == {2, 5, 8}
    speeds = Speeds(dict.fromkeys(timed_ones, 1e-9), bandwidth, 0.0, num_ranks=4)
    layers = policy.propose(replace(seen, speeds=speeds)).layers
    if raw:
        assert set(layers.values()) == {Raw()}
    else:
        assert Raw() not in layers.values()
        assert bytes_of(layers) < 0.8 * bytes_of(seen.reference)
    assert LGreco().to_time(seen.reference) == frozenset()


def test_accordion_as_the_reference_sets_the_budget() -> None:
    policy = LGreco(reference=Accordion(eta=0.5))
    assert policy.memory_size == 2
    first = policy.propose(evidence())
    assert set(first.memory) == set(SHAPES)
    steady = policy.propose(evidence(memory=first.memory))
    seen = evidence()
    strong = {name: parse("minmax(bits=3, bucket=128)") for name in SHAPES}
    assert sum(steady.reference_errors.values()) == pytest.approx(error_of(strong, seen.gradients), rel=1e-9)
    assert sum(steady.errors.values()) <= sum(steady.reference_errors.values()) * (1 + 1e-9)
    assert bytes_of(steady.layers) < bytes_of(first.layers) < bytes_of(seen.reference)


def test_accordion_goes_by_its_regimes() -> None:
    policy = Accordion()
    weak, strong = parse("minmax(bits=4, bucket=128)"), parse("minmax(bits=3, bucket=128)")
    of = gradients()
    first = policy.propose(evidence(learning_rate=0.1))
    assert set(first.layers.values()) == {weak}
    assert first.memory["up"] == (norm_of(of["up"]), 0.1)

    def after(change: float, rate: float) -> Compressor:
        changed = of | {"up": of["up"] * change}
        seen = evidence(of=changed, learning_rate=rate, memory=first.memory)
        layers = policy.propose(seen).layers
        assert {layers[name] for name in SHAPES if name != "up"} == ({strong} if rate > 0.05 else {weak})
        return layers["up"]

    assert after(1.0, 0.1) == strong
    assert after(1.49, 0.1) == after(0.51, 0.1) == strong
    assert after(1.51, 0.1) == after(0.49, 0.1) == weak
    assert after(1.0, 0.05) == weak
    # Slower than a drop: a cosine's slope, or a warm-up.
    assert after(1.0, 0.06) == after(1.0, 0.2) == strong


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("ef(powersgd(rank=16))", "ef(powersgd(rank=4))"),
        ("ef(topk(density=0.02))", "ef(topk(density=0.001))"),
        ("ef(topk(density=0.2) | minmax(bits=8))", "ef(topk(density=0.01) | minmax(bits=8))"),
        ("qsgd(bits=2)", "qsgd(bits=2)"),
    ],
)
def test_what_accordion_compresses_more_to(reference: str, expected: str) -> None:
    seen = evidence(reference)
    steady = Accordion().propose(replace(seen, memory=Accordion().propose(seen).memory))
    assert set(steady.layers.values()) == {parse(expected)}


def test_accordion_keeps_feedback_in_both_regimes() -> None:
    policy = Accordion(weak="minmax(bits=4)", strong="topk(density=0.01)")
    first = policy.propose(evidence())
    assert set(first.layers.values()) == {ef(parse("minmax(bits=4)"))}
    assert set(policy.propose(evidence(memory=first.memory)).layers.values()) == {ef(parse("topk(density=0.01)"))}


def test_accordion_leaves_what_does_not_suit_a_layer() -> None:
    policy = Accordion(strong="powersgd(rank=40)")
    first = policy.propose(evidence())
    steady = policy.propose(evidence(memory=first.memory)).layers
    assert steady["embed"] == evidence().reference["embed"]
    policy.check(evidence().reference, SHAPES)


@pytest.mark.parametrize("spec", REFERENCES)
@pytest.mark.parametrize(
    "policy", [KMeans(), KMeans(clusters=3, buckets=(1024, 128)), Linear(), Bayes(trials=20)], ids=str
)
def test_the_others_are_within_the_budget_too_and_deterministic(policy: Policy, spec: str) -> None:
    for seed in (0, 1):
        seen = evidence(spec, of=gradients(seed))
        proposal = policy.propose(seen)
        assert_within(proposal, seen)
        assert policy.propose(seen).layers == proposal.layers


def test_kmeans_maps_buckets_too() -> None:
    proposal = KMeans(clusters=3, buckets=(1024, 128), alpha=50.0).propose(evidence())
    assert {getattr(c, "bucket", None) for c in proposal.layers.values()} == {1024, 128}
    large_and_little = proposal.layers["embed"]
    assert getattr(large_and_little, "bucket", None) == 1024


def test_linear_goes_from_little_norm_to_much() -> None:
    of = gradients()
    layers = Linear(alpha=1e6).propose(evidence(of=of)).layers
    order = sorted(SHAPES, key=lambda name: norm_of(of[name]) / of[name].numel())
    bits = [strength(layers[name]) for name in order]
    assert bits == sorted(bits)
    assert (bits[0], bits[-1]) == (2, 8)


def test_bayes_finds_something_smaller() -> None:
    seen = evidence(of=gradients(3))
    assert bytes_of(Bayes(alpha=4.0).propose(seen).layers) < 0.9 * bytes_of(seen.reference)


ALL = [
    LGreco(),
    LGreco(solver="exact"),
    LGreco(families=HYBRID),
    LGreco(reference=Accordion()),
    LGreco(objective="time"),
]
ALL += [KMeans(), Linear(), Bayes(trials=12), Accordion()]


@pytest.mark.parametrize("policy", ALL, ids=str)
def test_every_policy_survives(policy: Policy) -> None:
    for of in ({}, {name: torch.zeros(shape) for name, shape in SHAPES.items()}):
        nothing = policy.propose(evidence(of=of))
        assert nothing.layers == evidence().reference
        assert not nothing.errors
    broken = {name: torch.full(shape, torch.nan) for name, shape in SHAPES.items()}
    assert policy.propose(evidence(of=broken)).layers == evidence().reference
    reference = {"up": parse("minmax(bits=4)")}
    alone = Evidence(reference, reference, {"up": gradients()["up"]}, num_ranks=1)
    proposal = policy.propose(alone)
    assert set(proposal.layers) == {"up"}
    assert sum(proposal.errors.values()) <= sum(proposal.reference_errors.values()) * (1 + 1e-9)


@pytest.mark.parametrize("policy", ALL, ids=str)
def test_evidence_is_not_changed(policy: Policy) -> None:
    seen = evidence(memory={})
    before = {name: gradient.clone() for name, gradient in seen.gradients.items()}
    policy.propose(seen)
    assert all(torch.equal(before[name], seen.gradients[name]) for name in before)
    assert seen.memory == {}


def test_reports_say_how_long_it_took() -> None:
    proposal = LGreco().propose(evidence())
    assert proposal.errors_s > 0
    assert proposal.solve_s > 0


def test_weights_and_gradients_share_one_budget() -> None:
    generator = torch.Generator().manual_seed(0)
    values = {
        "weights/a": 100 * torch.randn(64, 32, generator=generator),
        "weights/b": torch.randn(64, 32, generator=generator),
        "gradients/a": 1e-3 * torch.randn(128, 32, generator=generator),
    }
    reference = dict.fromkeys(values, parse("minmax(bits=4, bucket=64)"))
    evidence = balanced(Evidence(reference, reference, values, num_ranks=2), gathers=5.0)
    for site in ("weights", "gradients"):
        names = [name for name in values if name.startswith(site)]
        errors = [squared_errors(evidence.gradients[n], [reference[n]])[0] for n in names]
        assert sum(errors) == pytest.approx(1.0, rel=0.05)
    # What a rank sends of its shard goes to every other rank, five times as often.
    assert evidence.times == {"weights/a": 10.0, "weights/b": 10.0}
    ratio = evidence.gradients["weights/a"] / values["weights/a"]
    assert torch.allclose(ratio, evidence.gradients["weights/b"] / values["weights/b"])
