"""The Triton kernels: bit for bit against the reference in Triton's interpreter, compiled for GPUs that are not here.

The interpreter must be chosen before Triton is imported, so this file runs itself again in another process.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernel_cases import message, one, same, special, table, values
from thinwire.kernels import Format, Residual, Table, reference

pytest.importorskip("triton", reason="triton is not installed: pip install --no-deps triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")

interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's process")
compiled = pytest.mark.skipif(INTERPRETED, reason="runs outside the interpreter's process")
runs = pytest.mark.skipif(not INTERPRETED and DEVICE.type == "cpu", reason="needs a GPU, or the interpreter")


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 as a kernel stores it. Triton's interpreter cuts bf16 off where GPUs round to nearest even."""
    if dtype == torch.bfloat16 and INTERPRETED:
        return (x.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    return x.to(dtype)


def check_all(spans: Table, x: Tensor, form: Format, *, key: int) -> None:
    """Every operation gives the bits of the reference."""
    from thinwire.kernels import gpu

    hostile = torch.randint(0, 256, message(spans, form).shape, dtype=torch.uint8)
    results = []
    for run, device in ((reference, torch.device("cpu")), (gpu, DEVICE)):
        own, random = x.to(device), hostile.to(device)
        dtype = torch.float32 if run is reference else x.dtype
        sent, out = (message(spans, form).to(device) for _ in range(2))
        run.bucketed_encode(own, spans, sent, form, key=key)
        stored, summed = (torch.full(x.shape, 7.0, dtype=dtype, device=device) for _ in range(2))
        added, kept = (own.to(dtype, copy=True) for _ in range(2))
        run.bucketed_decode(sent, spans, stored, form)
        run.bucketed_decode(random, spans, added, form, add=True, scale=0.3)
        run.bucketed_sum([random, sent], None, spans, summed, form, scale=0.7)
        run.bucketed_reduce([sent, sent], kept, spans, out, kept, form, scale=1 / 3, key=key + 1)
        results.append([v.cpu() for v in (sent, out, stored, added, summed, kept)])
    names = ("encode", "reduce: message", "decode", "decode add", "sum", "reduce: values")
    for name, wanted, got in zip(names, *results, strict=True):
        wanted = rounded(wanted, x.dtype) if wanted.is_floating_point() else wanted
        assert same(wanted, got), f"{name} differs"


@runs
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, about the NaNs of the interpreter
@pytest.mark.parametrize(
    ("bits", "bucket", "dtype"),
    [
        *((bits, 128, torch.float32) for bits in (1, 3, 4, 7, 8)),
        *((bits, bucket, torch.float32) for bits, bucket in [(2, 1), (3, 3), (2, 64), (5, 100), (4, 256), (6, 384)]),
        *((bits, bucket, torch.float32) for bits, bucket in [(8, 4096), (7, 2**40)]),
        *((bits, bucket, torch.bfloat16) for bits, bucket in [(4, 128), (7, 100)]),
        *((bits, bucket, torch.float16) for bits, bucket in [(4, 128), (7, 100)]),
    ],
)
def test_same_bits_as_the_reference(bits: int, bucket: int, dtype: torch.dtype) -> None:
    nearest = bits == 6 or dtype == torch.bfloat16
    form = Format(bits, bucket, rounding="nearest" if nearest else "stochastic")
    spans = table((129, 0, 4100 if bits in (2, 4) or bucket > 384 else 2100), form)
    make = special if dtype == torch.float32 else values  # the interpreter loses subnormal 16-bit values
    x = make(spans.num_elements + 3, bits, dtype)
    x[7] = torch.nan
    check_all(spans, x, form, key=bits << 60 | 5)


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


@compiled
def test_what_the_kernels_lack_is_refused() -> None:
    from thinwire.kernels import gpu

    x, sent = torch.ones(9), torch.zeros(192, dtype=torch.uint8)
    with pytest.raises(NotImplementedError, match="minmax"):
        gpu.bucketed_encode(x, one(9), sent, Format(4, 128, "maxabs"), key=1)
    with pytest.raises(NotImplementedError, match="fused"):
        gpu.bucketed_encode(x, one(9), sent, Format(4, 128), key=1, residual=Residual(x, x))


@compiled
def test_in_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "19 passed" in done.stdout


TYPES = {
    **dict.fromkeys(("x", "base", "y", "inverses"), "*fp32"),
    **dict.fromkeys(("pieces", "rows", "firsts"), "*i64"),
    **dict.fromkeys(("low_keys", "high_keys"), "*i32"),
    **dict.fromkeys(("key_low", "key_high", "bucket", "slices"), "i32"),
    "message": "*u8",
    "scale": "fp32",
}


def ptx(name: str, bits: int, capability: int = 90, **constants: int | bool) -> str:
    """The kernel as PTX for an NVIDIA GPU, compiled to machine code on the way; needs no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from thinwire.kernels import gpu

    kernel = getattr(gpu, name)
    constants = {"BITS": bits, "GROUPS": 16, "BUCKET": 128, "NEAREST": False, "MODE": 1, **constants}
    constants = {k: v for k, v in constants.items() if k in kernel.arg_names}
    source = ASTSource(
        fn=kernel,
        signature={arg: "constexpr" if arg in constants else TYPES[arg] for arg in kernel.arg_names},
        constexprs={(kernel.arg_names.index(arg),): value for arg, value in constants.items()},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, arg in enumerate(kernel.arg_names)
            if TYPES.get(arg, "").startswith("*")
        },
    )
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=gpu._options(bits)).asm["ptx"]


@compiled
@pytest.mark.parametrize("bits", range(1, 9))
def test_compiles_without_fused_multiply_add_and_with_wide_loads(bits: int) -> None:
    for name in ("encode_tiles", "decode_tiles"):
        text = ptx(name, bits)
        assert "fma." not in text
        assert "ld.global.v4" in text
    assert "div.rn" in ptx("encode_tiles", bits)


@compiled
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_other_buckets_compile_for_every_generation(capability: int) -> None:
    for name, constants in {
        "bucket_extrema": {"ROWS": 16, "COLS": 128},
        "bucket_scales": {"COUNT": 128},
        "encode_codes": {},
        "decode_tiles": {"BUCKET": 0, "MODE": 2},
    }.items():
        assert "fma." not in ptx(name, 4, capability, **constants)
