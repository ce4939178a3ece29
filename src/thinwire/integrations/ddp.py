"""Attachment to DistributedDataParallel, which compresses and sends each bucket of gradients while backward runs."""

# No `from __future__ import annotations` here: DDP checks the annotations of a communication hook as objects.

import math
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from thinwire.aggregator import AggregatorAddress, AggregatorClient, session_number
from thinwire.arguments import check_type, warn_caller
from thinwire.collectives import LoopbackTransport, Pending, ProcessGroupTransport, Transport, TransportError
from thinwire.compat import (
    accepts_uneven_inputs,
    at_end_of_backward,
    in_compiled_backward,
    inside_a_node,
    optimizes_in_backward,
    untraced,
)
from thinwire.compressors import GRADIENT_DTYPES, Raw, Summed, SummedMatrices, find_mixin
from thinwire.integrations.optimizers import Updates, check_optimizer, warn_about_pairing
from thinwire.integrations.options import (
    Checks,
    CommonOptions,
    check_arguments,
    check_bool,
    check_compressor,
    describe_options,
    make_policy,
    unfit,
)
from thinwire.integrations.step_watch import StepWatch
from thinwire.integrations.transports import agreed_transport, carried, exchange_device, replicated
from thinwire.plan import DEFAULT_RULES, Filter, Plan, Rules, named_parameters
from thinwire.plan.contraction import check_feedback
from thinwire.policies import Auto, Policy, parse_policy
from thinwire.runtime import AsyncReadback, BucketEngine, Follower, ThreadExecutor, Wire, WireSettings, start_mean
from thinwire.runtime.bucket import BucketLayers
from thinwire.runtime.consistency import checksums, fail_together

if TYPE_CHECKING:
    from thinwire.integrations.momentum import Momentum
    from thinwire.integrations.preconditioned import Preconditioned

GradBucket = dist.GradBucket  # pyright: ignore[reportPrivateImportUsage] - documented, yet not exported
Reduced = torch.futures.Future[torch.Tensor]
_BIG_BUCKET_BYTES = 4 << 20
_attached: "weakref.WeakKeyDictionary[DistributedDataParallel, _Hook]" = weakref.WeakKeyDictionary()


class _Hook:
    """The state of DDP's communication hook, which the DDP model refers to; it does not refer to the model.

    A copy of the model (by ``copy.deepcopy``, ``pickle``, ``AveragedModel``) has a reducer of its own, without a hook:
    a copy of this state does nothing, and the copied model may be compressed.
    """

    group: dist.ProcessGroup

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        names: Mapping[torch.Tensor, str] | None = None,
        *,
        finds_unused: bool = False,
    ) -> None:
        """Create the state; ``finds_unused``: whether layers may be left out of a backward pass."""
        if group is not None:
            self.group = group
        self.names = dict(names or {})
        self._dtypes = {name: p.dtype for p, name in self.names.items()}
        self._finds_unused = finds_unused
        self.wire: Wire | None = None
        self.grad_scaler: torch.amp.GradScaler | None = None
        self.updates: Updates | None = None
        self.momentum: Momentum | None = None
        self.preconditioned: Preconditioned | None = None
        self.parity = 0
        self.resync = 0
        self.watch: StepWatch | None = None
        self._error: Exception | None = None
        self._sums: torch.Tensor | None = None
        self._arrived: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._held_before: set[torch.Tensor] = set()
        self._met: set[BucketLayers] = set()
        """Layers of the buckets met since the wire was attached."""
        self._mean_sketches: tuple[torch.Tensor, Pending] | None = None
        self._passes = 0
        self._resynced = -1
        self._no_resync = ""
        """Reason for which the last forward pass has not copied parameters although that was due."""
        self._told: set[str] = set()
        self._handled = id(None)
        """The ``id()`` of the error that the caller was handling when forward began, which forward did not raise."""
        self._loss_scale = 1.0
        self._loss_scale_readback = AsyncReadback()
        self.follower = Follower("thinwire dense")
        self._one_by_one: dict[torch.Tensor, tuple[torch.Tensor, Reduced] | None] = {}
        """Gradients of the present backward pass and their means, by parameter, where DDP reduces in Python."""

    @property
    def _engine(self) -> BucketEngine | None:
        """Engine of the wire, if one is attached."""
        engine: BucketEngine | None = None if self.wire is None else self.wire.engine
        return engine if engine is not None and engine.attached else None

    def __reduce__(self) -> tuple[type["_Hook"], tuple[()]]:
        return _Hook, ()

    def __call__(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start reducing a bucket. The future holds its gradients even if that fails; see `_end_backward`."""
        flat, last = bucket.buffer(), bucket.is_last()
        if bucket.index() == 0:
            self._arrived = []
            if self.momentum is not None:
                self.momentum.forget_sketches()
        if self._finds_unused and not flat.is_sparse:
            self._arrived += zip(bucket.parameters(), bucket.gradients(), strict=True)
        # Backward passes nest (reentrant checkpoints, autograd.backward in a Function), and a callback belongs to the
        # pass in which it is queued: DDP queues the one that reads the futures in that of the last bucket. Two levels:
        # DDP's comes after the first and before the second. None comes for a rank that shadows others (``join()``).
        ends = last and at_end_of_backward(lambda: at_end_of_backward(self._end_backward))
        try:
            future = self._start(bucket)
            if last:
                self._mean_sketches = self._start_mean_sketch()
        except Exception as error:  # noqa: BLE001 - raised at the end of backward
            future = torch.futures.Future(devices=[flat.device] if flat.is_cuda else None)
            future.set_exception(error)  # pyright: ignore[reportArgumentType]
        return future.then(lambda reduced: self._result(reduced, flat, raises=last and not ends))

    def reduce_one(self, gradient: torch.Tensor, parameter: torch.Tensor) -> Reduced:
        """Start reducing one gradient as a bucket of one layer, where DDP reduces in Python (``python_reducer``).

        DDP then calls its hook for each parameter, and leaves it to the hook to put the mean in the gradient's place.
        """
        # Compiled autograd calls nothing at the end of a pass, so each mean is waited for here.
        compiled = in_compiled_backward()
        if compiled and self.momentum is not None:
            raise NotImplementedError("QuantizedAdam needs the end of a backward pass, which compiled autograd hides")
        if parameter in self._one_by_one:
            if not compiled:
                raise RuntimeError(
                    f"{self.names[parameter]} got a gradient twice in one backward pass: checkpoints must not be "
                    "reentrant where DistributedDataParallel reduces in Python (use_reentrant=False)"
                )
            self._one_by_one = {}
        number = len(self._one_by_one)
        if not (number or compiled):
            at_end_of_backward(self._end_one_by_one)
        if not gradient.is_sparse:
            gradient = (torch.view_as_real(gradient) if gradient.is_complex() else gradient).detach()
        flat = gradient if gradient.is_sparse else gradient.reshape(-1)
        bucket: Any = SimpleNamespace(
            buffer=lambda: flat,
            index=lambda: number,
            is_last=lambda: False,
            parameters=lambda: [parameter],
            gradients=lambda: [gradient],
        )
        future = self(bucket)
        self._one_by_one[parameter] = None if compiled else (gradient, future)
        if compiled:
            _put(gradient, future.wait())
            self.raise_error()
        return future

    def _end_one_by_one(self) -> None:
        reduced, self._one_by_one = self._one_by_one, {}
        self._mean_sketches = self._start_mean_sketch()
        for gradient, future in filter(None, reduced.values()):
            _put(gradient, future.wait())
        self._end_backward()

    def _result(self, reduced: Reduced, flat: torch.Tensor, *, raises: bool) -> torch.Tensor:
        try:
            return reduced.value()
        except Exception as error:  # noqa: BLE001 - raised below, or at the end of backward
            self._error = self._error or error
        finally:
            if raises:
                self.raise_error()
        return flat

    def raise_error(self) -> None:
        """Raise what went wrong in a backward pass, if that has not been raised yet."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _end_backward(self) -> None:
        """Raise what went wrong in this backward pass, once it is over for DDP, or give gradients their lengths.

        An exception of a hook leaves DDP's reducer unusable, and one in its future reaches ``backward()`` as a
        ``RuntimeError`` with the text alone, because the reducer is C++ and knows no Python exceptions. An exception of
        a callback at the end of backward keeps its type, and is raised before any optimizer can step.
        """
        sketches, self._mean_sketches = self._mean_sketches, None
        arrived, self._arrived = self._arrived, []
        self.raise_error()
        self._keep_unused(arrived)
        if sketches is not None and self.momentum is not None and self.wire is not None:
            mean, pending = sketches
            pending.wait()
            self.wire.engine.count_extra(mean.nbytes)
            self.momentum.set_lengths(mean, self._loss_scale)

    def _keep_unused(self, arrived: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Keep what residuals, and momenta of `DGC`, have sent of layers that no rank used: DDP leaves their gradients
        as they are, None or what they were before the pass, whatever has arrived for them.

        ``arrived`` has the parameters of this pass, each with the mean that has arrived for it.
        """
        engine = self._engine
        if not arrived or engine is None or self.momentum is not None:
            return
        engine.drop(
            self.names[p]
            for p, mean in arrived
            if p.grad is None or (p in self._held_before and not torch.equal(p.grad, mean))
        )

    def _start_mean_sketch(self) -> tuple[torch.Tensor, Pending] | None:
        """Start the mean of the sketches of all buckets, one all-reduce along with that of the last bucket."""
        sketches = self.momentum.sketches() if self.momentum is not None else None
        return None if sketches is None else (sketches, start_mean(sketches, self.group))

    def _start(self, bucket: GradBucket) -> Reduced:
        flat, engine = bucket.buffer(), self._engine
        if engine is None:
            if self.preconditioned is not None:
                self.preconditioned.release([self.group])
                self.preconditioned = None
            return self.follower.mean(flat, self.group)
        if bucket.index() == 0:
            self._begin_step(bucket, flat, engine)
        layers = tuple((self.names[p], _shape_in_bucket(p)) for p in bucket.parameters())
        if layers not in self._met and self.watch is not None:
            self._met.add(layers)
            self.watch.note_exchange(bucket.parameters())
        if flat.is_sparse:
            return self._sparse(flat, [name for name, _ in layers], engine)
        return engine.reduce(flat, layers, loss_scale=self._loss_scale)

    def _begin_step(self, bucket: GradBucket, flat: torch.Tensor, engine: BucketEngine) -> None:
        engine.begin_step(self.updates.learning_rates() if self.updates else None)
        if self._no_resync and self._no_resync not in self._told:
            self._told.add(self._no_resync)
            warn_caller(self._no_resync)
        self._loss_scale = self._present_scale()
        self._check_overlap(bucket, flat, engine)
        if self.watch is not None:
            self.watch.accumulates = self.watch.taken = False
        if self.parity and engine.step % self.parity == 0:
            sums, self._sums = self._sums, None
            engine.check_parity(tuple(self.names.values()), sums)

    def _sparse(self, flat: torch.Tensor, names: Sequence[str], engine: BucketEngine) -> Reduced:
        """Start the mean of sparse gradients, as DDP does. The bytes that it moves are not known and not counted."""
        for name in names if not engine.dense else ():
            if not isinstance(engine.plan[name], Raw):
                raise TypeError(
                    f"{name} has sparse gradients (Embedding(sparse=True)), which cannot be compressed: "
                    f"leave it raw with exclude=[{name!r}], or make the embedding dense"
                )
        return self.follower.mean(flat, self.group)

    def _present_scale(self) -> float:
        """Return the loss scale of this backward pass."""
        scales = self._loss_scale_readback.read()
        if scales:
            return float(scales[-1])
        return self.grad_scaler.get_scale() if self.grad_scaler else 1.0

    @untraced
    def before_forward(self, model: DistributedDataParallel, inputs: object) -> None:
        """Copy rank 0's parameters to all ranks every ``resync`` steps, while nothing else reads or writes them.

        Gradients that no optimizer has taken get back the length at which further ones can be added to them. An error
        that a backward pass could not raise is raised.
        """
        self.raise_error()
        if not inside_a_node():
            self._one_by_one = {}  # left by a pass that an error ended
        self._handled = id(sys.exc_info()[1])
        engine, watch = self._engine, self.watch
        if engine is None or watch is None or not torch.is_grad_enabled():
            return
        if self._finds_unused:
            self._held_before = {p for p in self.names if p.grad is not None}
        if self.momentum is not None:
            self.momentum.lengthen()  # no step has taken these, and gradients may be added to them
        elif engine.plan.has_slots:
            engine.lost = engine.lost or watch.lost()
        if model.require_backward_grad_sync:
            self._begin_pass(engine, model)
        self._sum_parameters(engine, watch)
        watch.accumulates |= not model.require_backward_grad_sync and any(p.requires_grad for p in self.names)

    def _begin_pass(self, engine: BucketEngine, model: DistributedDataParallel) -> None:
        self._no_resync = ""
        for parameter, name in self.names.items():
            if parameter.requires_grad and parameter.dtype != self._dtypes[name]:
                raise TypeError(
                    f"{name} is {parameter.dtype} by now, and was {self._dtypes[name]}: DistributedDataParallel "
                    "exchanges no gradients of a model whose dtype has changed (nor does PyTorch's own, silently). "
                    "Call model.to() first, build DistributedDataParallel again, and call thinwire.compress() on it"
                )
        if engine.detector is not None:
            engine.detector.advance()
        if self.grad_scaler and engine.device is not None:
            # Asking for it later, in the middle of backward, would make the host wait for what backward did so far.
            self._loss_scale_readback = AsyncReadback()
            one = torch.ones((), dtype=torch.float32, device=engine.device)
            self._loss_scale_readback.note(self.grad_scaler.scale(one))
        if self.resync and engine.step not in (-1, self._resynced) and (engine.step + 1) % self.resync == 0:
            self._resync(engine, model)

    def _sum_parameters(self, engine: BucketEngine, watch: StepWatch) -> None:
        """Take the checksums that the next backward pass compares, if it does.

        They are taken in the first of the forward passes that lead to it, because after one under ``no_sync()`` a loop
        may move each rank's weights by its own gradients and put them back (sharpness-aware minimization). A rank that
        has no forward pass, because its data have ended before those of others, has no checksums to compare.
        """
        due = self.parity and (engine.step + 1) % self.parity == 0
        if due and not (watch.accumulates and self._sums is not None):
            self._sums = checksums(self.names)

    def _resync(self, engine: BucketEngine, model: DistributedDataParallel) -> None:
        if not model.training:
            why = "while the model is in eval(), in which a rank may run it alone"
        elif accepts_uneven_inputs(model):
            why = (
                "within join(), nor after it until the next one with enable=False: ranks whose data have ended take no "
                "part in a forward pass, where parameters are copied"
            )
        else:
            self._resynced = engine.step
            engine.resync({name: p for p, name in self.names.items()})
            self._sums = None  # they are of the former parameters
            return
        self._no_resync = f"resync_every does nothing {why}"

    @untraced
    def after_forward(self, model: DistributedDataParallel, inputs: object, outputs: object) -> None:
        """Add the cause to an error of DDP's own collectives in forward, which sync buffers or rebuild buckets.

        The error is PyTorch's and keeps its type; it gets ``rank``, ``host`` and ``reason``, and a note.
        """
        error = sys.exc_info()[1]
        detector = engine.detector if (engine := self._engine) is not None else None
        if detector is None or not isinstance(error, RuntimeError) or id(error) == self._handled:
            return
        if "gloo" in str(error) and not hasattr(error, "rank"):
            explained = detector.explain(TransportError(str(error)))
            vars(error).update(rank=explained.rank, host=explained.host, reason=explained.reason)
            if explained.reason is not None:
                who = "" if explained.rank is None else f"rank {explained.rank} on "
                error.add_note(f"The cause is {who}{explained.host}: {explained.reason}")

    def _check_overlap(self, bucket: GradBucket, flat: torch.Tensor, engine: BucketEngine) -> None:
        # DDP rebuilds its first buckets after one or two backward passes.
        self._passes += 1
        if self._passes != 4 or engine.world_size == 1 or not bucket.is_last():
            return
        num_bytes = flat.numel() * flat.element_size()
        # Factors take a few messages whose number matters, not their size, and another bucket would double it.
        factored = any(find_mixin(compressor, SummedMatrices) is not None for compressor in engine.plan.layers.values())
        if num_bytes >= _BIG_BUCKET_BYTES and not factored:
            cap_mb = max(1, round(num_bytes / 5 / 2**20))
            warnings.warn(
                f"all gradients ({num_bytes / 2**20:.0f} MB) are in one DDP bucket, so communication does not overlap "
                f"with backward: pass bucket_cap_mb={cap_mb} to DistributedDataParallel",
                stacklevel=2,
            )


def _shape_in_bucket(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a gradient in DDP's buckets, which hold complex ones as pairs of real numbers."""
    return (*parameter.shape, 2) if parameter.is_complex() else tuple(parameter.shape)


def _put(gradient: torch.Tensor, mean: torch.Tensor) -> None:
    if mean is not gradient:
        gradient.copy_(mean.view_as(gradient))


@untraced
def _hook(state: _Hook, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state(bucket) if isinstance(bucket, GradBucket) else state.reduce_one(*bucket)


@dataclass(frozen=True)
class Options(CommonOptions):
    """The arguments of `thinwire.compress_ddp`."""

    compressor: Rules | Auto | None = None
    checks: Checks = Checks()
    simulate: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_type("checks", self.checks, Checks, "thinwire.Checks", "checks=thinwire.Checks(parity_every=1000)")

    def filter(self, module: torch.nn.Module) -> Filter:
        return replace(super().filter(module), unfit=unfit(module))


def attach_ddp(model: DistributedDataParallel, options: Options) -> Wire:
    """Attach compression to a DDP model; see `thinwire.compress_ddp`."""
    hook = _attached.get(model)
    if hook is not None and hook._engine is not None:
        raise RuntimeError("this model is compressed already: call detach() on its Wire first, on every rank")
    if hook is None:
        assert isinstance(model.process_group, dist.ProcessGroup), "DDP has a process group once it is built"
        names: dict[torch.Tensor, str] = {p: name for name, p in replicated(model).items()}
        hook = _Hook(model.process_group, names, finds_unused=model.find_unused_parameters or model.static_graph)
    parameters = {name: p for p, name in hook.names.items()}
    given = model.module, parameters, hook.group, options, hook.follower, lambda: _check_reducer(model)
    wire, hook.updates, hook.momentum, hook.preconditioned = connect(*given, bucket_bytes=model.bucket_bytes_cap)
    if model not in _attached:
        _register(model, hook, wire)
    hook.wire = wire
    hook._resynced, hook._sums, hook._met = -1, None, set()
    hook.watch = StepWatch(wire, parameters, before_step=hook.raise_error)
    wire.between_steps(hook.raise_error)
    if hook.momentum is not None:
        hook.momentum.attach(wire)
        wire.between_steps(hook.momentum.check_taken)
    hook.grad_scaler = options.grad_scaler
    hook.parity, hook.resync = options.checks.parity_every, options.checks.resync_every
    return wire


def connect(
    module: torch.nn.Module,
    parameters: Mapping[str, torch.Tensor],
    group: dist.ProcessGroup,
    options: Options,
    follower: Follower,
    check: Callable[[], None],
    *,
    bucket_bytes: float = math.inf,
) -> "tuple[Wire, Updates | None, Momentum | None, Preconditioned | None]":
    """Make the Wire over which ranks of ``group`` exchange gradients of ``module``, those of the ``parameters``; return
    it and what its optimizer asks for.

    Raises an exception for whatever is wrong with the arguments, or what ``check`` raises. ``follower`` waits for
    gradients that are sent as they are; ``bucket_bytes`` is that of `BucketEngine`.
    """
    exchanged = {name: p for name, p in parameters.items() if p.requires_grad}
    shapes = {name: p.shape for name, p in exchanged.items()}
    # These are new process groups: PyTorch uses its own from the main thread while these are busy in the worker.
    with agreed_transport(group, options.network.timeout, describe_options(options)) as host:
        with fail_together([host], "thinwire.compress()"):
            check()
            device = None if options.simulate else exchange_device(exchanged, group, options.as_device)
            plan, policy, momentum, preconditioned = _prepare(module, parameters, device, options)
            follows = Updates.check(plan, options.optimizer, parameters)
        engine = BucketEngine(
            plan,
            shapes,
            _transport(host, group, plan, options, device),
            options.settings(policy),
            simulated=options.simulate,
            measure=options.checks.measure_every,
            optimizer=options.optimizer,
            dtypes={name: p.dtype for name, p in exchanged.items()},
            bucket_bytes=bucket_bytes,
        )
        wire = Wire(engine)
    wire.moments = preconditioned
    engine.substitute = momentum or preconditioned
    if isinstance(engine.executor, ThreadExecutor):
        follower.share(engine.executor)
    engine.native = partial(follower.mean, group=group, detector=engine.detector)
    updates = Updates(wire, options.optimizer, parameters) if follows and options.optimizer is not None else None
    return wire, updates, momentum, preconditioned


def _prepare(
    module: torch.nn.Module, parameters: Mapping[str, torch.Tensor], device: torch.device | None, options: Options
) -> tuple[Plan, Policy | None, "Momentum | None", "Preconditioned | None"]:
    """Check the arguments for ``module``. Returns the plan, its policy, and what is sent in place of gradients."""
    rules, policy = resolve_rules(options)
    check_optimizer(options.optimizer, module)
    exchanged = {name: p for name, p in parameters.items() if p.requires_grad}
    shapes = {name: p.shape for name, p in exchanged.items()}
    plan = Plan.build(shapes, rules, options.filter(module))
    momentum, preconditioned, plan = of_optimizer(plan, parameters, options)
    _check_dtypes(exchanged, plan)
    check_feedback(plan.layers.values())
    if options.optimizer is not None:
        warn_about_pairing(plan, options.optimizer)
    if plan.all_raw and not all(isinstance(asked, Raw) for asked in plan.rules.values()):
        warn_caller(
            "nothing is compressed: every layer is excluded, too small, or such as the compressor cannot take. "
            "print(wire) says which and why; min_numel=0 takes small layers, too"
        )
    if options.network.aggregator is not None:
        _check_aggregator(plan, options.network.aggregator)
        if device is not None:
            raise ValueError("aggregator= adds integers that come from the host; between devices NCCL adds them")
    return plan, policy, momentum, preconditioned


def of_optimizer(
    plan: Plan, parameters: Mapping[str, torch.Tensor], options: Options
) -> tuple["Momentum | None", "Preconditioned | None", Plan]:
    """Return what an optimizer of thinwire sends in place of gradients, and the plan by which that is sent."""
    optimizer = options.optimizer
    if optimizer is None:
        return None, None, plan
    # These are imported here because most runs use none of them.
    from thinwire.integrations.momentum import Momentum
    from thinwire.integrations.preconditioned import Preconditioned
    from thinwire.optim import CompressedAdamW, QuantizedAdam

    if isinstance(optimizer, QuantizedAdam):
        return Momentum(optimizer, parameters), None, plan.with_feedback()
    if not isinstance(optimizer, CompressedAdamW):
        return None, None, plan
    return None, Preconditioned(optimizer, parameters), plan.with_feedback()


def resolve_rules(options: Options) -> tuple[Rules, Policy | None]:
    """Return the compression rules, and the policy that changes the plan while training, if there is one.

    Raises:
        TypeError, ValueError: an argument is invalid, or does not go with another; the message names it.
    """
    check_arguments(options)
    check_bool("simulate", options.simulate)
    compressor = DEFAULT_RULES if options.compressor is None else options.compressor
    chosen = automatic(compressor)
    if chosen is None:
        check_compressor("compressor", compressor)
    policy = make_policy(options.adapt)
    if chosen is not None or isinstance(policy, Auto):
        _check_auto(chosen, options)
        return DEFAULT_RULES, chosen
    assert not isinstance(compressor, Auto)
    return compressor, policy


def automatic(compressor: Rules | Auto | None) -> Auto | None:
    """Return the policy that is given in place of a compressor, if one is."""
    if isinstance(compressor, Auto):
        return compressor
    if isinstance(compressor, str) and compressor.strip().lower().startswith("auto"):
        policy = parse_policy(compressor)
        assert isinstance(policy, Auto)
        return policy
    return None


def _check_auto(auto: Auto | None, options: Options) -> None:
    from thinwire.optim import QuantizedAdam

    if auto is None:
        raise ValueError('auto takes the place of the compressor: thinwire.compress(model, "auto"), without adapt=')
    if options.adapt is not None:
        raise ValueError(f"auto decides by itself, and adapt={options.adapt!r} would, too: give one of them")
    if options.simulate:
        raise ValueError("auto goes by measured links, and simulate=True sends nothing: give a compressor instead")
    if isinstance(options.optimizer, QuantizedAdam):
        raise ValueError("with QuantizedAdam momenta are sent, all with error feedback: give a compressor, not auto")


def _register(model: DistributedDataParallel, hook: _Hook, wire: Wire) -> None:
    try:
        model.register_comm_hook(hook, _hook)
    except RuntimeError as error:
        wire.detach()
        raise RuntimeError(
            "this DDP model has a communication hook already (its own mixed precision registers one too): "
            "wrap the module in DistributedDataParallel again and call thinwire.compress() instead of that hook"
        ) from error
    model.register_forward_pre_hook(hook.before_forward)
    model.register_forward_hook(hook.after_forward, always_call=True)
    _attached[model] = hook


def _check_reducer(model: DistributedDataParallel) -> None:
    if optimizes_in_backward(model):
        raise RuntimeError(
            "optimizers that step in backward (_apply_optimizer_in_backward) take DDP's only communication hook: step "
            "the optimizer after backward, or train under fully_shard()"
        )


def _check_dtypes(parameters: Mapping[str, torch.Tensor], plan: Plan) -> None:
    for name, parameter in parameters.items():
        if not isinstance(plan[name], Raw) and parameter.dtype not in GRADIENT_DTYPES:
            raise TypeError(
                f"{name} is {parameter.dtype}, and {plan[name]} takes float32, bfloat16 or float16: "
                f"leave it raw with exclude=[{name!r}], or train it in one of these"
            )


def _check_aggregator(plan: Plan, address: str | AggregatorAddress) -> None:
    sums = [c for c in plan.layers.values() if isinstance(c, Summed)]
    if all(s.dtype.is_floating_point for c in sums for s in c.sums((1,), torch.float32)):
        raise ValueError(
            f"the aggregator at {address} adds integers, and no layer has a compressor that makes any: "
            "intsgd(bits=8) does"
        )


def _transport(
    host: ProcessGroupTransport, group: dist.ProcessGroup, plan: Plan, options: Options, device: torch.device | None
) -> Transport:
    """Return the transport of messages among the ranks of ``group``, with the aggregator's client if there is one."""
    network = options.network
    if options.simulate:  # which sends no messages
        network = replace(network, streams=1, transport="group", aggregator=None)
    transport = carried(host, group, network, device, sums=plan.sums and not options.simulate)
    if network.aggregator is not None and transport.world_size > 1:
        session = torch.tensor([session_number()], dtype=torch.int64, device="cpu")
        transport.broadcast(session)
        transport.aggregator = AggregatorClient(
            network.aggregator,
            rank=transport.rank,
            world_size=transport.world_size,
            session=int(session),
            timeout_s=host.timeout.total_seconds(),
        )
    return transport


def is_alone() -> bool:
    """Return whether this process is the only rank.

    Before ``init_process_group`` the variable ``WORLD_SIZE`` of launchers such as torchrun decides, so that a script
    that only forgot to call it does not train alone by mistake.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() == 1
    return int(os.environ.get("WORLD_SIZE") or 1) == 1


def attach_alone(module: torch.nn.Module, options: Options) -> Wire:
    """Return the `Wire` of a module that no other rank trains.

    Nothing is attached to ``module``. The Wire has the plan that the arguments ask for, which are checked as usual, and
    it loads and saves checkpoints of worlds of any size. It counts no steps, because nothing is sent in any.
    """
    parameters = {name: p for name, p in named_parameters(module).items() if p.requires_grad}
    shapes = {name: p.shape for name, p in parameters.items()}
    rules, _ = resolve_rules(options)
    check_optimizer(options.optimizer, module)
    # Several ranks that resume from this one's checkpoint take its plan and start with its moments.
    plan = Plan.build(shapes, rules, options.filter(module))
    _, preconditioned, plan = of_optimizer(plan, parameters, options)
    (transport,) = LoopbackTransport.world(1)
    settings = WireSettings(seed=options.seed, start=options.start)
    dtypes = {name: p.dtype for name, p in parameters.items()}
    wire = Wire(BucketEngine(plan, shapes, transport, settings, optimizer=options.optimizer, dtypes=dtypes))
    wire.moments = preconditioned
    return wire
