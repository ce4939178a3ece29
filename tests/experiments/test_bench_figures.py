"""Figures of ``python -m experiments bench ...``: what is compared, and what is made of measurements."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import pytest
import torch

from experiments.bench import claims, families
from experiments.bench.claims import Point, at_equal_bytes, at_the_settings, fft_points, interpolated, verdicts
from experiments.bench.gradients import Gradients, Moment, make_task, record
from experiments.bench.integers import SPECS
from experiments.bench.members import Run, _add, _add_comparisons, _digest, _loss_at, _shares
from experiments.bench.passes import Pass, Quality, measure_quality
from thinwire.collectives import Layer, Layout
from thinwire.compressors import FFT, QSGD, Summed, TernGrad, TopK, for_world, parse, registered
from thinwire_tools.compare import every
from thinwire_tools.results import Results

ROOT = Path(__file__).resolve().parents[2]
LAYERS = {"a": (48, 64), "b": (128, 40)}

# --- compressors


@pytest.fixture(scope="module")
def gradients() -> Gradients:
    generator = torch.Generator().manual_seed(0)
    numel = sum(math.prod(shape) for shape in LAYERS.values())
    before, now = (torch.randn(numel, generator=generator) for _ in range(2))
    return Gradients(LAYERS, (Moment(4, before, now),))


def quality(spec: str, gradients: Gradients) -> Quality:
    (found,) = measure_quality(Pass(spec, gradients.layers), gradients)
    return found


@pytest.mark.parametrize(
    "spec",
    [
        *("minmax(bits=4)", "maxabs(scale=row, rounding=nearest)", "raw", "cast(fp16)", "qsgd(bits=8)"),
        *("topk(density=0.1) | minmax(rounding=nearest)", "fft(theta=0.8)", "randk(density=0.1)"),
    ],
)
def test_errors_and_bytes_are_those_of_the_compressor_layer_by_layer(spec: str, gradients: Gradients) -> None:
    compressor, x = parse(spec), gradients.moments[0].now
    found = quality(spec, gradients)
    parts = [part.view(shape) for part, shape in zip(x.split([48 * 64, 128 * 40]), LAYERS.values(), strict=True)]
    received = torch.cat([compressor.roundtrip(part, key=at).flatten() for at, part in enumerate(parts)])
    expected = float((received - x).norm() / x.norm())
    # Draws differ, so unbiased ones agree as far as so many elements make them.
    assert found.relative_error == pytest.approx(expected, rel=0.1 if compressor.traits.unbiased else 1e-4)
    num_bytes = sum(compressor.wire_bytes(shape) for shape in LAYERS.values())
    assert found.bytes_per_element == pytest.approx(num_bytes / x.numel())
    assert 0 < found.values_per_element <= found.bytes_per_element


def test_bytes_of_values_of_indices_and_of_bounded_messages_and_errors_with_state(gradients: Gradients) -> None:
    topk = quality("topk(density=0.25)", gradients)
    # A bit an element says which; headers and padding are left.
    assert topk.bytes_per_element - topk.values_per_element == pytest.approx(1 / 8, abs=0.02)
    assert topk.values_per_element == pytest.approx(4 * 0.25, abs=0.03)
    fft = quality("fft(theta=0.5)", gradients)
    # Half as many components as elements; the second layer fills its last block with zeros.
    assert 1 / 16 < fft.bytes_per_element - fft.values_per_element < 1 / 9
    few, many = (quality(f"threshold(lam={lam}, capacity=0.5)", gradients) for lam in (2.5, 1.0))
    assert few.bytes_per_element < 0.5 * many.bytes_per_element
    # State comes from the step before: a gradient of low rank is found.
    generator = torch.Generator().manual_seed(0)
    low = (torch.randn(48, 2, generator=generator) @ torch.randn(2, 64, generator=generator)).flatten()
    found = quality("powersgd(rank=2)", Gradients({"a": (48, 64)}, (Moment(1, low, low),)))
    assert found.relative_error < 1e-4
    assert found.cosine == pytest.approx(1)


def test_a_recorded_gradient_is_that_of_the_run() -> None:
    task = make_task("gpt", smoke=True)
    found = record(task, [2])
    assert all(len(shape) >= 2 and math.prod(shape) >= 1024 for shape in found.layers.values())
    model, first = task.build(0), next(task.batches(0, 0, 1))
    task.loss(model, first).backward()
    expected = torch.cat(
        [p.grad.flatten() for n, p in model.named_parameters() if n in found.layers and p.grad is not None]
    )
    assert torch.equal(record(task, [1]).moments[0].before, expected)
    assert not torch.equal(found.moments[0].before, found.moments[0].now)
    for steps in ([], [0], [3, 2], [task.steps]):
        with pytest.raises(ValueError, match="ascending"):
            record(task, steps)


def test_every_compressor_is_compared_and_the_readme_names_what_is(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = " ".join(families.default_specs())
    # raw has no error, dgc is what its sparsifier is, and intdiana rounds as intsgd does, what gradients differ by from
    # those before; delta and direct are for activations: none says anything here.
    without = ("raw", "dgc", "intdiana", "delta", "direct")
    assert not [n for n in registered() if n not in specs and n not in without]
    assert not [s for s in families.default_specs() if families.family(parse(s)) == "other"]
    assert families.source(parse("ef(topk | qsgd)")).startswith("Aji and Heafield 2017")
    monkeypatch.syspath_prepend(ROOT / "tools")
    named = set(importlib.import_module("readme").COMPRESSORS.values())
    for measured in (families.default_specs(), every.EVERY):
        assert named <= {str(parse(spec)) for spec in measured}


def test_error_at_equal_bytes_is_on_a_straight_line_of_logarithms() -> None:
    curve = [(4.0, 0.01), (1.0, 1.0), (2.0, 0.1)]
    assert interpolated(curve, 2.0) == 0.1
    assert interpolated(curve, 2**0.25) == pytest.approx(0.1**0.25)
    assert interpolated(curve, 0.99) is interpolated(curve, 4.01) is interpolated([], 1.0) is None


def synthetic(topk_error: float) -> list[Point]:
    return [
        *(Point(FFT(theta), error, size, size - 0.06) for theta, error, size in ((0.95, 0.8, 0.1), (0.5, 0.2, 0.7))),
        Point(FFT(0.85, 32), 0.1, 0.3, 0.2),
        Point(FFT(0.85), 0.5, 0.25, 0.19),
        Point(TopK(0.15), topk_error, 0.25, 0.19),
        Point(TopK(0.9), 0.01, 3.0, 2.9),
        Point(QSGD(3), 1.0, 0.4, 0.4),
        Point(QSGD(3, norm="linf"), 0.5, 0.4, 0.4),
        Point(TernGrad(), 2.0, 0.25, 0.25),
        Point(parse("topk(density=0.15) | minmax(bits=8)"), 0.25, 0.25, 0.19),
        Point(TopK(0.15, "sampled"), 0.25, 0.25, 0.19),
    ]


def test_the_claim_of_the_fft_is_judged_at_equal_bytes_and_at_the_papers_settings() -> None:
    points = synthetic(topk_error=0.4)
    assert len(fft_points(points)) == 3
    found = {(against, counted): said for against, counted, said in verdicts(at_equal_bytes(points))}
    assert set(found) == {(against, counted) for against in claims.AGAINST for counted in (True, False)}
    assert found["top-k", True] == (
        "does not hold: FFT has 1.25 times its error; 1 of 2 lie outside the bytes that FFT was measured at"
    )
    assert found["top-k, values coded", True].startswith("does not hold: FFT has 2.00 times")
    assert found["TernGrad", True] == "holds: FFT has 0.25 times its error"
    better = {(a, c): s for a, c, s in verdicts(at_equal_bytes(synthetic(topk_error=0.6)))}
    assert better["top-k", False].startswith("holds: FFT has 0.83 times")
    mixed = {(a, c): s for a, c, s in verdicts(at_equal_bytes([*points, Point(TopK(0.2), 0.9, 0.25, 0.19)]))}
    assert "holds at 1 of 2 sizes, not beside topk(density=0.15): FFT has 0.56 to 1.25" in mixed["top-k", True]
    alone = [Point(QSGD(3), 1.0, 0.4, 0.4)]
    assert next(said for _, _, said in verdicts(at_equal_bytes(alone))).startswith("not comparable")
    settings = {finding.against: finding for finding in at_the_settings(points)}
    assert {finding.fft for finding in settings.values()} == {"fft(theta=0.85, bits=10)"}
    assert {name: f.holds for name, f in settings.items()} == {"top-k": False, "QSGD": True, "TernGrad": True}
    assert settings["top-k"].ratio == pytest.approx(1.25)
    assert at_the_settings(alone) == []


# --- others


def test_bits_of_integers_are_those_of_the_page() -> None:
    """Of 4 ranks, as a ring's mean: docs/integers.md."""
    shape, found = (1000, 1000), []
    for spec in SPECS:
        compressor = for_world(parse(spec), 4, math.prod(shape))
        assert isinstance(compressor, Summed)
        layout = Layout.build([Layer("w", 0, shape, compressor)], 4, torch.float32)
        found.append(8 * max(layout.sent_bytes(rank) for rank in range(4)) / (1.5 * math.prod(shape)))
        assert compressor.wire_bytes(shape) == pytest.approx(found[-1] * math.prod(shape) / 8, rel=0.01)
    assert found == pytest.approx([8, 5, 3, 3], rel=0.02)


# --- members


def test_tokens_and_seconds_add_up_over_workers_and_weights_are_compared() -> None:
    notes = [
        {"step": 25, "kept": 100, "weights": "a", "loss": 3.0},
        {"step": 25, "kept": 100, "weights": "a"},
        {"step": 50, "kept": 100, "weights": "b", "loss": 2.0},
        {"step": 50, "kept": 0, "weights": "left out"},
        {"step": 75, "kept": 200, "weights": "c"},
        {"step": 75, "kept": 100, "weights": "other", "loss": 1.5},
    ]
    assert _digest(notes) == ([(200, 3.0), (300, 2.0), (600, 1.5)], 2, 1)
    notes = [{"seconds": {"starting": 4.0, "exchanging": 1.0}}, {"seconds": {"starting": 0.0, "exchanging": 2.0}}]
    shares = _shares(notes, kept_s=10.0, present_s=20.0)
    assert shares == pytest.approx({"kept_steps": 0.5, "starting": 0.2, "exchanging": 0.15, "lost": 0.15})


def test_losses_are_compared_at_equal_tokens() -> None:
    curve = [(100.0, 3.0), (300.0, 2.0)]
    assert _loss_at(curve, 200.0) == pytest.approx(2.5)
    assert _loss_at(curve, 301.0) is None
    results = Results("test")
    goodput = {"of_all_workers": 0.9, "of_present_workers": 0.9}
    whole = Run(goodput, {"kept_steps": 0.9}, 400.0, curve, 9, 0, 0, 1e6, "")
    half = Run(goodput, {"kept_steps": 0.5}, 200.0, [(50.0, 4.0), (200.0, 2.6)], 5, 0, 6, 1e6, "")
    _add(results, "undisturbed", 0, whole, 0)
    _add(results, "members", 0, half, 2)
    _add(results, "members", 1, half, 2)  # has no undisturbed run to compare it with
    for _ in range(2):  # anew after each way, without leaving the former ones
        _add_comparisons(results)
    assert results.value("members/0/loss_excess") == pytest.approx(2.6 / 2.5 - 1)
    assert results.value("members/0/kept_of_undisturbed") == 0.5
    assert sum(row["name"].endswith("/loss_excess") for row in results.results) == 1
