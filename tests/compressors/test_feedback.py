"""Error feedback around summed compressors, and what it must not be paired with."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import product

import pytest
import torch
from test_laws import ALIKE, SPECS

from summed_world import SummedWorld
from thinwire import parse
from thinwire.compressors import Coded, Piece, Segments, Summed, Wrapper, ef, first_state
from thinwire.integrations.optimizers import warn_about_pairing
from thinwire.optim import CompressedAdamW
from thinwire.plan import Plan
from thinwire.testing.laws import decode_one, encode_one

SHAPE = (32, 24)
NUMEL = 32 * 24


def world_of(spec: str, num_ranks: int) -> SummedWorld:
    return SummedWorld(parse(spec), num_ranks, {"layer": SHAPE})


def residuals(world: SummedWorld) -> torch.Tensor:
    return torch.stack([state.now["residual"] for state in world.states])


def _gradients(step: int, num_ranks: int, apart: float = 1.0) -> torch.Tensor:
    """A mean gradient that all ranks share, and for each what it alone sees, the same in every step."""
    shared = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(num_ranks, NUMEL, generator=torch.Generator().manual_seed(step + 1))
    own = torch.randn(num_ranks, NUMEL, generator=torch.Generator().manual_seed(10_000))
    return shared + apart * (own - own.mean(0)) + 0.1 * noise


@pytest.mark.parametrize(
    "spec",
    [
        *("ef(randk(density=0.2))", "ef(cast(bf16))"),
        *("ef(heuristic_intsgd(bits=8))", "ef(intsgd(bits=8, rounding=determ))"),
    ],
)
def test_residuals_do_not_grow_where_ranks_differ_and_integers_send_the_mean_in_the_long_run(spec: str) -> None:
    """A rank whose gradient differs from the mean in every step keeps only what it did not send itself."""
    ranks, norms, received, given = world_of(spec, 8), [], torch.zeros(NUMEL), torch.zeros(NUMEL)
    for step in range(120):
        inputs = _gradients(step, 8)
        received += ranks.step(inputs)
        given += inputs.mean(0)
        norms.append(float(residuals(ranks).norm(dim=1).mean()))
    assert max(norms[90:]) <= 1.5 * max(norms[20:50]) + 1e-6
    assert "int" not in spec or float((received - given).norm() / given.norm()) < 0.01


PARAMETER = torch.nn.Parameter(torch.zeros(SHAPE))
ADAM_LIKE = [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax]
ADAM_LIKE.append(type("OwnAdam", (torch.optim.AdamW,), {}))
ADAMW = r"CompressedAdamW"
PAIRED = {
    "dgc(topk(density=0.1))": r"torch\.optim\.SGD",
    **dict.fromkeys(("topk(density=0.1) | minmax(bits=8)", "topk(density=0.1)", "ef(randk(density=0.1))"), ADAMW),
    **dict.fromkeys(("onebit", "sign", "fft", "ef(minmax(bits=1))"), ADAMW),
    **dict.fromkeys(("minmax(bits=4)", "ef(minmax(bits=2))"), None),
    **dict.fromkeys(("topk(density=0.1, feedback=False)", "powersgd(rank=2)"), None),
}
"""Specs, and what the warning of their use with Adam says to take instead, or None where they work with it."""


def test_what_fails_under_adam_warns_and_says_what_to_use() -> None:
    for spec, instead in PAIRED.items():
        plan = Plan.build({"w": SHAPE}, {"w": spec})
        for make in ADAM_LIKE:
            with pytest.warns(UserWarning, match=instead) if instead else nullcontext():
                warn_about_pairing(plan, make([PARAMETER], lr=0.1))
        warn_about_pairing(plan, torch.optim.SGD([PARAMETER], lr=0.1))
        warn_about_pairing(plan, None)
    with pytest.warns(UserWarning, match='order="update"'):
        warn_about_pairing(plan := Plan.build({"w": SHAPE}, {"w": "topk"}), CompressedAdamW([PARAMETER]))
    warn_about_pairing(plan, CompressedAdamW([PARAMETER], order="update"))
    warn_about_pairing(Plan.build({"w": SHAPE}, {"w": "onebit"}), CompressedAdamW([PARAMETER]))


def test_the_mean_residual_of_powersgd_stays_bounded_while_ranks_drift_apart() -> None:
    """Over 300 steps the residuals' mean, which is what has not been sent, does not grow; the deviations cancel."""
    ranks, means, unsent = world_of("ef(powersgd(rank=2))", 4), [], torch.zeros(NUMEL, dtype=torch.float64)
    for step in range(300):
        inputs = _gradients(step, 4)
        unsent += inputs.double().mean(0) - ranks.step(inputs).double()
        means.append(float(residuals(ranks).mean(0).norm()))
    assert max(means[200:]) <= 1.5 * max(means[50:150])
    # Nothing was lost by rounding, though the deviations are more than ten times as long by now.
    assert float(residuals(ranks).norm(dim=1).mean()) > 10 * means[-1]
    assert float((residuals(ranks).double().mean(0) - unsent).norm()) <= 0.02 * float(unsent.norm())


def _descend(spec: str, rates: list[float]) -> float:
    """How far SGD ends from the sum of what its gradients asked for, ``Σ η·g``, relative to the last steps' part."""
    compressor = parse(spec)
    assert isinstance(compressor, Coded)
    behind, segments = torch.zeros(NUMEL), Segments.build([Piece("layer", 0, NUMEL, 0, 0)])
    state = first_state(compressor, behind, segments)
    for step, rate in enumerate(rates):
        assert state is not None
        state = replace(state, learning_rate=rate)
        gradient = torch.randn(NUMEL, generator=torch.Generator().manual_seed(step))
        message, _ = encode_one(compressor, gradient, key=step, state=state)
        behind += rate * (gradient - decode_one(compressor, message, segments, torch.float32))
        state = state.swapped()
    assert state is not None
    unit = rates[-1] if "update" not in spec else 1.0
    return float((behind - unit * state.now["residual"]).norm() / behind.norm())


@pytest.mark.parametrize("inner", ["topk(density=0.1)", "minmax(bits=2)"])
def test_residuals_weighted_by_the_learning_rate_are_what_the_parameters_lack(inner: str) -> None:
    """EF-SGD: ``x + e`` moves as uncompressed SGD does under any schedule, gradient units at one rate only."""
    rates = [0.1] * 10 + [0.01] * 10
    with pytest.raises(ValueError, match="pass optimizer="):
        Plan.build({"w": SHAPE}, {"w": f"ef({inner}, units=update)"}).at_step(0, None)
    assert _descend(f"ef({inner}, units=update)", rates) < 1e-4
    assert _descend(f"ef({inner})", rates) > 0.3
    assert _descend(f"ef({inner})", [0.1] * 20) < 1e-4


def test_terngrad_with_a_shared_scale_adds_up_its_integers_and_is_unbiased() -> None:
    """All ranks take the largest magnitude of any of them, so what arrives is k/n of it."""
    ranks, inputs = world_of("shared_terngrad", 2), _gradients(0, 2)
    inputs[1] *= 4.0
    scale = inputs.abs().max()
    assert set((ranks.step(inputs) * 2 / scale).round(decimals=4).tolist()) <= {-2.0, -1.0, 0.0, 1.0, 2.0}
    received = torch.stack([ranks.step(inputs) for _ in range(200)])
    # The variance of one rank's element is at most s·|g|.
    deviation = float((scale * inputs.abs().sum() / 2**2 / 200).sqrt())
    assert float((received.mean(0) - inputs.mean(0)).norm()) < 1.3 * deviation
    inputs[0, 5] = float("nan")
    assert parse("shared_terngrad").roundtrip(inputs[0].view(SHAPE)).isnan().all()


_QUANTIZERS = [("qsgd", "", 2), ("qsgd", ", norm=linf", 2)]
for _rounding in (", rounding=stochastic", ", rounding=nearest"):
    _QUANTIZERS += [("minmax", _rounding, 1), ("maxabs", _rounding, 2), ("maxabs", f"{_rounding}, midrise=True", 1)]
"""Names, options, and the fewest bits."""


def _heavy(step: int) -> torch.Tensor:
    """Values of a Student t distribution with two degrees of freedom, and one of 20 in every 128 normal ones.

    Each step has the same in another order: their variance is infinite, and no two draws are alike.
    """
    normal = torch.randn(4, 4096, generator=torch.Generator().manual_seed(0))
    tailed = normal[0] / (normal[1].square() + normal[2].square()).div(2.0).sqrt()
    normal[3, ::128] = 20.0
    order = torch.randperm(4096, generator=torch.Generator().manual_seed(step))
    return torch.cat([tailed[order], normal[3].roll(step)]).view(64, 128)


def _check_contraction(spec: str) -> None:
    compressor = parse(spec)
    if not isinstance(compressor, Wrapper):
        if not isinstance(compressor, Coded | Summed):
            return
        compressor = ef(compressor)
    assert isinstance(compressor, Wrapper)
    coder = compressor.coder
    if not coder.traits.contracts:
        return
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    assert float((coder.roundtrip(x) - x).norm() / x.norm()) <= 1.0, coder
    x = _heavy(0)
    if float((coder.roundtrip(x) - x).norm() / x.norm()) <= 1.0:
        return
    residual, norms = torch.zeros_like(x), []
    for step in range(60):
        p = _heavy(step) + residual
        residual = p - coder.roundtrip(p, step)
        norms.append(float(residual.norm()))
    assert max(norms[40:]) <= 1.5 * max(norms[:30]), coder


def test_what_contracts_by_its_traits_does() -> None:
    """Normally distributed values are larger than the error, and residuals of heavy-tailed ones do not grow."""
    for spec in SPECS:
        if spec not in ALIKE:
            _check_contraction(spec)
    for (name, options, fewest), bits, bucket in product(_QUANTIZERS, (1, 2, 3, 4, 8), (16, 1024)):
        if bits >= fewest:
            _check_contraction(f"{name}(bits={bits}, bucket={bucket}{options})")


def test_quantizers_with_feedback_round_to_nearest_unless_the_spec_says_otherwise() -> None:
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    for kind, bits in product(("minmax", "maxabs", "topk(density=0.1) | minmax"), (2, 8)):
        compressors = [
            parse(f"ef({kind}(bits={bits}, bucket=64{more}))")
            for more in ("", ", rounding=nearest", ", rounding=stochastic")
        ]
        usual, nearest, stochastic = (compressor.roundtrip(x) for compressor in compressors)
        assert torch.equal(usual, nearest)
        assert not torch.equal(usual, stochastic)
        assert "rounding" not in str(compressors[0])
