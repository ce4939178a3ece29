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


def register_gloo(group: Any, backend: Any) -> None:
    """Make gloo the backend of a ``torch.distributed.ProcessGroup`` that Python made.

    Raises ``RuntimeError`` where this PyTorch has no way to.
    """
    kinds = torch.distributed.ProcessGroup.BackendType
    try:
        group._register_backend(torch.device("cpu"), kinds.GLOO, backend)
        group._set_default_backend(kinds.GLOO)
    except AttributeError as error:
        raise RuntimeError(f"this PyTorch does not let a process group be made of gloo: {error}") from None


def gloo_backend(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A ``torch.distributed.ProcessGroupGloo``, connected through ``store``."""
    backend = torch.distributed.ProcessGroupGloo(store, rank, size, timeout)
    backend._set_sequence_number_for_group()
    return backend


def gloo_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A gloo process group of its own, which ``torch.distributed`` does not list; it ends when nobody holds it."""
    group = torch.distributed.ProcessGroup(store, rank, size)
    register_gloo(group, gloo_backend(store, rank, size, timeout))
    return group


def prefixed(prefix: str, store: Any) -> Any:
    """The store with all its keys under a prefix."""
    return torch.distributed.PrefixStore(f"{prefix}/", store)  # pyright: ignore[reportPrivateImportUsage]


def collective_options(name: str) -> Any:
    """New options of a collective of process groups: ``Allreduce``, ``ReduceScatter``, ``Allgather`` ..."""
    from torch._C import _distributed_c10d

    return getattr(_distributed_c10d, f"{name}Options")()


def premul_factor(op: Any) -> float | None:
    """The factor of a ``ReduceOp.PREMUL_SUM``; None if it is a tensor of several values, or not told."""
    factor = getattr(op, "factor", None)
    if isinstance(factor, torch.Tensor):
        return float(factor) if factor.numel() == 1 else None
    return float(factor) if isinstance(factor, int | float) else None


def ddp_ready_order(model: Any) -> tuple[int, ...] | None:
    """The order in which a ``DistributedDataParallel`` model's buckets hold its trained parameters, by their index.

    DDP logs it in the first passes after it has rebuilt its buckets, the same on every rank. None before that, and
    where this PyTorch does not tell. Not to be called while backward runs, which holds a lock that this takes.
    """
    try:
        told = model._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices")
        order = tuple(int(index) for index in told.replace(",", " ").split()) if told else ()
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None
    return order if order and sorted(order) == list(range(len(order))) else None


def stage_tensors(stage: Any) -> dict[str, list[tuple[tuple[int, ...], torch.dtype]]]:
    """What crosses the boundaries of a ``PipelineStage`` that its schedule has set up: shapes and dtypes of one
    micro-batch's ``inputs``, ``outputs``, ``input_grads`` and ``output_grads``, without those that do not travel.

    Raises ``RuntimeError`` where this PyTorch does not tell, and ``NotImplementedError`` for a ``DTensor``.
    """
    names = ("inputs", "outputs", "input_grads", "output_grads")
    found: dict[str, list[tuple[tuple[int, ...], torch.dtype]]] = {}
    try:
        metas = {name: getattr(stage._stage_meta, name) for name in names}
        for name, of in metas.items():
            if any(hasattr(meta, "placements") for meta in of or ()):
                raise NotImplementedError(
                    "a DTensor crosses a stage boundary: let the stage end with a plain tensor (to_local())"
                )
            found[name] = [(tuple(meta.shape), meta.dtype) for meta in of or () if meta is not None]
    except (AttributeError, TypeError) as error:
        raise RuntimeError(
            f"this PyTorch ({torch.__version__}) does not tell what crosses a stage boundary ({error}): pipelines need "
            "PyTorch 2.13"
        ) from None
    return found
