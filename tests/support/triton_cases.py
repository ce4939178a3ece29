"""What the tests of the Triton kernels share: where they run, and compiling without a GPU."""

# pyright: reportMissingImports=false
from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_cases import same

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")

if INTERPRETED:
    from triton.runtime import interpreter

    # Up to Triton 3.6 it makes the bound of a loop of an array with one element, which NumPy refuses from 2.5 on.
    interpreter.range = lambda *ends: range(*(e.handle.data.item() if hasattr(e, "handle") else e for e in ends))

interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's process")
compiled = pytest.mark.skipif(INTERPRETED, reason="runs outside the interpreter's process")
runs = pytest.mark.skipif(not INTERPRETED and DEVICE.type == "cpu", reason="needs a GPU, or the interpreter")
quiet = pytest.mark.filterwarnings("ignore::RuntimeWarning")
"""NumPy warns of the NaNs that the interpreter computes with."""


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 as a kernel stores it. Triton's interpreter cuts bf16 off where GPUs round to nearest even."""
    if dtype == torch.bfloat16 and INTERPRETED:
        return (x.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    return x.to(dtype)


def agree(wanted: Tensor, got: Tensor) -> bool:
    """Whether a kernel stored these fp32 values bit for bit in the type of ``got``, where a NaN equals any NaN.

    Triton's interpreter stores wrong subnormals in 16 bits: of those it must only make subnormals."""
    stored = rounded(wanted, got.dtype)
    if INTERPRETED and got.element_size() == 2:
        lost = [v.abs() < torch.finfo(v.dtype).smallest_normal for v in (stored, got)]
        if not torch.equal(*lost):
            return False
        stored, got = (v.masked_fill(lost[0], 0.0) for v in (stored, got))
    return same(stored, got)


def assembly(kernel: Any, types: dict[str, str], capability: int = 90, num_warps: int = 4, **constants: Any) -> str:
    """The kernel as PTX for an NVIDIA GPU, compiled to machine code on the way; needs no GPU."""
    return _compiled(kernel, types, capability, num_warps, constants).asm["ptx"]


def resources(kernel: Any, types: dict[str, str], capability: int, num_warps: int, **constants: Any) -> dict[str, int]:
    """Registers a thread, bytes that it spills, and bytes of shared memory a program, as NVIDIA's assembler says."""
    from triton.backends.nvidia.compiler import get_ptxas

    made = _compiled(kernel, types, capability, num_warps, constants)
    target = re.search(r"^\.target (\w+)", made.asm["ptx"], re.MULTILINE)
    assert target is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(made.asm["ptx"])
        assembler = get_ptxas(capability).path
        options = ["-v", "--fmad=false", f"--gpu-name={target[1]}", path, "-o", path.with_suffix(".cubin")]
        told = subprocess.run([assembler, *options], check=True, capture_output=True, text=True).stderr
    used = {"registers": r"Used (\d+) registers", "spilled": r"(\d+) bytes spill stores"}
    found = {name: re.search(pattern, told) for name, pattern in used.items()}
    return {name: int(match[1]) for name, match in found.items() if match} | {"shared": made.metadata.shared}


def _compiled(kernel: Any, types: dict[str, str], capability: int, num_warps: int, constants: dict[str, Any]) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={arg: "constexpr" if arg in constants else types[arg] for arg in names},
        constexprs={(names.index(arg),): value for arg, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, arg in enumerate(names) if types.get(arg, "").startswith("*")},
    )
    launch = {"enable_fp_fusion": False, "num_warps": num_warps}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch)
