"""Figures of ``python -m experiments bench ...``: what is compared, and what is made of measurements."""

from __future__ import annotations

import math
import re

import pytest
import torch

from experiments.bench import families
from experiments.bench.passes import Gradients, Moment, Pass, Quality, make_task, measure_quality, record
from experiments.framework.pages import BENCHMARKS
from thinwire.compressors import parse, registered
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
    named = set(re.findall(r'^  ".+": "(.+)",$', (BENCHMARKS / "compressors/compressors.j2").read_text(), re.MULTILINE))
    assert "minmax(bits=4, bucket=128)" in named
    for measured in (families.default_specs(), EVERY):
        assert named <= {str(parse(spec)) for spec in measured}
