"""Means over replicas under FSDP2: of shards on an (n, m) mesh, or of whole modules, on (n, 1) or by ``replicate()``.

FSDP2 takes them by an all-reduce in the mesh's process group, which a `ReplicaGroup` replaces. Whole modules send
nothing else: the gradients of each are a bucket, like one of DistributedDataParallel.
"""

# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.compat import FSDPGroup, at_end_of_backward, inside_a_node, replace_replicas
from thinwire.compressors import GRADIENT_DTYPES
from thinwire.integrations.ddp import Options, connect
from thinwire.integrations.optimizers import Updates
from thinwire.integrations.options import CommonOptions
from thinwire.integrations.step_watch import StepWatch
from thinwire.integrations.unused import UnitUse, Uses
from thinwire.optim import CompressedAdamW, QuantizedAdam
from thinwire.plan import named_parameters
from thinwire.runtime import Follower, Wire

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from thinwire.integrations.fsdp import ShardedOptions

Future = torch.futures.Future
UNUSED_HINT = (
    "Parameters that get no gradient in a step must take part with zeros: leave set_reduce_scatter_unused_params(True) "
    "as thinwire.compress() set it"
)


def wait_late(future: Future[Tensor], group: FSDPGroup, dtype: torch.dtype) -> bool:
    """Wait for gradients of ``group`` that are reduced in ``dtype``: at the end of backward, or now if something reads
    them before. Returns whether the wait is at the end."""
    late = not group.reads_at_once()
    for parameter in group.parameters if late else ():
        now = parameter.now()
        # FSDP2 adds to a gradient that exists, and casts one of another dtype.
        late &= now.grad is None and now.dtype == dtype
    if late and at_end_of_backward(future.wait):
        return True
    future.wait()
    return False


def check_buffer(
    where: str, doing: str, dtype: torch.dtype, numel: int, layers: Mapping[str, int], hint: str = UNUSED_HINT
) -> None:
    """Raise an exception unless a buffer of a module, the one at ``where``, has a dtype that is compressed and the
    ``numel`` elements of its ``layers``."""
    where = where or "the root module"
    if dtype not in GRADIENT_DTYPES:
        raise TypeError(
            f"FSDP {doing} {where} as {dtype}, and thinwire compresses float32, bfloat16 and float16: give its "
            "parameters one of these dtypes (parameters of several dtypes in one module are sent as bytes)"
        )
    expected = sum(layers.values())
    if numel != expected:
        raise RuntimeError(
            f"FSDP {doing} {numel} elements a rank for {where}, where its parameters ({', '.join(layers)}) make "
            f"{expected}: their places in the buffer are unknown. {hint}"
        )


class ReplicaGroup(dist.ProcessGroup):
    """The process group of a parameter group's replicas, over which ``mean`` replaces a tensor by its mean."""

    def __init__(self, group: FSDPGroup, mean: Callable[[Tensor], Future[Tensor]], *, overlap: bool) -> None:
        """Create it; ``overlap``: whether results may be waited for when backward ends."""
        replicas = group.replicate_group
        super().__init__(replicas.rank(), replicas.size())  # pyright: ignore[reportCallIssue]
        self._group, self._mean, self.reads_late = group, mean, overlap

    # As of the replicas' own group, by which PyTorch finds what it says of a collective that failed.
    def __hash__(self) -> int:
        return hash(self._group.replicate_group)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self._group.replicate_group

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> None:
        """Reduce the flat gradients of one backward pass, for FSDP2."""
        (flat,) = tensors
        future = self._mean(flat)
        if opts.reduceOp == dist.ReduceOp.AVG and self.reads_late:
            wait_late(future, self._group, flat.dtype)
            return
        future.wait()
        if opts.reduceOp != dist.ReduceOp.AVG:
            flat.mul_(self.size())


class _Passes:
    """The backward passes of a model whose modules are whole on every rank, which are the steps of its `Wire`."""

    def __init__(self, wire: Wire, options: CommonOptions, updates: Updates | None) -> None:
        self.wire, self.engine, self.updates = wire, wire.engine, updates
        self.scaler = options.grad_scaler
        self.uses = Uses(wire.engine.on_any_rank)
        self._reduced: set[str] = set()
        """Layers that the present step has reduced."""
        self._loss_scale = 1.0

    def mean(self, group: FSDPGroup, names: Sequence[str], use: UnitUse, where: str, flat: Tensor) -> Future[Tensor]:
        """Start replacing the gradients of a module by their mean over all ranks."""
        pairs = zip(names, group.parameters, strict=True)
        layers = tuple((name, p.shape) for name, p in pairs if p.now().requires_grad)
        trained = [name for name, _ in layers]
        check_buffer(where, "reduces", flat.dtype, flat.numel(), {n: math.prod(shape) for n, shape in layers})
        use.reduce(trained)
        self.follow()
        # A module that backward reaches twice is reduced twice: each reduction is a step, and takes up the residual of
        # the one before.
        if not self._reduced or not self._reduced.isdisjoint(trained):
            self._begin()
        self._reduced.update(trained)
        return self.engine.reduce(flat, layers, loss_scale=self._loss_scale)

    def follow(self) -> None:
        """Have the end of the outermost backward pass noticed, if one runs."""
        # After the callback that FSDP2 has queued, which reduces modules whose inputs need no gradient.
        at_end_of_backward(lambda: at_end_of_backward(self._end))

    def _begin(self) -> None:
        engine = self.engine
        self._reduced.clear()
        engine.begin_step(self.updates.learning_rates() if self.updates else None)
        needed = engine.adapter is not None or engine.plan.needs_loss_scale  # asking for it stops a GPU
        self._loss_scale = self.scaler.get_scale() if self.scaler and needed else 1.0

    def _end(self) -> None:
        # A pass within another one, such as that of a reentrant checkpoint, is a part of it.
        if inside_a_node() or not self._reduced or not self.engine.attached:
            return
        self._reduced.clear()
        self.engine.drop(self.uses.end_pass())


def attach_whole(model: nn.Module, modules: Sequence[tuple[FSDPModule, FSDPGroup, str]], asked: ShardedOptions) -> Wire:
    """Compress the means over replicas of ``modules``, each with its group of parameters and its path, that are whole
    on every rank."""
    options = Options(compressor=asked.gradients, **{f.name: getattr(asked, f.name) for f in fields(CommonOptions)})
    group = modules[0][1].replicate_group
    named = named_parameters(model)
    names = {id(parameter): name for name, parameter in named.items()}
    held = {names[id(p.now())]: p.now() for _, each, _ in modules for p in each.parameters}
    follower = Follower("thinwire dense")
    wire, updates, _, _ = connect(model, held, group, options, follower, partial(_check_optimizer, options.optimizer))
    StepWatch(wire, named)
    passes = _Passes(wire, options, updates)
    for module, each, path in modules:
        own = tuple(names[id(p.now())] for p in each.parameters)
        use = passes.uses.add(module, own, each, wire, passes.follow)
        mean = partial(passes.mean, each, own, use, path)
        # On a device, to wait only makes a stream wait.
        late = asked.overlap and wire.engine.device is None
        wire.at_detach(replace_replicas(each, ReplicaGroup(each, mean, overlap=late)))
    return wire


def _check_optimizer(optimizer: torch.optim.Optimizer | None) -> None:
    if isinstance(optimizer, CompressedAdamW | QuantizedAdam):
        raise NotImplementedError(
            f"{type(optimizer).__name__} is for DistributedDataParallel and for shards: every rank has the whole of "
            "these modules. Wrap the model in DistributedDataParallel, or use another optimizer"
        )
