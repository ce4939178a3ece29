"""Every use of a private or version-dependent PyTorch name, with a check that it is what we think it is."""

from __future__ import annotations

import copy
import ctypes
import os
import re
import sys
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

OPTIMIZERS_IMPORT = "torch._dynamo"
"""Module that the first optimizer of a process imports, which takes about two seconds of processor time. A fork server
that is to import it beforehand does without where it is missing."""

_P = ParamSpec("_P")
_T = TypeVar("_T")
_RANGE_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)


def parallel_for_address() -> int | None:
    """Return the address of ``torch_parallel_for``, through which other code runs on PyTorch's own CPU threads.

    It is part of PyTorch's stable C interface since 2.10 (torch/csrc/stable/c/shim.h). None where this PyTorch lacks
    it, or where a call to it does not do what it should; work is then done by the calling thread alone.
    """
    libraries = sorted((Path(torch.__path__[0]) / "lib").glob("libtorch_cpu.*"))
    if not libraries:
        return None
    function = getattr(ctypes.CDLL(str(libraries[0])), "torch_parallel_for", None)
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
    """Return the time that operations of a process group (a ``torch.distributed.ProcessGroup``) may take.

    Raises ``RuntimeError`` where this PyTorch does not tell.
    """
    for device in getattr(group, "_device_types", ()):
        timeout = getattr(group._get_backend(device).options, "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    raise RuntimeError("this PyTorch does not tell the timeout of a process group: pass timeout= yourself")


def all_gather_single(out: torch.Tensor, x: torch.Tensor, group: Any) -> Any:
    """Call ``torch.distributed.all_gather_single``, which was ``all_gather_into_tensor`` before PyTorch 2.13."""
    import torch.distributed as dist

    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(out, x, group=group)


def makes_on_the_host() -> bool:
    """Whether a tensor that is made without a device is on the CPU: see ``torch.set_default_device``."""
    try:
        return torch.get_default_device().type == "cpu"
    except AttributeError:  # PyTorch 2.9 raises it where the default was set back to None
        return True


def register_backends(group: Any, gloo: Any, nccl: Any = None) -> None:
    """Make gloo the backend of a ``torch.distributed.ProcessGroup`` that Python made, and NCCL, if given, its backend
    for CUDA tensors.

    Raises ``RuntimeError`` where this PyTorch has no way to.
    """
    kinds = torch.distributed.ProcessGroup.BackendType
    try:
        group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
        group._set_default_backend(kinds.GLOO)
        if nccl is not None:
            group._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
    except AttributeError as error:
        raise RuntimeError(f"this PyTorch does not let a process group be made of gloo: {error}") from None


def gloo_backend(
    store: Any, rank: int, size: int, timeout: timedelta, *, threads_of: Any = None, num_threads: int = 2
) -> Any:
    """Return a ``torch.distributed.ProcessGroupGloo``, connected through ``store``.

    Args:
        store, rank, size, timeout: as PyTorch takes them.
        threads_of: another gloo backend, or a process group that may have one: its thread for connections is used.
        num_threads: number of collectives that may run at a time, each in a thread. Messages need none.
    """
    gloo: Any = torch.distributed.ProcessGroupGloo
    devices = _gloo_devices(threads_of)
    if not devices:
        return gloo(store, rank, size, timeout)
    options = gloo._Options()
    options._timeout, options._devices, options._threads = timeout, devices, num_threads
    return gloo(store, rank, size, options)


def nccl_backend(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a ``torch.distributed.ProcessGroupNCCL``, which connects when it is first used; None where there is no GPU
    or no NCCL. The arguments are as PyTorch takes them."""
    if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        return None
    nccl: Any = torch.distributed.ProcessGroupNCCL  # pyright: ignore[reportPrivateImportUsage]
    options = nccl.Options()
    options._timeout = timeout
    return nccl(store, rank, size, options)


_OWN_DEVICE = ("TORCH_GLOO_LAZY_INIT", "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER")
"""Environment variables with which two gloo groups cannot share a device: the first that ends would end it, or their
connections would be taken for each other's."""


def _gloo_devices(threads_of: Any) -> list[Any]:
    """Return the devices of gloo, each a thread with connections, that a backend or a process group has."""
    if any(os.environ.get(name) for name in _OWN_DEVICE):
        return []
    try:
        backend = threads_of._get_backend(torch.device("cpu")) if hasattr(threads_of, "_get_backend") else threads_of
        return list(backend.options._devices)
    except (AttributeError, RuntimeError):  # it has no gloo, or this PyTorch does not tell
        return []


def missing_member(error: RuntimeError) -> int | None:
    """Return the rank whose address a gloo group still lacked when its making timed out, from the store's key.

    None where the error is another one, or where this PyTorch words it differently.
    """
    match = re.search(r"wait timeout after .* keys: .*//cpu//\d+/(\d+)(?!\S)", str(error))
    return int(match[1]) if match else None


def gloo_group(
    store: Any, rank: int, size: int, timeout: timedelta, *, threads_of: Any = None, num_threads: int = 2
) -> Any:
    """Return a gloo process group that ``torch.distributed`` does not list; it ends when nobody references it.

    The arguments are those of `gloo_backend`.
    """
    group = torch.distributed.ProcessGroup(store, rank, size)
    # The key has the name of the device, as in groups that PyTorch lists: see `missing_member`.
    backend = gloo_backend(prefixed("cpu", store), rank, size, timeout, threads_of=threads_of, num_threads=num_threads)
    register_backends(group, backend)
    return group


def prefixed(prefix: str, store: Any) -> Any:
    """Return the store with all its keys under a prefix."""
    return torch.distributed.PrefixStore(f"{prefix}/", store)  # pyright: ignore[reportPrivateImportUsage]


def store_rank(store: Any) -> int | None:
    """Return the rank whose process a store lives and ends with; None where the launcher has it, or nobody."""
    while isinstance(store, torch.distributed.PrefixStore):  # pyright: ignore[reportPrivateImportUsage]
        store = store.underlying_store
    launched = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    served = isinstance(store, torch.distributed.TCPStore)  # pyright: ignore[reportPrivateImportUsage]
    return 0 if served and not launched else None


def uses_torchcomms(backend: str) -> bool:
    """Whether PyTorch asks torchcomms for process groups of this backend: for all until 2.14, then for those it has."""
    from torch.distributed import distributed_c10d

    handled = getattr(distributed_c10d, "_torchcomms_handles_backend", lambda backend: True)
    return bool(getattr(distributed_c10d, "_use_torchcomms_enabled", bool)()) and handled(backend)


def collective_options(name: str) -> Any:
    """Return new options of a collective of process groups: ``Allreduce``, ``ReduceScatter``, ``Allgather`` ..."""
    from torch._C import _distributed_c10d

    return getattr(_distributed_c10d, f"{name}Options")()


def premul_factors(op: Any) -> Any:
    """The factor of a ``ReduceOp.PREMUL_SUM``, a number or a tensor; None if this PyTorch does not tell."""
    try:
        _, factor = op.__getstate__()  # as it is pickled: ``op.factor`` is younger
    except (AttributeError, TypeError, ValueError):
        return None
    return factor


def premul_factor(op: Any) -> float | None:
    """The factor of a ``ReduceOp.PREMUL_SUM``; None if it is a tensor of several values, or unknown."""
    factor = premul_factors(op)
    if isinstance(factor, torch.Tensor):
        return float(factor) if factor.numel() == 1 else None
    return float(factor) if isinstance(factor, int | float) else None


def ddp_ready_order(model: Any) -> tuple[int, ...] | None:
    """Return the order of a ``DistributedDataParallel`` model's trained parameters in its buckets, by their index.

    DDP logs it in the first passes after it has rebuilt its buckets, the same on every rank. None before that, and
    where this PyTorch does not tell. Not to be called while backward runs, which holds a lock that this takes.
    """
    try:
        rebuilt = model._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices")
        order = tuple(int(index) for index in rebuilt.replace(",", " ").split()) if rebuilt else ()
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None
    return order if order and sorted(order) == list(range(len(order))) else None


class FSDPParameter(NamedTuple):
    """The state of ``fully_shard`` for one of its parameters."""

    now: Callable[[], torch.nn.Parameter]
    """Function that returns the sharded parameter, which PyTorch may replace by another one."""
    whole: Callable[[], torch.Tensor | None]
    """Function that returns the whole parameter that modules compute with; None before it was first gathered."""
    shape: tuple[int, ...]
    """Shape of the parameter before sharding."""
    dim: int
    """Dimension along which the parameter is sharded."""
    padded_numel: int
    """Number of elements that each rank's part of a flat buffer has for the parameter."""


class FSDPGroup(NamedTuple):
    """Parameters that ``fully_shard`` communicates together, in their order in flat buffers."""

    identity: Any
    """Object that is the same for modules that were sharded together."""
    parameters: tuple[FSDPParameter, ...]
    process_group: Any
    """Process group that the parameters are sharded over; None if every rank has them whole (``replicate()``)."""
    post_forward_size: int
    """Number of ranks that parameters are resharded to after forward; 0 if that is all of them, or none."""
    frees: bool
    """Whether weights are freed after forward and gathered again in backward; by default the root's are not."""
    frees_by_default: bool
    """Whether nobody asked for that: then the root keeps its weights."""
    replicate_group: Any
    """Process group of the replicas of the shards, or of the whole module; None if there are none."""
    fills_unused: bool
    """Whether parameters without a gradient take part in reductions with zeros."""
    other_comm: str
    """Name of the communication object, where that is not PyTorch's default."""
    all_reduce_hook: Any
    """Hook that is called with reduced gradients, if any."""
    offloads: bool
    """Whether its shards are kept on the host, while another device computes (``CPUOffloadPolicy``)."""
    reads_at_once: Callable[[], bool]
    """Function that returns whether anything reads reduced gradients before backward has ended."""

    @property
    def whole(self) -> bool:
        """Whether every rank has all of its parameters: among replicas, not shards."""
        return self.replicate_group is not None and (self.process_group is None or self.process_group.size() == 1)

    @property
    def alone(self) -> bool:
        """Whether one rank has all of its parameters, and no other does: nothing is sent."""
        return all(group is None or group.size() == 1 for group in (self.process_group, self.replicate_group))


def gathered_dtypes(group: FSDPGroup) -> set[torch.dtype]:
    """Return the dtypes in which FSDP2 gathers the parameters of a group: by mixed precision, or their own."""
    mixed = getattr(getattr(group.identity, "mp_policy", None), "param_dtype", None)
    own = {parameter.now().dtype for parameter in group.parameters}
    return {mixed if mixed is not None and dtype.is_floating_point else dtype for dtype in own}


def fsdp_groups(module: Any) -> list[FSDPGroup]:
    """Return the parameter groups of an ``FSDPModule``: none if it manages no parameters itself, several if they have
    several meshes.

    Raises ``RuntimeError`` where this PyTorch does not tell.
    """
    try:
        by_default = module._get_fsdp_state()._auto_reshard_after_forward
        return [_fsdp_group(group, by_default) for group in _param_groups(module)]
    except (AttributeError, TypeError) as error:
        raise RuntimeError(
            f"this PyTorch ({torch.__version__}) does not tell how fully_shard lays out its buffers: {error}"
        ) from None


def _param_groups(module: Any) -> list[Any]:
    """The parameter groups of an ``FSDPModule``, which had at most one before PyTorch 2.12."""
    state = module._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)
    return [group for group in (state._fsdp_param_group,) if group] if several is None else several


def fill_unused(module: Any, on: bool) -> None:
    """Whether parameters of an ``FSDPModule`` without a gradient take part in reductions with zeros, as
    ``set_reduce_scatter_unused_params`` says, which PyTorch has since 2.13. Before, they get zeros as their gradients
    just before these are reduced."""
    if hasattr(module, "set_reduce_scatter_unused_params"):
        module.set_reduce_scatter_unused_params(on, recurse=False)
        return
    for group in _param_groups(module):
        group.reduce_scatter_unused_params = on
        if on:
            group.post_backward = partial(_filled_post_backward, group)
        else:
            vars(group).pop("post_backward", None)


def _filled_post_backward(group: Any, *unused: Any) -> None:
    for parameter in group.fsdp_params if group.reduce_grads else ():
        whole = getattr(parameter, "_unsharded_param", None)
        if whole is None or not whole.requires_grad or whole.grad is not None:
            continue
        if parameter.unsharded_accumulated_grad is None:
            whole.grad = torch.zeros_like(whole)
    type(group).post_backward(group, *unused)


def _fsdp_group(group: Any, by_default: bool) -> FSDPGroup:
    comms = [type(comm).__name__ for comm in (group._all_gather_comm, group._reduce_scatter_comm)]
    mesh = group.mesh_info
    replicas = getattr(mesh, "replicate_process_group", None)
    shards = mesh.shard_process_group if replicas is None else getattr(mesh, "shard_process_group", None)
    size = 1 if shards is None else int(mesh.shard_mesh_size)
    after = 0 if group.post_forward_mesh_info is None else int(group.post_forward_mesh_info.shard_mesh_size)
    return FSDPGroup(
        group,
        tuple(_fsdp_parameter(parameter) for parameter in group.fsdp_params),
        shards,
        after if after != size else 0,
        after == size,
        bool(by_default),
        replicas,
        bool(getattr(group, "reduce_scatter_unused_params", False)),
        next((name for name in comms if name not in ("DefaultAllGather", "DefaultReduceScatter")), ""),
        group._all_reduce_hook,
        group.device.type != "cpu" and any(p.offload_to_cpu for p in group.fsdp_params),
        lambda: _reads_immediately(group),
    )


def _fsdp_parameter(parameter: Any) -> FSDPParameter:
    return FSDPParameter(
        lambda: parameter.sharded_param,
        lambda: getattr(parameter, "_unsharded_param", None),
        tuple(parameter._orig_size),
        int(parameter.fsdp_placement.dim),
        int(parameter.padded_sharded_param_size.numel()),
    )


def replace_replicas(group: FSDPGroup, replicas: Any) -> Callable[[], None]:
    """Have FSDP2 take its means over the replicas of a group in another process group; what is returned ends that.

    Raises ``RuntimeError`` where this PyTorch has no way to.
    """
    former = getattr(group.identity, "mesh_info", None)
    if former is None or getattr(former, "replicate_process_group", None) is not group.replicate_group:
        raise RuntimeError(f"this PyTorch ({torch.__version__}) does not let means over replicas be taken elsewhere")
    # Other groups share the object.
    group.identity.mesh_info = copy.copy(former)
    group.identity.mesh_info.replicate_process_group = replicas
    held = weakref.ref(group.identity)

    def end() -> None:
        identity = held()
        if identity is not None:
            identity.mesh_info = former

    return end


def _reads_immediately(group: Any) -> bool:
    try:
        replicas = getattr(group.mesh_info, "replicate_process_group", None)
        return (
            group._all_reduce_hook is not None
            or not getattr(replicas, "reads_late", replicas is None)
            # Sums among shards that no mean over replicas has followed yet.
            or not group.all_reduce_grads
            or group._partial_reduce_output is not None
            or any(p.offload_to_cpu or p.sharded_param._post_accumulate_grad_hooks for p in group.fsdp_params)
            or any(module._backward_hooks for module in group.modules)
        )
    except AttributeError:
        return True


def at_end_of_backward(callback: Callable[[], object]) -> bool:
    """Make the autograd engine call ``callback`` when the present backward pass has ended; its errors are raised there.
    Return False where none runs, or this PyTorch cannot do it."""
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    try:
        engine.queue_callback(callback)  # pyright: ignore[reportOptionalMemberAccess]
    except (AttributeError, RuntimeError):
        return False
    return True


def accepts_uneven_inputs(model: Any) -> bool:
    """Whether a ``DistributedDataParallel`` model is, or was last, in ``join()``: some ranks may take no forward pass.

    False where this PyTorch does not tell.
    """
    return bool(getattr(getattr(model, "_join_config", None), "enable", False))


def untraced(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """``function``, which ``torch.compile`` never traces into, without importing the compiler before it is called."""
    return torch._disable_dynamo(function)  # pyright: ignore[reportPrivateImportUsage]


def in_compiled_backward() -> bool:
    """Whether the backward pass that runs was compiled (compiled autograd), and will call nothing at its end."""
    return bool(getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "in_compiled_autograd_region", False))


def optimizes_in_backward(module: Any) -> bool:
    """Whether any parameter has an optimizer of its own that steps in backward (``_apply_optimizer_in_backward``)."""
    return any(hasattr(parameter, "_in_backward_optimizers") for parameter in module.parameters())


def inside_a_node() -> bool:
    """Whether a node of a backward pass computes in the calling thread. At the end of a pass it does if that ran within
    another one: in a reentrant checkpoint, or an autograd ``Function`` that calls ``backward()``. False where this
    PyTorch does not tell."""
    node = getattr(torch._C, "_current_autograd_node", None)
    return node is not None and node() is not None


def reduce_scatter_single(out: torch.Tensor, x: torch.Tensor, group: Any, op: Any) -> None:
    """Call ``torch.distributed.reduce_scatter_single``, which was ``reduce_scatter_tensor`` before PyTorch 2.13."""
    import torch.distributed as dist

    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(out, x, op=op, group=group)


def tells_stage_tensors() -> bool:
    """Whether `stage_tensors` knows what crosses the boundaries of a ``PipelineStage``: since PyTorch 2.12."""
    from torch.distributed.pipelining import stage

    return hasattr(stage, "_StageMeta")


def stage_tensors(stage: Any) -> dict[str, list[tuple[tuple[int, ...], torch.dtype]]]:
    """Return shapes and dtypes of the tensors at the boundaries of a ``PipelineStage`` that its schedule has set up:
    one micro-batch's ``inputs``, ``outputs``, ``input_grads`` and ``output_grads``, without those that are not sent.

    Raises ``RuntimeError`` where this PyTorch does not tell, and ``NotImplementedError`` for a ``DTensor``.
    """
    names = ("inputs", "outputs", "input_grads", "output_grads")
    tensors: dict[str, list[tuple[tuple[int, ...], torch.dtype]]] = {}
    try:
        metas = {name: getattr(stage._stage_meta, name) for name in names}
        for name, stage_metas in metas.items():
            if any(hasattr(meta, "placements") for meta in stage_metas or ()):
                raise NotImplementedError(
                    "a DTensor crosses a stage boundary: let the stage end with a plain tensor (to_local())"
                )
            tensors[name] = [(tuple(meta.shape), meta.dtype) for meta in stage_metas or () if meta is not None]
    except (AttributeError, TypeError) as error:
        raise RuntimeError(
            f"this PyTorch ({torch.__version__}) does not tell what crosses a stage boundary ({error}): pipelines need "
            "PyTorch 2.12"
        ) from None
    return tensors


def is_replicated(module: Any) -> bool:
    """Whether the composable ``replicate()`` was called on a module, or on one in it, which then is no
    ``DistributedDataParallel`` and no ``FSDPModule``. False where this PyTorch does not tell."""
    contract = sys.modules.get("torch.distributed._composable.contract")
    registry = getattr(contract, "_get_registry", lambda _: None)
    return any("replicate" in (registry(part) or ()) for part in module.modules())


def uncompiled(model: Any) -> Any:
    """Return the model inside of one that ``torch.compile`` made; any other as it is."""
    return model._orig_mod if type(model).__name__ == "OptimizedModule" else model


_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def unwrapped(name: str) -> str:
    """Return the name of a parameter or module without the parts that ``torch.compile`` and PyTorch's checkpoint
    wrapper, which contain a module, add: ``blocks.0._orig_mod.weight`` is ``blocks.0.weight``."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
