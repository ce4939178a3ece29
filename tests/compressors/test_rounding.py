"""Rounding that depends on what is coded, unless the spec gives it."""

from __future__ import annotations

import pytest
import torch

from thinwire import parse
from thinwire.compressors import Coded, Delta
from thinwire.pipeline.options import PipelineOptions
from thinwire.plan import Filter, sharded_plan


def test_weights_of_few_bits_are_rounded_to_nearest() -> None:
    for kind, bits in [*(("minmax", bits) for bits in range(1, 9)), *(("maxabs", bits) for bits in (2, 6, 7))]:
        spec = f"{kind}(bits={bits}, bucket=1024)"
        plan = sharded_plan({"w": (64, 64)}, {"weights": spec, "gradients": spec}, Filter(0))
        assert ("rounding=nearest" in str(plan["weights/w"])) == (bits <= 6), spec
        assert str(plan["gradients/w"]) == spec
        explicit = f"{kind}(bits={bits}, bucket=1024, rounding=stochastic)"
        plan = sharded_plan({"w": (64, 64)}, {"weights": explicit}, Filter(0))
        assert str(plan["weights/w"]) == explicit


@pytest.mark.parametrize("bits", [2, 4])
def test_deltas_of_few_bits_err_least(bits: int) -> None:
    """Followed for thirty steps, activations stay nearer than with any other rounding of `MaxAbs` that is safe."""

    def follow(coder: Coded) -> float:
        generator = torch.Generator().manual_seed(0)
        a = torch.randn(64, 256, generator=generator)
        m, errors = a.clone(), []
        for step in range(30):
            change = torch.randn(64, 256, generator=generator)
            a = a + change
            m = m + coder.roundtrip(a - m, step)
            errors.append(float((a - m).norm() / change.norm()))
        return sum(errors[10:]) / 20

    delta = parse(f"delta(maxabs(bits={bits}))")
    assert isinstance(delta, Delta)
    chosen = follow(delta.coder)
    stochastic = parse(f"delta(maxabs(bits={bits}, rounding=stochastic))")
    assert isinstance(stochastic, Delta)
    assert str(stochastic.coder) == f"maxabs(bits={bits}, bucket=128, rounding=stochastic)"
    assert chosen < 0.75 * follow(stochastic.coder)
    assert chosen < {2: 0.5, 4: 0.13}[bits]


def test_stages_code_deltas_so_and_activations_as_they_are_given() -> None:
    options = PipelineOptions(forward="delta(maxabs(bits=2))", backward="maxabs(bits=2)")
    assert str(options.coder_at(0, "forward")) == "maxabs(bits=2, bucket=128, rounding=nearest, midrise=True)"
    assert str(options.coder_at(0, "backward")) == "maxabs(bits=2, bucket=128)"
    chained = PipelineOptions(forward="delta(topk(density=0.2) | maxabs(bits=3))").coder_at(0, "forward")
    assert str(chained) == "topk(density=0.2) | maxabs(bits=3, bucket=128, rounding=nearest)"
