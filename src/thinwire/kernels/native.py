"""The native CPU core: loading it, choosing its instruction set, and calling it with addresses.

``THINWIRE_CPU_LEVEL`` chooses the instruction-set level (``x86-64-v2``, ``x86-64-v3``, ``x86-64-v4``, ``generic``)
instead of the best that this CPU has, or ``reference`` for the torch operations. All of them give the same bytes.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire import compat

if TYPE_CHECKING:
    from thinwire.kernels.format import Residual
    from thinwire.kernels.table import Table

REFERENCE = "reference"
VARIABLE = "THINWIRE_CPU_LEVEL"
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MASK64 = (1 << 64) - 1

MISSING = (
    "thinwire's native CPU core is not built, so its kernels run as torch operations, many times slower: "
    "compression may cost more than it saves, even on a slow link. Install a C++17 compiler (and Python's "
    f"headers) and reinstall thinwire, or set {VARIABLE}={REFERENCE} to accept this."
)
"""The warning of :func:`load`."""

STALE = (
    "thinwire's native CPU core was built from other sources than these, so its kernels run as torch operations, many "
    "times slower. Build it again: python -m pip install -e . in thinwire's checkout"
)
"""The warning of :func:`load` where sources have changed since the build."""


def load() -> ModuleType | None:
    """Load the native core. Return None, with a warning unless the user asked for the reference, if there is none."""
    wanted = os.environ.get(VARIABLE, "")
    if wanted == REFERENCE:
        return None
    try:
        core = import_module("thinwire.kernels._native")
    except ImportError as missing:
        warnings.warn(f"{MISSING} ({missing})", RuntimeWarning, stacklevel=2)
        return None
    if not _fits(core):
        warnings.warn(STALE, RuntimeWarning, stacklevel=2)
        return None
    if wanted:
        choose(core, wanted)
    core.set_parallel_for(compat.parallel_for_address() or 0)
    # OpenMP threads do not survive a fork, and a child would wait for them for ever.
    os.register_at_fork(after_in_child=lambda: core.set_parallel_for(0))
    return core


def _fits(core: ModuleType) -> bool:
    """Whether a core has the functions, with the arguments, that this package calls: those of ``_native.pyi``."""
    interface = hashlib.sha256(Path(__file__).with_name("_native.pyi").read_bytes()).hexdigest()
    return hasattr(core, "interface") and core.interface() == interface


def choose(core: ModuleType, level: str) -> None:
    """Run the core at ``level``. Raises ``ValueError`` if this CPU or this build lacks it."""
    if level not in core.levels():
        known = ", ".join((*core.levels(), REFERENCE))
        raise ValueError(f"{VARIABLE}={level!r}: this machine has {known}")
    core.set_level(level)


def cpu_level() -> str:
    """Return the instruction-set level of the CPU kernels; ``reference`` without the native core."""
    return REFERENCE if CORE is None else CORE.level()


def computes(tensor: Tensor) -> bool:
    """Whether the native core processes this tensor."""
    return CORE is not None and tensor.is_cpu and not asynchronous(tensor)


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements fill a piece of memory without gaps, in whatever order of its dimensions."""
    # A tensor that is made like another one has its strides only if that one is dense.
    return tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def torch_or_triton(reference: ModuleType, triton: str, tensor: Tensor) -> ModuleType:
    """Return the implementation for a tensor that the core does not process: ``reference``, or on a GPU the module of
    this package named ``triton``, which is imported then."""
    return import_module(f"thinwire.kernels.{triton}") if asynchronous(tensor) else reference


def address(name: str, tensor: Tensor, dtype: torch.dtype, numel: int, strides: tuple[int, ...] | None = None) -> int:
    """Return the address of a tensor of which the core reads or writes ``numel`` elements of ``dtype``, in a row.

    The core does not check: through a tensor of another size it would write over what lies behind. A tensor
    with ``strides`` need not be contiguous. Raises ``TypeError`` for another dtype or device and ``ValueError`` for
    fewer elements or another layout.
    """
    if tensor.dtype is not dtype or not tensor.is_cpu:
        raise TypeError(f"{name} must be {dtype} on the CPU for the native core, not {tensor.dtype} on {tensor.device}")
    if tensor.numel() < numel:
        raise ValueError(f"{name} has {tensor.numel()} elements, and the native core takes {numel}")
    if not tensor.is_contiguous() if strides is None else tensor.stride() != strides:
        wanted = "be contiguous" if strides is None else f"have strides {strides}"
        raise ValueError(f"{name} must {wanted} for the native core; its strides are {tensor.stride()}")
    return tensor.data_ptr()


def values(name: str, tensor: Tensor, numel: int) -> tuple[int, int]:
    """Return the arguments of ``numel`` values of any dtype that the core takes. Raises as :func:`address` does."""
    code = CODES.get(tensor.dtype)
    if code is None:
        raise TypeError(f"{name} is {tensor.dtype}; the native core takes float32, bfloat16 and float16")
    return address(name, tensor, tensor.dtype, numel), code


def source(name: str, x: Tensor, table: Table) -> tuple[int, int, int, int]:
    """Return the arguments of values that a table's segments are read from."""
    return *values(name, x, table.num_elements), table.pointer, len(table.segments)


def target(table: Table, y: Tensor) -> tuple[int, int, int, int]:
    """Return the arguments of values that a table's segments are written to."""
    return table.pointer, len(table.segments), *values("y", y, table.num_elements)


def asynchronous(tensor: Tensor) -> bool:
    """Whether kernels on this tensor run asynchronously (Triton, on a GPU), so that reading a value waits."""
    return tensor.is_cuda


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a small tensor from the host to ``device`` without waiting for work that runs there."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def core() -> ModuleType:
    """Return the native core. Raises ``RuntimeError`` if there is none."""
    if CORE is None:
        raise RuntimeError(MISSING)
    return CORE


def addresses(residual: Residual | None, table: Table) -> tuple[int, int, float]:
    """Return the arguments of a residual: two addresses, 0 without one, and its factor."""
    if residual is None:
        return 0, 0, 1.0
    both = (("residual.now", residual.now), ("residual.next", residual.next))
    now, after = (address(name, tensor, torch.float32, table.num_elements) for name, tensor in both)
    return now, after, residual.loss_scale


def messages(tensors: Iterable[Tensor], num_bytes: int) -> list[int]:
    """Return the addresses of messages of ``num_bytes`` bytes each."""
    return [address("each message", message, torch.uint8, num_bytes) for message in tensors]


CORE = load()
