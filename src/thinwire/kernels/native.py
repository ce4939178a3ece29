"""The native CPU core: loading it, choosing its instruction set, and its arguments.

``THINWIRE_CPU_LEVEL`` chooses the instruction-set level (``x86-64-v2``, ``x86-64-v3``, ``x86-64-v4``, ``generic``)
instead of the best that this CPU has, or ``reference`` for the torch operations. All of them give the same bytes.

The core takes numbers, addresses of tensors among them, and checks none. So what checks a tensor returns its address,
and there is no other way to one.
"""

from __future__ import annotations

import hashlib
import os
import warnings
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


def flat(name: str, tensor: Tensor, like: Tensor) -> int:
    """Return the address of a tensor, 0 of one that is not on the CPU.

    Raises ``ValueError`` unless it is flat, contiguous, and on the device of ``like``.
    """
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(f"{name} must be 1-D and contiguous; its shape is {tuple(tensor.shape)}: flatten it first")
    if tensor is not like and tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}, but the values are on {like.device}: move one of them")
    return tensor.data_ptr() if tensor.is_cpu else 0


def segments(name: str, tensor: Tensor, table: Table, like: Tensor) -> tuple[int, int]:
    """Return the address and the dtype's code of flat values that contain a table's segments.

    Raises ``TypeError`` unless they are a tensor of such a dtype, and ``ValueError`` for a size, a device or a layout.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
    code = CODES.get(tensor.dtype)
    if code is None:
        raise TypeError(f"{name} is {tensor.dtype}; the kernels take float32, bfloat16 and float16: convert it first")
    address = flat(name, tensor, like)
    if tensor.numel() < table.num_elements:
        raise ValueError(
            f"{name} has {tensor.numel()} elements, but the table's segments reach to element {table.num_elements}"
        )
    return address, code


def message(name: str, tensor: Tensor, num_bytes: int, like: Tensor) -> int:
    """Return the address of a message of at least ``num_bytes``. Raises as :func:`segments` does."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
    if tensor.dtype is not torch.uint8:
        raise TypeError(f"{name} must be uint8, not {tensor.dtype}")
    address = flat(name, tensor, like)
    if tensor.numel() < num_bytes:
        raise ValueError(f"{name} has {tensor.numel()} bytes, but the table's payloads take {num_bytes}")
    return address


def numbers(name: str, tensor: Tensor, shape: tuple[int, ...], like: Tensor) -> int:
    """Return the address of an fp32 tensor of ``shape``. Raises as :func:`segments` does."""
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.float32:
        raise TypeError(f"{name} must be a float32 tensor")
    if tuple(tensor.shape) != shape or not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous and of shape {shape}, not {tuple(tensor.shape)}")
    if tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}, but the values are on {like.device}: move one of them")
    return tensor.data_ptr() if tensor.is_cpu else 0


def residual(given: Residual | None, table: Table, like: Tensor) -> tuple[int, int, float]:
    """Return two addresses, 0 without a residual, and its factor. Raises as :func:`segments` does."""
    if given is None:
        return 0, 0, 1.0
    for name, tensor in (("residual.now", given.now), ("residual.next", given.next)):
        segments(name, tensor, table, like)
        if tensor.dtype is not torch.float32:
            raise TypeError(f"{name} must be float32, not {tensor.dtype}")
    if not 2.0**-126 <= given.loss_scale <= 2.0**126:
        raise ValueError(f"loss_scale must be 2^-126 to 2^126, not {given.loss_scale}")
    return flat("residual.now", given.now, like), flat("residual.next", given.next, like), given.loss_scale


LINE_BYTES = 64
"""Size of a cache line. Words that different processes write lie this far apart."""

_MASK32 = 0xFFFFFFFF
_MAX_WAIT_NS = 1 << 62


class SharedCounter:
    """A counter of 32 bits at ``offset`` in ``memory``, which it keeps alive. Values are taken modulo 2^32.

    One process increases it, and others sleep until then.

    ``memory``: (bytes,) uint8 on the CPU; shared by the processes that use the word, or by threads of one. Raises
    ``RuntimeError`` without the native core, ``ValueError`` for an invalid place.
    """

    __slots__ = ("_address", "_core", "_memory")

    def __init__(self, memory: Tensor, offset: int) -> None:
        self._core = core()
        if not memory.is_cpu or memory.dtype != torch.uint8 or memory.dim() != 1 or not memory.is_contiguous():
            raise ValueError("a word lies in a contiguous 1-D uint8 tensor of the CPU")
        self._memory = memory
        self._address = memory.data_ptr() + offset
        if not 0 <= offset <= memory.numel() - 4 or self._address % 4:
            raise ValueError(f"offset {offset} of {memory.numel()} bytes is no place for a word of 4 bytes")

    @property
    def value(self) -> int:
        return self._core.shared_read(self._address)

    def post(self, value: int) -> None:
        """Set the counter and wake waiting threads. Readers of the value see what this thread wrote before."""
        self._core.shared_post(self._address, value & _MASK32)

    def wait(self, value: int, *, timeout_s: float, spin_s: float = 0.0) -> bool:
        """Return whether the counter reaches ``value`` (is less than 2^31 past it) within ``timeout_s``.

        Polls for ``spin_s``, then sleeps in the kernel. Other Python threads run meanwhile.
        """
        timeout_ns, spin_ns = (min(max(0, int(s * 1e9)), _MAX_WAIT_NS) for s in (timeout_s, spin_s))
        return self._core.shared_wait(self._address, value & _MASK32, timeout_ns, spin_ns)


CORE = load()
