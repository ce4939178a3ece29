"""The way through a device with its own kernels: the bytes of the CPU, message by message and through collectives."""

# pyright: reportMissingImports=false
from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from device_cases import MIXED, check_shards_alike, check_ways_alike, layers_of, same
from kernel_cases import same as alike, special, values
from thinwire import kernels, parse
from thinwire.collectives import Layout
from thinwire.compressors import Piece, Raw, Segments
from thinwire.kernels import native

pytest.importorskip("triton", reason="triton is not installed: pip install --no-deps triton")

from triton_cases import DEVICE, INTERPRETED, assembly, compiled, quiet, runs

SIZES = (3000, 0, 1, 4500, 129)


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors of the CPU go through Triton, if it is interpreted."""
    if INTERPRETED:
        from triton.runtime.interpreter import GridExecutor

        one_at_a_time, launch = threading.Lock(), GridExecutor.__call__

        def launch_alone(self, *args, **options):
            with one_at_a_time:
                return launch(self, *args, **options)

        monkeypatch.setattr(GridExecutor, "__call__", launch_alone)
        for where in (native, kernels):
            monkeypatch.setattr(where, "asynchronous", lambda tensor: getattr(_here, "there", False))
        _here.there = True
    yield
    _here.there = False


_here = threading.local()


def on_the_host(run):
    """What ``run`` gives with the CPU's kernels."""
    before, _here.there = getattr(_here, "there", False), False
    try:
        return run()
    finally:
        _here.there = before


def on_both(run) -> list[tuple[Tensor, Tensor]]:
    """Pairs of what ``run`` gives on the CPU and on the device."""
    return list(zip(on_the_host(lambda: run(torch.device("cpu"))), run(DEVICE), strict=True))


def segments_of() -> tuple[Segments, int, int]:
    """Pieces with gaps between them, the elements that they reach to, and the bytes of their raw payloads."""
    pieces, start, at = [], 3, 64
    for i, numel in enumerate(SIZES):
        pieces.append(Piece(f"layer{i}", start, numel, 0, at))
        start += numel + 5
        at += Raw().payload_bytes(numel, torch.float32)
    return Segments.build(pieces), start, at


def marked(num_bytes: int) -> Tensor:
    return torch.full((num_bytes,), 0xAB, dtype=torch.uint8)


@runs
@quiet
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_raw_values(dtype: torch.dtype, there: None) -> None:
    segments, numel, size = segments_of()
    # In 16 bits what needs no rounding: the interpreter cuts bf16 off where GPUs round to nearest even.
    x = (special(numel, 0) if dtype == torch.float32 else values(numel, 0).round().clamp(-8, 8)).to(dtype)
    given = [
        (v if dtype == torch.float32 else v.round().clamp(-8, 8)).to(dtype)
        for v in (values(numel, 10 + i) for i in range(3))
    ]
    for count in range(4):

        def run(device: torch.device, count: int = count) -> list[Tensor]:
            own, table = x.to(device, copy=True), segments.table
            sent = [marked(size).to(device) for _ in range(count)]
            for values_, message in zip(given, sent, strict=False):
                kernels.raw_encode(values_.to(device), table, message)
            out, y, scaled, again = marked(size).to(device), own.clone(), own.clone(), own.clone()
            kernels.raw_sum(sent, own.float(), table, y, scale=0.25, out_message=out)
            kernels.raw_sum(sent, own, table, again, scale=2.0)
            kernels.raw_decode(out, table, own, add=True)
            kernels.raw_decode(out, table, scaled, scale=2.0)
            return [*sent, out, y, own, scaled, again]

        for wanted, got in on_both(run):
            assert torch.equal(wanted.view(torch.uint8), got.cpu().view(torch.uint8))


@runs
@quiet
def test_sums_and_scales(there: None) -> None:
    segments, numel, _ = segments_of()
    x, other = values(numel, 0), values(numel, 1)
    for kind in (torch.float32, torch.bfloat16):

        def run(device: torch.device, kind: torch.dtype = kind) -> list[Tensor]:
            mine, its = x.to(device).to(kind), other.to(device)
            out = [torch.full((numel,), 7.0, device=device) for _ in range(4)]
            kernels.rows_add(mine, its, segments.table, out[0], alpha=4.0)
            kernels.rows_scale(its, segments.table, out[1], by=1 / 3)
            kernels.rows_scale(its, segments.table, out[2], over=3.0)
            kernels.rows_scale(mine, segments.table, out[3])
            return out

        assert all(same(wanted, got) for wanted, got in on_both(run))


OTHERS = [
    *("topk(density=0.1)", "topk(density=0.02, select=sampled)", "dgc(topk(density=0.05))"),
    *("topk(density=0.1) | minmax(bits=8)", "threshold(lam=0.5, capacity=0.01)", "globaltopk(density=0.05)"),
    *("gaussian(bits=2)", "natural", "levels(bits=3, min_numel=0)", "rangefloat(bits=8, mantissa=3, range=4.0)"),
]


@runs
@quiet
@pytest.mark.parametrize("spec", OTHERS)
def test_the_reference_takes_tensors_of_a_device(spec: str, there: None) -> None:
    poisoned = torch.arange(7000).float().remainder(7).sub(3)
    poisoned[[10, 3020]] = torch.tensor([torch.nan, -torch.inf])
    for x in (values(7000, 0), poisoned):
        wanted, got = on_both(lambda device, x=x: [parse(spec).roundtrip(x.to(device), key=3)])[0]
        assert alike(wanted, got.cpu())


@runs
def test_random_indices(there: None) -> None:
    like = torch.zeros(1, device=DEVICE)
    for numel, k in [(1, 1), (5, 0), (4097, 4097), (70_000, 3000)]:
        wanted = on_the_host(lambda numel=numel, k=k: kernels.sample_indices(numel, k, 77))
        assert torch.equal(wanted, kernels.sample_indices(numel, k, 77, like).cpu())


def begin() -> None:
    _here.there = True


@runs
@quiet
@pytest.mark.parametrize("num_ranks", [2])
def test_all_kinds_in_one_bucket_end_with_the_bytes_of_the_cpu(num_ranks: int, there: None) -> None:
    check_ways_alike(Layout.build(layers_of(MIXED), num_ranks, torch.float32), 2, DEVICE, begin)


KINDS = [
    *("ef(minmax(bits=2))", "lattice(bits=4)", "terngrad(clip=2.5)", "natural", "cast(fp16)"),
    *("levels(bits=3, min_numel=0)", "truncate(gamma=4)", "sign(majority=True)", "randk(density=0.1)"),
    *("ef(globaltopk(density=0.05))", "dgc(topk(density=0.05))", "topk(density=0.1) | minmax(bits=8)"),
]


@runs
@quiet
@pytest.mark.parametrize("spec", KINDS)
def test_a_bucket_of_one_kind_ends_with_the_bytes_of_the_cpu(spec: str, there: None) -> None:
    layers = layers_of([spec], ((70, 50), (3,), (0,), (9, 11)))
    check_ways_alike(Layout.build(layers, 2, torch.float32), 2, DEVICE, begin)


@compiled
def test_compiles() -> None:
    from thinwire.kernels import gpu

    types = dict.fromkeys(("x", "y", "base", "total", "other", "out"), "*fp32")
    types |= dict.fromkeys(("message", "out_message"), "*u8")
    types |= dict.fromkeys(("pieces", "rows"), "*i64")
    types |= dict.fromkeys(("scale", "weight", "before", "after", "alpha", "by", "over"), "fp32")
    size = {"SIZE": 2048}
    cases = [
        (gpu.put_rows, size), (gpu.take_rows, {"MODE": 1, **size}), (gpu.add_rows, size),
        (gpu.sum_rows, {"MESSAGE": True, "LAST": True, "SEND": True, **size}), (gpu.scale_rows, size),
    ]  # fmt: skip
    for kernel, constants in cases:
        assert "fma." not in assembly(kernel, types, **constants)


@runs
@quiet
@pytest.mark.parametrize("spec", ["ef(minmax(bits=2, bucket=128))", "lattice(bits=4)"])
def test_both_halves_of_shards_end_with_the_bytes_of_the_cpu(spec: str, there: None) -> None:
    check_shards_alike(spec, 2, DEVICE, begin)
