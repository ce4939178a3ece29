"""The bucketed Triton kernels: bit for bit against the reference in Triton's interpreter, compiled for absent GPUs."""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_cases import message, one, same, special, table, values
from thinwire.kernels import Format, Residual, Table, reference

pytest.importorskip("triton", reason="triton is not installed: pip install --no-deps triton")

from triton_cases import DEVICE, agree, assembly, compiled, quiet, resources, runs

NEAREST, SHIFT = {"rounding": "nearest"}, {"rounding": "shift"}
FORMATS = [
    *(Format(bits, bucket) for bits, bucket in [(3, 128), (4, 128), (2, 1), (5, 100), (8, 4096), (7, 2**40)]),
    Format(6, 384, **NEAREST),
    *(Format(bits, bucket, **SHIFT) for bits, bucket in [(4, 128), (3, 2**40)]),
    Format(4, 128, "maxabs"),
    Format(8, 256, "maxabs", **NEAREST),
    Format(2, 100, "maxabs"),
    Format(2, 2**40, "maxabs", clip=2.5),
    Format(3, 512, "maxabs", clip=1.0),
    Format(1, 128, "maxabs", midrise=True),
    Format(6, 2**40, "maxabs", midrise=True, **NEAREST),
    *(Format(4, 128, "norm"), Format(5, 300, "norm", levels=3), Format(8, 2**40, "norm")),
    *(Format(1, bucket, "sides") for bucket in (128, 100, 2**40)),
    *(Format(1, bucket, "sign") for bucket in (128, 4096)),
]


def names(form: Format) -> str:
    return f"{form.scheme}-{form.bits}-{form.bucket}-{form.rounding}-{form.midrise:d}-{form.clip}"


def residual(x: Tensor, seed: int, loss_scale: float, device: torch.device) -> Residual:
    now = values(x.numel(), seed).to(device)
    return Residual(now, torch.full_like(now, 5.0), loss_scale)


def check_all(spans: Table, x: Tensor, form: Format, *, key: int) -> None:
    """Every operation gives the bits of the reference."""
    from thinwire.kernels import gpu

    hostile = torch.randint(0, 256, message(spans, form).shape, dtype=torch.uint8)
    results = []
    for run, device in ((reference, torch.device("cpu")), (gpu, DEVICE)):
        own, random = x.to(device), hostile.to(device)
        dtype = torch.float32 if run is reference else x.dtype
        sent, fed, out = (message(spans, form).to(device) for _ in range(3))
        run.bucketed_encode(own, spans, sent, form, key=key)
        errors = residual(x, 1, 0.3, device), residual(x, 2, 3.0, device)
        run.bucketed_encode(own, spans, fed, form, key=key + 2, residual=errors[0])
        stored, summed = (torch.full(x.shape, 7.0, dtype=dtype, device=device) for _ in range(2))
        added, kept = (own.to(dtype, copy=True) for _ in range(2))
        run.bucketed_decode(sent, spans, stored, form)
        run.bucketed_decode(random, spans, added, form, add=True, scale=0.3)
        run.bucketed_sum([random, sent], None, spans, summed, form, scale=0.7)
        run.bucketed_reduce([sent, sent], kept, spans, out, kept, form, scale=1 / 3, key=key + 1, residual=errors[1])
        results.append([v.cpu() for v in (sent, fed, out, errors[0].next, errors[1].next, stored, added, summed, kept)])
    what = ("encode", "encode with residual", "reduce: message", "residual", "reduce: residual")
    what += ("decode", "decode add", "sum", "reduce: values")
    for i, (name, wanted, got) in enumerate(zip(what, *results, strict=True)):
        assert agree(wanted, got) if i >= 5 else same(wanted, got), f"{name} differs"


@runs
@quiet
@pytest.mark.parametrize("form", FORMATS, ids=names)
def test_same_bits_as_the_reference(form: Format) -> None:
    spans = table((129, 0, 1300), form)
    make = special if form.bucket <= 1024 else values
    check_all(spans, make(spans.num_elements + 3, form.bits), form, key=form.bits << 60 | 5)


@runs
@quiet
@pytest.mark.parametrize("form", [Format(4, 128), Format(5, 256, **SHIFT), Format(1, 128, "sides"),
                                  Format(2, 128, "maxabs"), Format(8, 512, "norm")], ids=names)  # fmt: skip
def test_whole_tiles_at_wide_addresses(form: Format) -> None:
    check_all(one(9000, index0=512), values(9000, 0), form, key=5)


@runs
@quiet
def test_means_of_values_whose_sum_overflows() -> None:
    check_all(one(1000), 1.2e38 * (1.0 + 0.2 * torch.rand(1000)), Format(8, 128, "maxabs"), key=5)


@runs
@quiet
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "form", [Format(4, 128, **NEAREST), Format(2, 128, "maxabs", clip=2.5), Format(1, 100, "sides")], ids=names
)
def test_half_precision(form: Format, dtype: torch.dtype) -> None:
    spans = table((129, 0, 900), form)  # `special` holds subnormals, which the interpreter loses in 16 bits
    x = values(spans.num_elements + 3, form.bits, dtype)
    x[7] = torch.nan
    check_all(spans, x, form, key=3)


@runs
def test_a_residual_may_be_written_over() -> None:
    from thinwire.kernels import gpu

    for form in (Format(4, 128), Format(1, 128, "sides"), Format(4, 100, "maxabs")):
        x, now, sent = values(3000, 0), values(3000, 1), message(one(3000), form)
        spans = one(3000)
        apart = Residual(now, torch.empty_like(now))
        reference.bucketed_encode(x, spans, sent, form, key=1, residual=apart)
        over, there = now.to(DEVICE, copy=True), sent.to(DEVICE)
        gpu.bucketed_encode(x.to(DEVICE), spans, there, form, key=1, residual=Residual(over, over))
        assert same(apart.next, over.cpu())
        assert same(sent, there.cpu())


@runs
def test_nothing_to_do_and_nothing_to_sum() -> None:
    from thinwire.kernels import gpu

    y = torch.ones(4, device=DEVICE)
    sent = torch.zeros(64, dtype=torch.uint8, device=DEVICE)
    for spans in (Table(torch.empty(0, 5, dtype=torch.int64)), one(0)):
        gpu.bucketed_encode(y, spans, sent, Format(4, 100), key=1)
        gpu.bucketed_decode(sent, spans, y, Format(4, 100))
    gpu.bucketed_sum([], y, one(4), y, Format(4, 128), scale=0.5)
    assert y.tolist() == [0.5] * 4


@runs
def test_a_message_at_an_odd_address_is_refused() -> None:
    from thinwire.kernels import gpu

    sent = torch.zeros(1025, dtype=torch.uint8, device=DEVICE)[1:]
    with pytest.raises(ValueError, match="multiple of 4"):
        gpu.bucketed_encode(torch.ones(9, device=DEVICE), one(9), sent, Format(4, 128), key=1)


TYPES = {
    **dict.fromkeys(("x", "now", "next", "base", "y", "inverses"), "*fp32"),
    **dict.fromkeys(("message", "received"), "*u8"),
    **dict.fromkeys(("pieces", "rows", "firsts"), "*i64"),
    **dict.fromkeys(("low_keys", "high_keys"), "*i32"),
    **dict.fromkeys(("key_low", "key_high", "bucket", "slices", "stride", "count"), "i32"),
    **dict.fromkeys(("scale", "weight", "after", "loss_scale", "clip"), "fp32"),
}


def ptx(name: str, form: Format, capability: int = 90, **constants: int | bool) -> str:
    return assembly(*built(name, form, capability), **known(name, form, constants))


def built(name: str, form: Format, capability: int, **types: str) -> tuple[Any, dict[str, str], int, int]:
    from thinwire.kernels import gpu

    return getattr(gpu, name), TYPES | types, capability, int(gpu.options(form.bits)["num_warps"])


def known(name: str, form: Format, constants: dict[str, int | bool]) -> dict[str, Any]:
    from thinwire.kernels import gpu

    values = {"BITS": form.bits, "GROUPS": 16, "BUCKET": form.bucket, "MODE": 1, "STEPS": form.steps}
    values |= (
        {"SUMS": gpu.needs_sums(form), "RESIDUAL": False, "REDUCE": False} | gpu.coding_constants(form) | constants
    )
    return {k: v for k, v in values.items() if k in getattr(gpu, name).arg_names}


@compiled
@pytest.mark.parametrize(("bits", "capability"), [(1, 90), (3, 90), (4, 100), (8, 100)])
def test_compiles_with_wide_loads(bits: int, capability: int) -> None:
    form = Format(bits, 128)
    for name in ("encode_tiles", "decode_tiles"):
        assert "ld.global.v4" in ptx(name, form, capability)
    assert "div.rn" in ptx("encode_tiles", form, capability)


ALONE, SENT = {"RESIDUAL": False}, {"RESIDUAL": True}
MADE = [
    *(("encode_tiles", Format(bits, 128), ALONE) for bits in (1, 2, 3, 4, 7, 8)),
    *(("encode_tiles", Format(bits, bucket), SENT) for bits, bucket in ((4, 128), (8, 1024), (8, 4096))),
    ("encode_tiles", Format(4, 128, **SHIFT), SENT),
    *(("encode_tiles", Format(bits, 128, "maxabs"), SENT) for bits in (2, 3, 4)),
    *(("encode_tiles", form, SENT) for form in (Format(2, 256, "maxabs", clip=2.5), Format(4, 128, "norm"),
                                                Format(1, 128, "sides"), Format(1, 1024, "sign"))),
    *(("encode_tiles", Format(bits, 128), SENT | {"REDUCE": True}) for bits in (2, 4, 8)),
    *(("decode_tiles", Format(bits, 128), {"MODE": 1}) for bits in (1, 2, 3, 4, 7, 8)),
    *(("decode_tiles", Format(4, 128), {"MODE": mode}) for mode in (0, 2)),
    ("decode_tiles", Format(4, 100), {"MODE": 1, "BUCKET": 0}),
    ("bucket_extrema", Format(4, 100), {"ROWS": 16, "COLS": 128}),
    ("bucket_scales", Format(4, 100), {"COUNT": 128}),
    ("bucket_scales", Format(4, 100, "norm"), {"COUNT": 8}),
    ("encode_codes", Format(4, 100), SENT),
]  # fmt: skip
"""The kernels of buckets as they are launched: of each width of code, scheme and way to add."""


@compiled
@pytest.mark.timeout(900)
@pytest.mark.parametrize("capability", [80, 90])
def test_compiles_without_fused_multiply_add_and_registers_suffice(
    request: pytest.FixtureRequest, capability: int
) -> None:
    """Only `norm` spills, and shared memory is what every GPU has. ``--regenerate`` writes the table."""
    from thinwire.kernels import gpu

    path, column = Path(__file__).parents[2] / "benchmarks/speed/gpu-kernels.json", f"sm_{capability}"
    rows = []
    for name, form, constants in MADE:
        bucket = form.bucket
        tile = gpu.encode_tile_size(form.bits, bucket) if name == "encode_tiles" else gpu.TILE
        options = known(name, form, {"GROUPS": tile // gpu.GROUP} | constants)
        text = assembly(*built(name, form, capability), **options)
        assert not [word for word in ("fma.", "approx", "div.full") if word in text], (name, form)
        used = resources(*built(name, form, capability), **options)
        assert used["spilled"] <= (512 if form.scheme == "norm" else 0), (name, form, used)
        assert used["shared"] <= 48 * 1024, (name, form, used)
        rows.append({"kernel": name, "form": names(form), **constants, column: used})
    if request.config.getoption("--regenerate"):
        # Each run fills in its own column.
        before = json.loads(path.read_text()) if path.exists() else []
        merged = [{**(before[i] if i < len(before) else {}), **row} for i, row in enumerate(rows)]
        path.write_text("[" + ",\n ".join(json.dumps(row) for row in merged) + "]\n")
