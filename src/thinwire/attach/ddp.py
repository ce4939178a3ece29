"""DistributedDataParallel: the gradients of each DDP bucket go over the wire while backward still runs."""

# No `from __future__ import annotations` here: DDP checks the annotations of a communication hook as objects.

import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from thinwire.attach.devices import device_of, on_device, trained
from thinwire.attach.momentum import Momentum, with_feedback
from thinwire.attach.transports import bare_transport
from thinwire.attach.updates import Updates
from thinwire.collectives import (
    AggregatorClient,
    ScatterReduceAllGather,
    Topology,
    Transport,
    TransportChoice,
    parse_address,
    session_number,
    with_shared_memory,
)
from thinwire.compat import group_timeout
from thinwire.compressors import GRADIENT_DTYPES, Raw, Summed, Wrapper, check_int
from thinwire.optim import QuantizedAdam
from thinwire.plan import Filter, Plan, Policy, Rules
from thinwire.wire import Follower, Later, Wire, agree, on_the_host
from thinwire.wire.route import BucketLayers

GradBucket = dist.GradBucket  # pyright: ignore[reportPrivateImportUsage] - documented, yet not exported
_BIG_BUCKET_BYTES = 4 << 20
_attached: "weakref.WeakKeyDictionary[DistributedDataParallel, _Hook]" = weakref.WeakKeyDictionary()


class _Hook:
    """The state of DDP's communication hook. Holds no reference to the DDP model, which holds one to it."""

    def __init__(self, model: DistributedDataParallel) -> None:
        group = model.process_group
        assert isinstance(group, dist.ProcessGroup), "DDP has a process group once it is built"
        self.group = group
        self.names: dict[torch.Tensor, str] = {p: name for name, p in model.module.named_parameters()}
        self.wire: Wire | None = None
        self.grad_scaler: torch.amp.GradScaler | None = None
        self.updates: Updates | None = None
        self.momentum: Momentum | None = None
        self.parity = 0
        self.resync = 0
        self._passes = 0
        self._resynced = -1
        self._loss_scale = 1.0
        self._told_scale = Later()
        self._follower = Follower("thinwire dense")

    def __call__(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        # Whatever is raised here would leave DDP's reducer unusable: it goes through the future instead.
        try:
            return self._start(bucket)
        except Exception as error:  # noqa: BLE001 - reaches the training loop through the future
            failed: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            failed.set_exception(error)  # pyright: ignore[reportArgumentType]
            return failed

    def _start(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        flat, wire = bucket.buffer(), self.wire
        if wire is None or not wire.attached:
            return self._follower.mean(flat, self.group)
        if bucket.index() == 0:
            wire.begin_step(self.updates.learning_rates() if self.updates else None)
            self._loss_scale = self._present_scale()
            self._check_overlap(bucket, flat, wire)
            if self.parity and wire.step % self.parity == 0:
                waits = self.momentum is not None and not self.momentum.travels
                wire.check_parity({name: p for p, name in self.names.items()}, now=waits)
        layers = tuple((self.names[p], tuple(p.shape)) for p in bucket.parameters())
        momentum = self.momentum if not wire.dense else None
        if momentum is not None and not momentum.travels:
            return wire.count_dense(flat.numel() * flat.element_size(), self._follower.mean(flat, self.group))
        if momentum is None or flat.is_sparse:
            return self._reduce(flat, layers, wire)
        scale = self._loss_scale
        momentum.make(flat, layers, scale)
        return self._reduce(flat, layers, wire).then(lambda future: momentum.undo(future.value(), layers, scale))

    def _reduce(self, flat: torch.Tensor, layers: BucketLayers, wire: Wire) -> torch.futures.Future[torch.Tensor]:
        if not flat.is_sparse:
            wire.observe(flat, layers, loss_scale=self._loss_scale)
        if wire.dense:
            return wire.count_dense(flat.numel() * flat.element_size(), self._follower.mean(flat, self.group))
        if flat.is_sparse:
            raise TypeError("sparse gradients (Embedding(sparse=True)) cannot be compressed: make the embedding dense")
        if not wire.simulated:
            return wire.reduce(flat, layers, loss_scale=self._loss_scale)
        wire.simulate(flat, layers, loss_scale=self._loss_scale)
        return self._follower.mean(flat, self.group).then(lambda future: _noted(future.value(), wire, layers))

    def _present_scale(self) -> float:
        """The loss scale of this backward pass."""
        told = self._told_scale.read()
        if told:
            return float(told[-1])
        return self.grad_scaler.get_scale() if self.grad_scaler else 1.0

    def before_forward(self, model: DistributedDataParallel, inputs: object) -> None:
        """Copy rank 0's parameters to all every ``resync`` steps: here nothing else reads or writes them."""
        wire = self.wire
        training = model.training and model.require_backward_grad_sync and torch.is_grad_enabled()
        if self.grad_scaler and wire and wire.device is not None and training:
            # Asked for later, in the middle of backward, it would make the host wait for what backward did so far.
            self._told_scale = Later()
            self._told_scale.note(self.grad_scaler.scale(torch.ones((), device=wire.device)))
        if not (self.resync and wire and wire.attached and training) or wire.step == self._resynced:
            return
        if wire.step >= 0 and (wire.step + 1) % self.resync == 0:
            self._resynced = wire.step
            wire.resync({name: p for p, name in self.names.items()})

    def _check_overlap(self, bucket: GradBucket, flat: torch.Tensor, wire: Wire) -> None:
        # DDP's first buckets are not its last: it rebuilds them after the first one or two backward passes.
        self._passes += 1
        if self._passes != 4 or wire.world_size == 1 or not bucket.is_last():
            return
        num_bytes = flat.numel() * flat.element_size()
        if num_bytes >= _BIG_BUCKET_BYTES:
            cap_mb = max(1, round(num_bytes / 5 / 2**20))
            warnings.warn(
                f"all gradients ({num_bytes / 2**20:.0f} MB) are in one DDP bucket, so communication does not overlap "
                f"with backward: pass bucket_cap_mb={cap_mb} to DistributedDataParallel",
                stacklevel=2,
            )


def _noted(mean: torch.Tensor, wire: Wire, layers: BucketLayers) -> torch.Tensor:
    wire.note_result(mean, layers)
    return mean


def _hook(state: _Hook, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state(bucket)


@dataclass(frozen=True)
class Options:
    """What `thinwire.compress` was asked for, beside the rules."""

    exclude: Sequence[str] = ()
    min_numel: int = 1024
    start: int = 0
    seed: int = 0
    decline: bool = True
    simulate: bool = False
    parity: int = 0
    resync: int = 0
    measure: int = 0
    topology: Topology = field(default_factory=ScatterReduceAllGather)
    transport: TransportChoice = "auto"
    aggregator: str | None = None
    adapt: Policy | None = None
    optimizer: torch.optim.Optimizer | None = None
    grad_scaler: torch.amp.GradScaler | None = None
    timeout: timedelta | None = None
    as_device: bool = False
    """Send gradients on the CPU the way that those on a GPU go: for tests."""


def compress_ddp(model: DistributedDataParallel, rules: Rules, options: Options) -> Wire:
    """See `thinwire.compress`."""
    with on_the_host():
        return _compress(model, rules, options)


def _compress(model: DistributedDataParallel, rules: Rules, options: Options) -> Wire:
    hook = _attached.get(model)
    if hook is not None and hook.wire is not None and hook.wire.attached:
        raise RuntimeError("this model is compressed already: call detach() on its Wire first, on every rank")
    for name in ("parity", "resync", "measure"):
        check_int(name, getattr(options, name), 0)
    hook = hook or _Hook(model)
    shapes = {name: p.shape for name, p in trained(model).items()}
    device = None if options.simulate else device_of(model, hook.group, options.as_device)
    plan = Plan.build(shapes, rules, Filter(min_numel=options.min_numel, exclude=tuple(options.exclude)))
    parameters = {name: p for p, name in hook.names.items()}
    momentum = None
    if isinstance(options.optimizer, QuantizedAdam):
        momentum, plan = Momentum(options.optimizer, parameters), with_feedback(plan)
    _check_dtypes(model, plan)
    _check_feedback(plan)
    if options.aggregator is not None:
        _check_aggregator(plan, options.aggregator)
        if device is not None:
            raise ValueError("aggregator= adds integers that come from the host; between devices NCCL adds them")
    follows = Updates.check(plan, options.optimizer, parameters)
    wire = Wire(
        plan,
        shapes,
        _transport(hook.group, options, device),
        seed=options.seed,
        start=options.start,
        decline=options.decline,
        simulated=options.simulate,
        measure=options.measure,
        optimizer=options.optimizer,
        topology=options.topology,
        adapt=options.adapt,
    )
    if model not in _attached:
        _register(model, hook, wire)
    hook.wire = wire
    hook.updates, hook.momentum = None, momentum
    if follows and options.optimizer is not None:
        hook.updates = Updates(wire, options.optimizer, parameters)
    hook.grad_scaler, hook.parity, hook.resync = options.grad_scaler, options.parity, options.resync
    return wire


def _register(model: DistributedDataParallel, hook: _Hook, wire: Wire) -> None:
    try:
        model.register_comm_hook(hook, _hook)
    except RuntimeError as error:
        wire.detach()
        raise RuntimeError(
            "this DDP model has a communication hook already (its own mixed precision registers one too): "
            "wrap the module in DistributedDataParallel anew and call thinwire.compress() instead of that hook"
        ) from error
    model.register_forward_pre_hook(hook.before_forward)
    _attached[model] = hook


def _check_dtypes(model: DistributedDataParallel, plan: Plan) -> None:
    for name, parameter in model.module.named_parameters():
        if name in plan.layers and not isinstance(plan[name], Raw) and parameter.dtype not in GRADIENT_DTYPES:
            raise TypeError(
                f"{name} is {parameter.dtype}, and {plan[name]} takes float32, bfloat16 or float16: "
                f"leave it raw with exclude=[{name!r}], or train it in one of these"
            )


def _check_feedback(plan: Plan) -> None:
    for compressor in set(plan.layers.values()):
        if isinstance(compressor, Wrapper) and not compressor.inner.contracts:
            warnings.warn(
                f"{compressor}: {compressor.inner} can err by more than its input, so that what error feedback owes "
                "grows from step to step and training diverges: give it more bits, or smaller buckets, or no ef()",
                stacklevel=5,
            )


def _check_aggregator(plan: Plan, address: str) -> None:
    parse_address(address)
    sums = [c for c in plan.layers.values() if isinstance(c, Summed)]
    if all(c.part_dtype(torch.float32).is_floating_point for c in sums):
        raise ValueError(
            f"aggregator={address!r} adds integers, and no layer has a compressor that makes any: intsgd(bits=8) does"
        )


def _transport(group: dist.ProcessGroup, options: Options, device: torch.device | None) -> Transport:
    """Process groups of our own: DDP uses its own group from the main thread while ours are busy in the worker."""
    timeout = options.timeout or group_timeout(group)
    transport = bare_transport(group, timeout)
    # What follows until the plan is agreed on depends on these: ranks that differ would wait for each other.
    told = {"simulate": str(options.simulate), "transport": options.transport, "topology": str(options.topology)}
    told["aggregator"] = str(options.aggregator)
    told["what travels"] = "momenta" if isinstance(options.optimizer, QuantizedAdam) else "gradients"
    told["gradients on"] = device.type if device else "the host"
    agree(told, transport)
    if device is not None:
        return on_device(transport, device, group, timeout, options.transport)
    # A simulation sends no messages.
    choice = "group" if options.simulate else options.transport
    transport = with_shared_memory(transport, timeout, choice)
    if options.aggregator is not None and not options.simulate and transport.world_size > 1:
        session = torch.tensor([session_number()])
        transport.broadcast(session)
        transport.aggregator = AggregatorClient(
            options.aggregator,
            rank=transport.rank,
            world_size=transport.world_size,
            session=int(session),
            timeout_s=timeout.total_seconds(),
        )
    return transport
