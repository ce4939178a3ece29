"""Figures of ``python -m experiments bench ...``: what is compared, and what is made of measurements."""

from __future__ import annotations

import math
import re

import pytest
import torch

from experiments.bench import claims, families
from experiments.bench.claims import Point, at_equal_bytes, at_the_settings, fft_points, verdicts
from experiments.bench.gradients import Gradients, Moment, make_task, record
from experiments.bench.passes import Pass, Quality, measure_quality
from experiments.framework.pages import BENCHMARKS
from thinwire.compressors import FFT, QSGD, TernGrad, TopK, parse, registered
from thinwire_tools.compare.variants import EVERY

LAYERS = {"a": (48, 64), "b": (128, 40)}


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
    "spec", ["minmax(bits=4)", "maxabs(scale=row, rounding=nearest)", "topk(density=0.1) | minmax(rounding=nearest)"]
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


def test_bytes_of_values_and_of_indices_and_errors_with_state(gradients: Gradients) -> None:
    topk = quality("topk(density=0.25)", gradients)
    # A bit an element says which; headers and padding are left.
    assert topk.bytes_per_element - topk.values_per_element == pytest.approx(1 / 8, abs=0.02)
    assert topk.values_per_element == pytest.approx(4 * 0.25, abs=0.03)
    # State comes from the step before: a gradient of low rank is found.
    generator = torch.Generator().manual_seed(0)
    low = (torch.randn(48, 2, generator=generator) @ torch.randn(2, 64, generator=generator)).flatten()
    found = quality("powersgd(rank=2)", Gradients({"a": (48, 64)}, (Moment(1, low, low),)))
    assert found.relative_error < 1e-4


def test_a_recorded_gradient_is_that_of_the_run() -> None:
    task = make_task("gpt", smoke=True)
    found = record(task, [2])
    model, first = task.build(0), next(task.batches(0, 0, 1))
    task.loss(model, first).backward()
    expected = torch.cat(
        [p.grad.flatten() for n, p in model.named_parameters() if n in found.layers and p.grad is not None]
    )
    assert torch.equal(record(task, [1]).moments[0].before, expected)
    assert not torch.equal(found.moments[0].before, found.moments[0].now)


def test_every_compressor_is_compared_and_the_page_names_what_is() -> None:
    specs = " ".join(families.default_specs())
    # raw has no error, dgc is what its sparsifier is, and intdiana rounds as intsgd does, what gradients differ by from
    # those before; delta and direct are for activations: none says anything here.
    without = ("raw", "dgc", "intdiana", "delta", "direct")
    assert not [n for n in registered() if n not in specs and n not in without]
    named = set(re.findall(r'^  ".+": "(.+)",$', (BENCHMARKS / "compressors.j2").read_text(), re.MULTILINE))
    assert "minmax(bits=4, bucket=128)" in named
    for measured in (families.default_specs(), EVERY):
        assert named <= {str(parse(spec)) for spec in measured}


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
    alone = [Point(QSGD(3), 1.0, 0.4, 0.4)]
    assert next(said for _, _, said in verdicts(at_equal_bytes(alone))).startswith("not comparable")
    settings = {finding.against: finding for finding in at_the_settings(points)}
    assert {finding.fft for finding in settings.values()} == {"fft(theta=0.85, bits=10)"}
    assert {name: f.holds for name, f in settings.items()} == {"top-k": False, "QSGD": True, "TernGrad": True}
    assert settings["top-k"].ratio == pytest.approx(1.25)
    assert at_the_settings(alone) == []
