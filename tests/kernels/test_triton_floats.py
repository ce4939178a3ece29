"""The Triton kernels of element-wise formats, integers and learned levels: bit for bit against the reference."""

# pyright: reportMissingImports=false
from __future__ import annotations

import inspect
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernel_cases import same, special, values
from thinwire import kernels
from thinwire.kernels import Table, reference_floats

pytest.importorskip("triton", reason="triton is not installed: pip install --no-deps triton")

from triton_cases import DEVICE, assembly, compiled, in_the_interpreter, quiet, runs

SIZES = (129, 0, 900, 2100)


def segments(num_bytes: Callable[[int], int], sizes: tuple[int, ...] = SIZES) -> tuple[Table, Tensor, Tensor]:
    """A table, values for it, and a message full of what must not be read."""
    rows, start, payload = [], 8, 64
    for i, numel in enumerate(sizes):
        rows.append((start, numel, 128 * i, payload, kernels.site_id(f"layer{i}")))
        start += numel + 7
        payload += kernels.align(num_bytes(numel)) + 64
    return Table(torch.tensor(rows)), special(start, len(rows)), torch.full((payload,), 0xAB, dtype=torch.uint8)


def gpu_floats():
    from thinwire.kernels import gpu_floats

    return gpu_floats


@runs
@quiet
def test_natural() -> None:
    spans, x, blank = segments(kernels.natural_bytes)
    results = []
    for run, device in ((reference_floats, torch.device("cpu")), (gpu_floats(), DEVICE)):
        sent, there = blank.to(device, copy=True), x.to(device)
        run.natural_encode(there, spans, sent, key=9 << 60 | 4, shift=5)
        stored, added = torch.full_like(there, 7.0), torch.ones_like(there)
        run.natural_decode(sent, spans, stored, add=False, scale=0.3)
        hostile = torch.arange(sent.numel(), device=device).mul(7919).remainder(251).to(torch.uint8)
        run.natural_decode(hostile, spans, added, add=True, scale=0.3)
        results.append([v.cpu() for v in (sent, stored, added)])
    assert all(same(a, b) for a, b in zip(*results, strict=True))


@runs
@quiet
@pytest.mark.parametrize("rounding", [0, 1, 2])
@pytest.mark.parametrize("bits", [3, 4, 7, 8, 9, 10, 15])
def test_range_floats(bits: int, rounding: int) -> None:
    spans, x, blank = segments(lambda numel: kernels.rangefloat_bytes(numel, bits))
    params = torch.tensor([[3.0, max(0, bits - 8)], [1.0, 3.5], [1e-39, 22.0], [1e-3, min(22, bits - 2)]])
    if bits % 2:
        params[0] = torch.tensor([torch.nan, 4.0] if rounding else [-3.0, 4.0])
        params[2] = torch.tensor([2.0, 4.5])
    results = []
    for run, device in ((reference_floats, torch.device("cpu")), (gpu_floats(), DEVICE)):
        sent, there, given = blank.to(device, copy=True), x.to(device), params.to(device)
        run.rangefloat_encode(there, spans, sent, given, bits=bits, rounding=rounding, key=77 << 55 | 3)
        stored, added = torch.full_like(there, 7.0), torch.ones_like(there)
        run.rangefloat_decode(sent, spans, stored, bits=bits, add=False, scale=1.0)
        hostile = torch.arange(sent.numel(), device=device).mul(7919).remainder(251).to(torch.uint8)
        for row in spans.segments:  # headers that were written, codes that were not
            hostile[row.payload : row.payload + 64] = sent[row.payload : row.payload + 64]
        run.rangefloat_decode(hostile, spans, added, bits=bits, add=True, scale=0.3)
        results.append([v.cpu() for v in (sent, stored, added)])
    assert all(same(a, b) for a, b in zip(*results, strict=True))


@runs
@quiet
@pytest.mark.parametrize("nearest", [False, True])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int32])
def test_integers(dtype: torch.dtype, nearest: bool) -> None:
    from thinwire.kernels import gpu_integers

    spans, x, blank = segments(lambda numel: numel * dtype.itemsize)
    x[300:320] = torch.arange(20) * 0.5 - 5
    scales, clip = torch.tensor([3.0, 1.0, 1.0, 1e6]), 100.0 if dtype == torch.int8 else float(2**31 - 128)
    results = []
    for run, device in ((reference_floats, torch.device("cpu")), (gpu_integers, DEVICE)):
        out, there, given = blank.to(device, copy=True).view(dtype), x.to(device), scales.to(device)
        clipped = run.int_round(there, spans, given, out, clip=clip, key=5, nearest=nearest)
        y = torch.full_like(there, 7.0)
        run.int_decode(out, spans, y, given)
        results.append([v.cpu() for v in (out, clipped, y)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@runs
@quiet
@pytest.mark.parametrize(("bits", "bucket"), [(1, 128), (3, 100), (4, 1024), (5, 1), (8, 2**40)])
def test_learned_levels(bits: int, bucket: int) -> None:
    from thinwire.kernels import gpu_levels

    spans, x, blank = segments(lambda numel: kernels.levels_bytes(numel, bits, bucket), (129, 0, 300, 1100))
    x[-500:] = values(500, 3)
    levels = torch.rand(4, 2**bits, generator=torch.Generator().manual_seed(bits)).sort().values
    results = []
    for run, device in ((reference_floats, torch.device("cpu")), (gpu_levels, DEVICE)):
        sent, there = blank.to(device, copy=True), x.to(device)
        run.levels_encode(there, spans, sent, levels.to(device), bits=bits, bucket=bucket)
        stored, added = torch.full_like(there, 7.0), torch.ones_like(there)
        run.levels_decode(sent, spans, stored, bits=bits, bucket=bucket, add=False, scale=0.3)
        hostile = torch.arange(sent.numel(), device=device).mul(7919).remainder(251).to(torch.uint8)
        run.levels_decode(hostile, spans, added, bits=bits, bucket=bucket, add=True, scale=0.3)
        results.append([v.cpu() for v in (sent, stored, added)])
    assert all(same(a, b) for a, b in zip(*results, strict=True))


@runs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    spans, x, blank = segments(kernels.natural_bytes)
    x, sent = values(x.numel(), 1, dtype), blank.clone()
    reference_floats.natural_encode(x, spans, sent, key=1)
    there = blank.to(DEVICE, copy=True)
    gpu_floats().natural_encode(x.to(DEVICE), spans, there, key=1)
    assert same(sent, there.cpu())


@runs
def test_nothing_to_do() -> None:
    y, sent = torch.ones(4, device=DEVICE), torch.zeros(64, dtype=torch.uint8, device=DEVICE)
    spans = Table(torch.tensor([[0, 0, 0, 0, 1]]))
    run = gpu_floats()
    run.natural_encode(y, spans, sent, key=1)
    run.natural_decode(sent, spans, y, add=False, scale=1.0)
    run.rangefloat_encode(y, spans, sent, torch.ones(1, 2, device=DEVICE), bits=8, rounding=1, key=1)
    run.rangefloat_decode(sent, spans, y, bits=8, add=False, scale=1.0)
    assert y.tolist() == [1.0] * 4
    assert not sent.any()


@compiled
@pytest.mark.timeout(300)
def test_in_the_interpreter() -> None:
    in_the_interpreter(__file__, at_least=34)


TYPES = {
    **dict.fromkeys(("x", "y", "params", "alphas", "factors", "inverses", "levels"), "*fp32"),
    **dict.fromkeys(("pieces", "rows", "clipped", "firsts"), "*i64"),
    **dict.fromkeys(("low_keys", "high_keys"), "*i32"),
    **dict.fromkeys(("key_low", "key_high", "bucket", "shift"), "i32"),
    **dict.fromkeys(("scale", "clip"), "fp32"),
    "message": "*u8",
    "out": "*i8",
}


@compiled
def test_compiles() -> None:
    from thinwire.kernels import gpu_elements, gpu_integers, gpu_levels

    assert set(gpu_elements.__all__) == {name for name in dir(gpu_elements) if name.endswith(("code", "round"))}
    floats = gpu_floats()
    size = {"GROUPS": 16}
    cases = [
        (floats.float_headers, {"PARAMS": True}),
        (floats.natural_codes, size),
        (floats.natural_values, {"SIZE": 2048, "MODE": 1}),
        *((floats.range_codes, {"BITS": bits, "ROUNDING": how, **size}) for bits, how in [(8, 1), (10, 2), (15, 0)]),
        *((floats.range_values, {"BITS": bits, "MODE": 1, **size}) for bits in (8, 10, 15)),
        *((gpu_integers.round_tiles, {"NEAREST": nearest, **size}) for nearest in (False, True)),
        (gpu_integers.scale_integers, {"SIZE": 2048}),
        (gpu_levels.level_scales, {"BITS": 4, "COUNT": 128}),
        (gpu_levels.level_codes, {"BITS": 4, **size}),
        (gpu_levels.level_values, {"BITS": 5, "MODE": 0, **size}),
    ]
    for kernel, constants in cases:
        text = assembly(kernel, TYPES, **constants)
        assert "fma." not in text
        assert "approx" not in text


@compiled
def test_tensors_on_gpus_find_every_kernel() -> None:
    from types import SimpleNamespace

    from thinwire.kernels import floats, reference_sparse, sparse

    there = SimpleNamespace(is_cuda=True)
    for module in (floats, sparse):
        names = re.findall(r"torch_or_triton\(\w+\)\.(\w+)\(", inspect.getsource(module))
        assert len(names) >= 7
        found = module.torch_or_triton(there)
        assert found not in (reference_floats, reference_sparse)
        assert all(callable(getattr(found, name)) for name in names)
