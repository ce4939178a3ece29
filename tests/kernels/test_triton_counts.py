"""Bytes and launches of the Triton kernels, counted in the interpreter, beside the least that they could be."""

# pyright: reportMissingImports=false
from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is not installed: pip install --no-deps triton")

from experiments.bench.gpu import FORMATS, bucket_launches, operations
from triton_cases import interpreted, quiet

SIZES = (2**13, 512, 5000)
MORE = {"qsgd(bits=4)": ("reduce",), "minmax(bits=4, bucket=100)": ("encode", "reduce")}
"""What needs several launches, each of which reads the values: docs/gpu.md says why."""


@interpreted
@quiet
@pytest.mark.parametrize("spec", FORMATS)
def test_kernels_move_little_more_than_they_must(spec: str) -> None:
    for name, found in operations(FORMATS[spec], SIZES, 3):
        more = name.startswith(MORE.get(spec, ()))
        assert found.floor <= found.moved <= (2.5 if more else 1.15) * found.floor, name
        assert more or found.launches == 1, name


@interpreted
@quiet
@pytest.mark.parametrize("spec", ["minmax(bits=4)", "qsgd(bits=4)"])
def test_a_bucket_takes_few_launches_whatever_its_layers(spec: str) -> None:
    assert bucket_launches(f"ef({spec})", (*SIZES, *SIZES), 4) == bucket_launches(spec, SIZES, 4) <= 8
