"""Every touch of a private or version-dependent PyTorch name, with a check that it is what we think it is."""

from __future__ import annotations

import ctypes
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

_RANGE_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)


def parallel_for_address() -> int | None:
    """The address of ``torch_parallel_for``, through which other code runs on PyTorch's own CPU threads.

    It is part of PyTorch's stable C interface since 2.10 (torch/csrc/stable/c/shim.h). None where this PyTorch lacks
    it, or where a call to it does not do what it should; work is then done by the calling thread alone.
    """
    found = sorted((Path(torch.__path__[0]) / "lib").glob("libtorch_cpu.*"))
    if not found:
        return None
    function = getattr(ctypes.CDLL(str(found[0])), "torch_parallel_for", None)
    if function is None:
        return None
    function.restype = ctypes.c_int32
    function.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, _RANGE_FUNCTION, ctypes.c_void_p]
    seen: list[tuple[int, int, int | None]] = []
    status = function(3, 5, 8, _RANGE_FUNCTION(lambda *call: seen.append(call)), 7)
    if status != 0 or seen != [(3, 5, 7)]:
        return None
    return ctypes.cast(function, ctypes.c_void_p).value


def group_timeout(group: Any) -> timedelta:
    """How long the operations of a process group (a ``torch.distributed.ProcessGroup``) may take.

    Raises ``RuntimeError`` where this PyTorch does not tell.
    """
    for device in getattr(group, "_device_types", ()):
        timeout = getattr(group._get_backend(device).options, "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    raise RuntimeError("this PyTorch does not tell the timeout of a process group: pass timeout= yourself")


def all_gather_single(out: torch.Tensor, x: torch.Tensor, group: Any) -> Any:
    """``torch.distributed.all_gather_single``, which was ``all_gather_into_tensor`` before PyTorch 2.13."""
    import torch.distributed as dist

    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(out, x, group=group)
