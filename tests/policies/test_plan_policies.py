"""Policies: what L-GreCo, Accordion and the others propose, and that nothing they propose errs more than it may."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from thinwire import parse
from thinwire.compressors import DGC, Compressor, Feedback, MinMax, Raw, Wrapper, ef, unwrap
from thinwire.plan import Speeds, sent_bytes
from thinwire.policies import Accordion, Auto, Evidence, KMeans, LGreco, Policy, Proposal, Sync
from thinwire.policies.budget import balanced
from thinwire.policies.candidates import squared_errors, with_error_feedback
from thinwire.policies.families import family, parameter_value
from thinwire.policies.policy import gradient_norm

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
    return norms({name: squared_errors(gradient, [layers[name]])[0] for name, gradient in of.items()})


def bytes_of(layers: Mapping[str, Compressor], num_ranks: int = 4) -> float:
    return sum(sent_bytes(compressor, SHAPES[name], num_ranks) for name, compressor in layers.items())


def norms(errors: Mapping[str, float]) -> float:
    """The sum of L2 norms, of squared errors."""
    return sum(error**0.5 for error in errors.values())


def assert_within(proposal: Proposal, seen: Evidence, alpha: float = 1.0) -> None:
    """The plan keeps its budget: by the errors that it reports, and by those of the compressors themselves."""
    assert set(proposal.layers) == set(seen.reference)
    assert norms(proposal.errors) <= alpha * norms(proposal.reference_errors) * (1 + 1e-9)
    allowed = alpha * error_of(seen.reference, seen.gradients)
    assert error_of(proposal.layers, seen.gradients) <= allowed * (1 + 1e-6)


@pytest.mark.parametrize("spec", REFERENCES)
def test_lgreco_sends_less_at_no_more_error(spec: str) -> None:
    seen = evidence(spec)
    proposal = LGreco().propose(seen)
    assert_within(proposal, seen)
    assert bytes_of(proposal.layers) < 0.95 * bytes_of(seen.reference)
    assert proposal.note == ""
    assert min(proposal.errors_s, proposal.solve_s) > 0
    assert {type(c) for c in proposal.layers.values()} == {type(parse(spec))}, "the residual survives"


@settings(max_examples=15)
@given(st.integers(0, 10_000), st.sampled_from(REFERENCES), st.sampled_from([0.5, 1.0, 1.5]))
def test_lgreco_is_within_its_budget_always(seed: int, spec: str, alpha: float) -> None:
    seen = evidence(spec, of=gradients(seed))
    proposal = LGreco(alpha=alpha, steps=500).propose(seen)
    if "reference stays" in proposal.note:
        assert proposal.layers == seen.reference
    else:
        assert_within(proposal, seen, alpha)


def test_any_sensitivity_of_layers_takes_the_place_of_the_error() -> None:
    def loss(name: str, compressor: Compressor) -> float:
        return 1 / parameter_value(compressor) if name == "embed" else 0.0

    chosen = LGreco(error=loss).propose(evidence("minmax(bits=4)")).layers
    assert {name: parameter_value(c) for name, c in chosen.items()} == dict.fromkeys(SHAPES, 2) | {"embed": 4}
    assert str(LGreco(error=loss)).endswith("loss)"), "the same text on all ranks"
    with pytest.raises(ValueError, match="embed: the error of a candidate must be at least 0"):
        LGreco(error=lambda *_: -1.0).propose(evidence("minmax(bits=4)"))


def test_layers_without_a_gradient_keep_the_reference() -> None:
    of = gradients()
    of["embed"], of["up"] = torch.zeros(SHAPES["embed"]), torch.full(SHAPES["up"], torch.nan)
    del of["down"]
    of["bias"] = torch.ones(64)
    of["query"][3, 3] = torch.inf
    seen = evidence(of=of)
    proposal = LGreco(alpha=30.0).propose(seen)
    assert {name for name in SHAPES if proposal.layers[name] != seen.reference[name]} == {"out"}
    assert set(proposal.errors) == {"out"}
    assert set(proposal.layers) == set(SHAPES)


def test_where_no_plan_is_better_the_reference_stays() -> None:
    for policy, spec, note in (
        (LGreco(alpha=1e-6), "topk(density=0.02)", "no choice keeps the error.* reference stays"),
        (LGreco(bounds=(4, 8)), "minmax(bits=4)", "no plan is smaller"),
        (LGreco(objective="error", bounds=(1, 4)), "minmax(bits=4)", "no plan errs less"),
    ):
        seen = evidence(spec)
        proposal = policy.propose(seen)
        assert bytes_of(proposal.layers) <= bytes_of(seen.reference)
        assert norms(proposal.errors) == norms(proposal.reference_errors)
        assert proposal.layers == seen.reference or policy.objective == "error"
        assert re.search(note, proposal.note)
    proposal = LGreco().propose(evidence("ef(topk(density=1.0))"))
    assert sum(proposal.errors.values()) <= 1e-9 * error_of(dict.fromkeys(SHAPES, parse("topk(0.01)")), gradients())
    alone = replace(evidence(), reference={"up": parse(REFERENCES[0])})
    assert LGreco().propose(alone).layers == alone.reference
    assert LGreco(alpha=30.0).propose(alone).layers["up"] == parse("minmax(bits=2, bucket=128)")


def test_candidates_have_the_error_feedback_of_the_reference_with_its_options() -> None:
    asked = parse("ef(minmax(bits=2), units=update, decay=0.9, bits=8)")
    assert isinstance(asked, Feedback)
    assert with_error_feedback([parse("topk(density=0.1)"), asked])[0] == asked.around(parse("topk(density=0.1)"))
    momentum, threshold = parse("dgc(topk(density=0.1))"), parse("topk(density=0.02)")
    assert [type(c) for c in with_error_feedback([threshold, parse("minmax(bits=2)"), momentum])[::2]] == [DGC, DGC]
    pair = Accordion(pair=("topk(density=0.01)", "topk(density=0.1)")).propose(evidence(str(asked))).layers
    assert {(c.units, c.decay, c.bits) for c in pair.values() if isinstance(c, Feedback)} == {("update", 0.9, 8)}


def test_several_families_are_never_worse_than_the_best_of_them() -> None:
    seen = evidence("ef(topk(density=0.05))")
    singles = [LGreco(families=(spec,)).propose(seen) for spec in HYBRID]
    hybrid = LGreco(families=HYBRID).propose(seen)
    assert_within(hybrid, seen)
    assert bytes_of(hybrid.layers) <= min(bytes_of(single.layers) for single in singles) * (1 + 1e-5)
    assert all(isinstance(c, Wrapper) for c in hybrid.layers.values()), "feedback around all, if one wants it"
    assert len({type(c.inner) for c in hybrid.layers.values() if isinstance(c, Wrapper)}) > 1
    proposal = LGreco(families=("minmax(bits=4)", "qsgd(bits=4)")).propose(evidence())
    assert not [c for c in proposal.layers.values() if isinstance(c, Wrapper)]


def alike() -> dict[str, Tensor]:
    """Gradients that differ in nothing that matters: what differs is where layers are sent."""
    return {name: torch.randn(96, 96, generator=torch.Generator().manual_seed(at)) for at, name in enumerate(SHAPES)}


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
            sum(parameter_value(layers[name]) for name in SHAPES if bucket_of[name] == b)
            / list(bucket_of.values()).count(b)
            for b in (0, 1)
        ]
    assert mean[0][0] < mean[0][1]
    assert mean[1][1] < mean[1][0]


def test_a_fast_link_leaves_layers_raw_and_a_slow_one_compresses_them() -> None:
    policy = LGreco(objective="link", alpha=8.0)

    def over(bandwidth: float, spec: str) -> Mapping[str, Compressor]:
        seen = evidence(spec)
        speeds = Speeds(dict.fromkeys(policy.to_time(seen.reference), 1e-9), bandwidth, 0.0, num_ranks=4)
        return policy.propose(replace(seen, speeds=speeds)).layers

    reference = evidence("minmax(bits=4)").reference
    assert {parameter_value(c) for c in policy.to_time(reference)} == {2, 5, 8}
    assert LGreco().to_time(reference) == frozenset()
    assert set(over(1e15, "minmax(bits=4)").values()) == {Raw()}
    assert set(over(1e15, "ef(topk(density=0.02))").values()) == {ef(Raw())}, "residuals are kept"
    slow = over(1e3, "minmax(bits=4)")
    assert Raw() not in slow.values()
    assert bytes_of(slow) < 0.8 * bytes_of(reference)


def test_accordion_as_the_reference_sets_the_budget() -> None:
    policy = LGreco(reference=Accordion(eta=0.5))
    assert policy.memory_size == 1
    first = policy.propose(evidence())
    assert set(first.memory) == set(SHAPES)
    steady = policy.propose(evidence(memory=first.memory))
    seen = evidence()
    strong = {name: parse("minmax(bits=3, bucket=128)") for name in SHAPES}
    assert norms(steady.reference_errors) == pytest.approx(error_of(strong, seen.gradients), rel=1e-9)
    assert norms(steady.errors) <= norms(steady.reference_errors) * (1 + 1e-9)
    assert bytes_of(steady.layers) < bytes_of(first.layers) < bytes_of(seen.reference)


def test_accordion_goes_by_its_regimes() -> None:
    policy = Accordion()
    low, high = parse("minmax(bits=4, bucket=128)"), parse("minmax(bits=3, bucket=128)")
    of = gradients()
    first = policy.propose(evidence())
    assert set(first.layers.values()) == {low}
    assert first.memory["up"] == (gradient_norm(of["up"]),)

    def after(change: float, *, dropped: bool = False) -> Compressor:
        changed = of | {"up": of["up"] * change}
        seen = evidence(of=changed, learning_rate_dropped=dropped, memory=first.memory)
        layers = policy.propose(seen).layers
        assert {layers[name] for name in SHAPES if name != "up"} == ({low} if dropped else {high})
        return layers["up"]

    assert after(1.0) == high
    assert after(1.49) == after(0.51) == high
    assert after(1.51) == after(0.49) == low
    assert after(1.0, dropped=True) == low


def regimes(policy: Accordion, spec: str = REFERENCES[0]) -> tuple[Mapping[str, Compressor], Mapping[str, Compressor]]:
    """What it proposes at first, and then where nothing changes."""
    first = policy.propose(evidence(spec))
    return first.layers, policy.propose(evidence(spec, memory=first.memory)).layers


def test_accordion_keeps_feedback_in_both_regimes_and_leaves_what_does_not_suit_a_layer() -> None:
    first, steady = regimes(Accordion(pair=("topk(density=0.01)", "minmax(bits=4)")))
    assert set(first.values()) == {ef(parse("minmax(bits=4)"))}
    assert set(steady.values()) == {ef(parse("topk(density=0.01)"))}
    unsuited = Accordion(pair=("powersgd(rank=40)", "minmax(bits=4, bucket=128)"))
    unsuited.check(evidence().reference, SHAPES)
    assert regimes(unsuited)[1]["embed"] == evidence().reference["embed"]


@pytest.mark.parametrize("spec", REFERENCES)
def test_kmeans_is_within_the_budget_too_and_deterministic(spec: str) -> None:
    for policy, seed in ((KMeans(), 0), (KMeans(clusters=3, buckets=(1024, 128)), 1)):
        seen = evidence(spec, of=gradients(seed))
        proposal = policy.propose(seen)
        assert_within(proposal, seen)
        assert policy.propose(seen).layers == proposal.layers


ALL = [LGreco(), LGreco(families=HYBRID), LGreco(reference=Accordion()), LGreco(objective="time")]
ALL += [KMeans(), Accordion()]


def test_every_policy_survives_and_changes_no_evidence() -> None:
    for policy in ALL:
        for of in ({}, {name: torch.zeros(shape) for name, shape in SHAPES.items()}):
            nothing = policy.propose(evidence(of=of))
            assert nothing.layers == evidence().reference
            assert not nothing.errors
        broken = {name: torch.full(shape, torch.nan) for name, shape in SHAPES.items()}
        assert policy.propose(evidence(of=broken)).layers == evidence().reference
        reference = {"up": parse("minmax(bits=4)")}
        seen = Evidence(reference, reference, {"up": gradients()["up"]}, num_ranks=1, memory={})
        proposal = policy.propose(seen)
        assert set(proposal.layers) == {"up"}
        assert norms(proposal.errors) <= norms(proposal.reference_errors) * (1 + 1e-9)
        assert torch.equal(seen.gradients["up"], gradients()["up"])
        assert seen.memory == {}


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


def test_prices_know_the_collective_algorithm() -> None:
    """By all-gather a coded layer is sent n−1 times, a summed one 2(n−1)/n times as ever."""
    seen = replace(evidence(), num_ranks=8)
    policy = LGreco(families=("topk(density=0.01) | minmax(bits=8)", "powersgd(rank=4)"), alpha=8.0)
    price = policy.price(replace(seen, crossings=7.0))
    coded, summed = parse("minmax(bits=4)"), parse("powersgd(rank=4)")
    shape = (64, 64)
    assert price("x", coded, shape) == 7 * coded.wire_bytes(shape)
    assert price("x", summed, shape) == 2 * 7 / 8 * summed.wire_bytes(shape)
    assert policy.price(seen)("x", coded, shape) == 2 * 7 / 8 * coded.wire_bytes(shape)


@pytest.mark.parametrize("policy", [LGreco(alpha=2.0), KMeans(alpha=2.0)], ids=str)
def test_layers_that_the_reference_rank_does_not_suit_are_offered_lower_ones(policy: Policy) -> None:
    shape = (16, 16, 3, 3)
    reference = {"large": parse("ef(powersgd(rank=16))")}
    draw = torch.Generator().manual_seed(0)
    of = {
        "large": torch.randn(256, 256, generator=draw),
        "conv": 0.01 * torch.randn(16, 2, generator=draw).mm(torch.randn(2, 144, generator=draw)).view(shape),
    }
    unsuited = {"conv": parse("powersgd(rank=16)")}
    present = reference | {"conv": Raw()}
    layers = policy.propose(Evidence(reference, present, of, num_ranks=4, unsuited=unsuited)).layers
    assert 1 <= parameter_value(layers["conv"]) <= 7
    assert isinstance(layers["conv"], Wrapper), "with error feedback, as the rules would have it"
    # Back from there it takes the residual with it.
    present = reference | {"conv": layers["conv"]}
    of["conv"] = 1e3 * torch.randn(shape, generator=draw)
    back = policy.propose(Evidence(reference, present, of, num_ranks=4, unsuited=unsuited))
    assert back.layers["conv"] == ef(Raw())


WITH_FEEDBACK = ("2bit", "ef(maxabs(bits=2))", "ef(qsgd(bits=4), bits=8)")
MIXED = LGreco(families=("minmax(bits=2)", "qsgd(bits=4)", "topk(density=0.05)"), alpha=8.0)


@pytest.mark.parametrize("policy", [LGreco(alpha=8.0), MIXED, KMeans(alpha=8.0), Accordion()], ids=str)
def test_what_errs_by_more_than_its_input_never_has_error_feedback(policy: Policy) -> None:
    """Even with a budget for it: an error is taken without feedback, and the residual would grow in every step."""
    for seen in map(evidence, WITH_FEEDBACK):
        policy.check(seen.reference, SHAPES)
        first = policy.propose(seen)
        for proposal in (first, policy.propose(replace(seen, memory=first.memory))):
            coders = [compressor.coder for compressor in proposal.layers.values() if isinstance(compressor, Wrapper)]
            assert len(coders) == len(SHAPES)
            assert all(compressor.traits.contracts for compressor in coders)


GROWING = [
    LGreco(bounds=(1, 4)),
    KMeans(bounds=(1, 4)),
    LGreco(families=("minmax(bits=1)", "topk(density=0.05)")),
    LGreco(families=("minmax(bits=2)", "topk(density=0.05)"), bounds=(1, 4)),
    Accordion(pair=(1, 2)),
    Accordion(pair=("minmax(bits=1)", "minmax(bits=2)")),
    LGreco(reference=Accordion(pair=(1, 2))),
]


def test_asking_for_what_makes_residuals_grow_is_an_error_that_names_it() -> None:
    for policy in GROWING:
        with pytest.raises(ValueError, match=r"would offer ef\(minmax\(bits=1.*residual .* grows"):
            policy.check(evidence("2bit").reference, SHAPES)
    with pytest.raises(ValueError, match=r"buckets=.* would offer ef\(qsgd\(bits=4, bucket=8192"):
        KMeans(buckets=(8192, 128)).check(evidence("ef(qsgd(bits=4))").reference, SHAPES)
    KMeans(buckets=(8192, 128)).check(evidence("qsgd(bits=4)").reference, SHAPES)
    Auto(candidates=("minmax(bits=1)", "minmax(bits=2)"))


def test_beyond_the_most_bits_are_smaller_buckets_and_raw() -> None:
    for spec in ("minmax(bits=8, bucket=128)", "ef(minmax(bits=8, bucket=128))"):
        members = [unwrap(member) for member in family(parse(spec))]
        assert [c.bits for c in members[:5] if isinstance(c, MinMax)] == [4, 5, 6, 7, 8]
        assert members[5:] == [MinMax(bits=8, bucket=64), MinMax(bits=8, bucket=32), Raw()]
    assert len(family(parse("minmax(bits=8)"), bounds=(4, 8))) == 5


def test_a_range_that_sends_more_than_the_reference_is_not_taken() -> None:
    """As where layers that the reference leaves raw, with large gradients, force both of its ends up."""
    shapes = {"a": (16, 16, 3, 3), "b": (32, 16, 3, 3), "c": (64, 64, 3, 3), "d": (128, 128, 3, 3)}
    draw = torch.Generator().manual_seed(0)
    asked = parse("powersgd(rank=16)")
    reference = {name: ef(asked) for name in ("c", "d")}
    unsuited = dict.fromkeys(("a", "b"), asked)
    of = {
        name: torch.randn(shape, generator=draw) * (100.0 if name in unsuited else 1.0)
        for name, shape in shapes.items()
    }
    present = reference | dict.fromkeys(unsuited, Raw())
    proposal = KMeans().propose(Evidence(reference, present, of, num_ranks=4, unsuited=unsuited))
    assert "sends less than the reference: the reference stays" in proposal.note

    def sent(layers: Mapping[str, Compressor]) -> float:
        return sum(sent_bytes(layers.get(name, Raw()), shape, 4) for name, shape in shapes.items())

    assert sent(proposal.layers) <= sent(reference)
