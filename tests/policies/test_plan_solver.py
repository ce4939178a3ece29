"""Under the policies: families, errors, the programs that choose, the regression of times."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings, strategies as st

from experiments.papers.lgreco.speed import fit_quality
from thinwire import parse
from thinwire.compressors import ef
from thinwire.policies import Sync, family
from thinwire.policies.budget import InfeasibleError, dynamic_program, total
from thinwire.policies.candidates import LARGEST_GRAM, Array, LayerCandidates, squared_errors
from thinwire.policies.families import parameter_value
from thinwire.policies.lgreco import seconds_per_byte


def strengths(spec: str, **options) -> list[float]:
    return [parameter_value(member) for member in family(parse(spec), **options)]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def direct(compressor, gradient: torch.Tensor) -> float:
    return float((compressor.roundtrip(gradient) - gradient).square().sum(dtype=torch.float64))


def test_shares_of_a_spectrum_and_of_coded_values_are_twelve() -> None:
    for spec in ("fft(theta=0.9)", "topk(density=0.1) | minmax(bits=8)"):
        found = strengths(spec)
        assert 12 <= len(found) <= 13
        assert (found[0], found[-1]) == (pytest.approx(0.02), pytest.approx(0.5))
    assert {member.values for member in family(parse("topk(density=0.1) | minmax(bits=6)"))} == {
        parse("minmax(bits=6)")
    }


def test_a_family_has_its_default_keeps_all_else_and_has_bounds_in_units_of_the_parameter() -> None:
    for spec in ("ef(topk(density=0.013, select=sampled))", "minmax(bits=3, bucket=64, rounding=nearest)"):
        assert parse(spec) in family(parse(spec))
    assert {member.bucket for member in family(parse("minmax(bits=3, bucket=64)"))} == {64}
    assert all(str(member).startswith("ef(") for member in family(ef(parse("topk"))))
    assert strengths("powersgd(rank=32)", bounds=(8, 64), step=8) == [8, 16, 24, 32, 40, 48, 56, 64]
    assert strengths("topk(density=0.01)", bounds=(0.01, 0.03), step=0.01) == [0.01, 0.02, 0.03]


def test_densities_of_one_sort_err_as_they_would_one_by_one() -> None:
    gradient = normal(4097) ** 3
    members = family(parse("topk(density=0.02)"))
    found = squared_errors(gradient, members)
    for at in range(0, len(members), 7):
        assert found[at] == pytest.approx(direct(members[at], gradient), rel=1e-5)
    assert all(later <= earlier for earlier, later in itertools.pairwise(found))
    gradient = normal(500)
    total = float(gradient.square().sum())
    few, all_of_it = squared_errors(gradient, [parse("topk(density=0.01)"), parse("topk(density=1.0)")])
    assert few > 0.5 * total
    assert all_of_it <= 1e-6 * total


@pytest.mark.parametrize("shape", [(40, 70), (70, 40), (24, 4, 3, 3)])
def test_ranks_err_what_singular_values_leave(shape: tuple[int, ...]) -> None:
    gradient = normal(*shape)
    members = family(parse("powersgd(rank=6)"))
    squares = torch.linalg.svdvals(gradient.reshape(shape[0], -1).double()).square()
    expected = [float(squares[int(parameter_value(member)) :].sum()) for member in members]
    assert squared_errors(gradient, members) == pytest.approx(expected, rel=1e-4)


def test_power_steps_on_a_large_matrix_are_close_to_its_singular_values() -> None:
    rows, columns = LARGEST_GRAM + 16, LARGEST_GRAM + 40
    gradient = normal(rows, 48) * torch.arange(1, 49) ** -1.0 @ normal(48, columns, seed=1)
    gradient += 0.002 * normal(rows, columns, seed=2)
    members = [parse(f"powersgd(rank={rank})") for rank in (2, 4, 8)]
    squares = torch.linalg.eigvalsh((gradient @ gradient.T).double()).flip(0)
    for member, found in zip(members, squared_errors(gradient, members), strict=True):
        expected = float(squares[int(parameter_value(member)) :].sum())
        # No plan is taken for better than it is.
        assert 0.999 * expected <= found <= 1.03 * expected


def test_other_errors_are_those_of_a_round_trip_and_feedback_and_dtypes_change_none() -> None:
    gradient = normal(64, 48)
    for spec in ("minmax(bits=3)", "qsgd(bits=4)", "rangefloat(bits=8)", "fft(theta=0.8)", "randk"):
        assert squared_errors(gradient, [parse(spec)]) == pytest.approx([direct(parse(spec), gradient)], rel=1e-5)
    for spec in ("minmax(bits=3, rounding=nearest)", "topk(density=0.05)", "powersgd(rank=2)", "fft(theta=0.8)"):
        plain, fed_back = squared_errors(gradient, [parse(spec), ef(parse(spec))])
        assert plain == fed_back > 0
    some = [parse(spec) for spec in ("topk(density=0.1)", "powersgd(rank=2)", "minmax(bits=4)")]
    half = gradient.bfloat16()
    assert squared_errors(half, some) == pytest.approx(squared_errors(half.float(), some))


def test_what_arrives_as_nan_is_not_to_be_chosen(monkeypatch) -> None:
    broken = parse("minmax(bits=2)")
    monkeypatch.setattr(
        "thinwire.policies.candidates.squared_errors",
        lambda g, kept: [float("nan") if c == broken else 1.0 for c in kept],
    )
    of = LayerCandidates.evaluate("w", normal(64, 64), [broken], parse("minmax(bits=4)"), lambda *_: 1.0)
    assert of.errors.tolist() == [1.0, np.inf]
    assert of.has_budget
    assert not LayerCandidates.evaluate("w", normal(64, 64), [], broken, lambda *_: 1.0).has_budget


def test_choices_leave_out_what_a_layer_cannot_have() -> None:
    for size, rank, ranks in ((64, 8, range(4, 17)), (20, 4, range(2, 6))):
        compressor = parse(f"powersgd(rank={rank})")
        of = LayerCandidates.evaluate("w", normal(size, size), family(compressor), compressor, lambda *_: 1.0)
        assert sorted(parameter_value(c) for c in of.candidates) == list(ranks)


tables = st.integers(1, 4).flatmap(
    lambda layers: st.lists(
        st.lists(st.tuples(st.integers(0, 20), st.integers(1, 50)), min_size=1, max_size=4),
        min_size=layers,
        max_size=layers,
    )
)


def arrays(table) -> tuple[list[Array], list[Array]]:
    return tuple([np.array([pair[i] for pair in row], dtype=np.float64) for row in table] for i in (0, 1))  # type: ignore[return-value]


def brute_force(table, budget: float) -> float | None:
    found = [
        sum(cost for _, cost in plan) for plan in itertools.product(*table) if sum(error for error, _ in plan) <= budget
    ]
    return min(found) if found else None


@settings(max_examples=60)
@given(tables, st.integers(0, 60))
def test_the_program_finds_what_brute_force_finds(table, budget: int) -> None:
    expected = brute_force(table, budget)
    of_errors, costs = arrays(table)

    def solve() -> list[int]:
        # As many steps as there are units of error: nothing is rounded.
        return dynamic_program(of_errors, costs, budget, max(1, budget))

    if expected is None:
        with pytest.raises(InfeasibleError, match="no choice"):
            solve()
        return
    plan = solve()
    assert total(of_errors, plan) <= budget
    assert total(costs, plan) == expected


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1), st.integers(1, 8), st.integers(1, 6), st.floats(0.3, 1.5), st.integers(5, 2000))
def test_no_plan_is_over_the_budget(seed: int, layers: int, choices: int, alpha: float, steps: int) -> None:
    draw = np.random.default_rng(seed)
    of_errors = [draw.exponential(10 ** draw.uniform(-6, 6), choices) for _ in range(layers)]
    costs = [draw.exponential(10 ** draw.uniform(0, 6), choices) for _ in range(layers)]
    budget = alpha * total(of_errors, [0] * layers)
    try:
        plan = dynamic_program(of_errors, costs, budget, steps)
    except InfeasibleError:
        assume(False)
        return
    assert total(of_errors, plan) <= budget * (1 + 1e-12)


def realistic(draw: np.random.Generator, layers: int, choices: int) -> tuple[list[Array], list[Array]]:
    """Errors that fall geometrically with the bits, of layers of all sizes and norms."""
    bits = np.linspace(2, 8, choices)
    sizes, norms = 10 ** draw.uniform(3, 6.5, layers), 10 ** draw.uniform(-3, 2, layers)
    of_errors = [norm * 4.0**-bits * draw.uniform(0.8, 1.2, choices) for norm in norms]
    return of_errors, [size * (bits + 0.5) for size in sizes]


def test_the_dynamic_program_is_within_a_hundredth_of_the_optimum() -> None:
    of_errors, costs = realistic(np.random.default_rng(0), 60, 16)
    reference = [5] * 60
    budget = total(of_errors, reference)
    found = dynamic_program(of_errors, costs, budget)
    assert total(of_errors, found) <= budget * (1 + 1e-12)
    # No plan costs less than this for any price of an error.
    bound = max(
        sum(float(np.min(c + price * e)) for e, c in zip(of_errors, costs, strict=True)) - price * budget
        for price in np.geomspace(1e-6, 1e9, 2000) * sum(c.max() for c in costs) / budget
    )
    assert bound <= total(costs, found) <= 1.01 * bound
    assert total(costs, found) < 0.9 * total(costs, reference)


def test_budgets_at_the_edge_and_what_rounding_leaves_of_them() -> None:
    tiny = np.array([1e-9, 0.0, 0.0])
    assert dynamic_program([tiny, tiny], [np.array([1.0, 3.0, 2.0])] * 2, 0.0) == [2, 2]
    with pytest.raises(InfeasibleError):
        dynamic_program([np.array([1e-9])], [np.array([1.0])], 0.0)
    of_errors = [np.array([np.inf, 1.0]), np.array([np.inf, 2.0])]
    assert dynamic_program(of_errors, [np.array([1.0, 5.0])] * 2, 3.0) == [1, 1]
    of_errors = [np.array([0.3, 0.7]), np.array([0.1, 0.9])]
    costs = [np.array([2.0, 1.0]), np.array([2.0, 1.0])]
    assert dynamic_program(of_errors, costs, 0.4) == [0, 0]
    # In steps of a tenth, 1/3 and 2/3 of the budget are 0.4 and 0.7 of it.
    assert dynamic_program([np.array([1.0]), np.array([2.0])], [np.array([1.0])] * 2, 3.0, 10) == [0, 0]
    # Ten steps: each layer's 0.11 counts as 0.2, so that only five of the eight that fit are taken.
    of_errors, costs = [np.array([0.0, 0.11])] * 9, [np.array([10.0, 1.0])] * 9
    assert sum(dynamic_program(of_errors, costs, 1.0, 10)) == 9


def syncs(coefficients: tuple[float, ...], constant: float, plans: int, noise: float = 0.0) -> list[Sync]:
    draw = np.random.default_rng(1)
    found = []
    for _ in range(plans):
        sizes = tuple(int(size) for size in draw.integers(10_000, 4_000_000, len(coefficients)))
        seconds = constant + sum(b * c for b, c in zip(sizes, coefficients, strict=True))
        # The first steps of a plan open new messages.
        found += [Sync(sizes, 5 * seconds), Sync(sizes, 3 * seconds)]
        found += [Sync(sizes, seconds * (1 + noise * draw.standard_normal())) for _ in range(6)]
    return found


def test_regression_recovers_what_a_bucket_s_byte_costs() -> None:
    known = (1e-9, 4e-9, 8e-8)
    assert seconds_per_byte(syncs(known, 0.002, plans=8)) == pytest.approx(known, rel=1e-6)
    noisy = syncs(known, 0.002, plans=24, noise=0.02)
    found = seconds_per_byte(noisy)
    assert found is not None
    assert found[2] == pytest.approx(known[2], rel=0.1)
    assert fit_quality([sync for at, sync in enumerate(noisy) if at % 8 >= 2], found) > 0.95


def test_regression_waits_for_enough_plans_and_it_and_its_quality_leave_out_other_buckets() -> None:
    known = (1e-9, 4e-9)
    assert seconds_per_byte([]) is None
    assert seconds_per_byte(syncs(known, 0.0, plans=3)) is None
    before = syncs((1e-9, 1e-9, 1e-9), 0.0, plans=8)
    assert seconds_per_byte(before + syncs(known, 0.0, plans=5)) == pytest.approx(known, rel=1e-6)
    mixed = [*(s for s in syncs((1.0,), 0.0, 2)), *syncs(known, 0.0, plans=5)[2:8]]
    assert fit_quality(mixed, known) == pytest.approx(1.0)
    assert fit_quality([], known) == 0.0
