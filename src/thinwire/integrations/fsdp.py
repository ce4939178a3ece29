"""Attachment to FSDP2 that compresses weights and gradients of ``fully_shard`` modules by custom collectives."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.arguments import warn_caller
from thinwire.collectives import DeviceTransport, Transport
from thinwire.compat import (
    FSDPGroup,
    all_gather_single,
    at_end_of_backward,
    fsdp_groups,
    gathered_dtypes,
    inside_a_node,
    premul_factor,
    reduce_scatter_single,
    replace_replicas,
    unwrapped,
)
from thinwire.compressors import GRADIENT_DTYPES, Delta
from thinwire.integrations.ddp import automatic
from thinwire.integrations.optimizers import check_optimizer, warn_about_pairing
from thinwire.integrations.options import (
    CommonOptions,
    check_arguments,
    check_bool,
    check_compressor,
    describe_options,
    make_policy,
)
from thinwire.integrations.preconditioned import Preconditioned
from thinwire.integrations.replicas import Future, ReplicaGroup, attach_whole, check_buffer, wait_late
from thinwire.integrations.step_watch import StepWatch
from thinwire.integrations.transports import agreed_transport, bare_transport, carried, exchange_device
from thinwire.integrations.unused import Uses
from thinwire.optim import CompressedAdamW, QuantizedAdam
from thinwire.plan import Plan, Rules, Site, at_site, named_parameters, sharded_plan
from thinwire.plan.contraction import check_feedback
from thinwire.policies import Auto, Policy
from thinwire.runtime import ShardedLayer, Unit, Wire, Work
from thinwire.runtime.consistency import fail_together
from thinwire.runtime.placement import Placement
from thinwire.runtime.sharded_engine import ShardedEngine

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

DEFAULT_SHARDED_RULES = "minmax(bits=8, bucket=1024)"
"""W8G8 in buckets of 1024, which needs no tuning in the thesis (sections 5.6.1 and 5.7)."""
_AHEAD = 2
_attached: weakref.WeakKeyDictionary[nn.Module, Wire] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class ShardedOptions(CommonOptions):
    """The arguments of `thinwire.compress_fsdp`."""

    weights: Rules | None = None
    gradients: Rules | Auto | None = None
    across: Rules | None = None
    master: bool = True
    overlap: bool = True

    def rules(self, *, replicated: bool) -> dict[Site, Rules]:
        """Return the rules for weights, for gradients and, if ``replicated``, for means of gradients over replicas."""
        assert not isinstance(self.gradients, Auto), "it was checked"
        rules: dict[Site, Rules] = {
            "weights": DEFAULT_SHARDED_RULES if self.weights is None else self.weights,
            "gradients": DEFAULT_SHARDED_RULES if self.gradients is None else self.gradients,
        }
        if replicated:
            rules["across"] = rules["gradients"] if self.across is None else self.across
        return rules


class Attached:
    """The state that the collectives of one FSDP module share.

    The module owns this object and the Wire does not, so that dropping the model frees both.
    """

    def __init__(
        self,
        wire: Wire,
        unit: Unit,
        module: FSDPModule,
        group: FSDPGroup,
        options: ShardedOptions,
        preconditioned: Preconditioned | None,
        uses: Uses,
    ) -> None:
        self.wire = wire
        """Wire, which closes its connections when nothing refers to it any more."""
        self.engine: ShardedEngine = wire.engine
        self.unit, self.group, self.preconditioned = unit, group, preconditioned
        self.scaler, self.overlap = options.grad_scaler, options.overlap
        self.reduction: Future[Tensor] | None = None
        """The reduction among shards that is under way and is followed by a mean over replicas."""
        self.names = tuple(layer.name for layer in unit.layers)
        self.uses, self.use = uses, uses.add(module, self.names, group, wire, self.follow_pass)
        self.padded = {
            layer.name: parameter.padded_numel for layer, parameter in zip(unit.layers, group.parameters, strict=True)
        }
        self.pads = any(layer.padded_numel * layer.num_ranks > _numel(layer.shape) for layer in unit.layers)
        self.size = group.process_group.size()
        self._checked: set[Hashable] = set()
        """Buffers that `check` has met."""
        self.on_device = isinstance(unit.transport, DeviceTransport)

    @property
    def trained(self) -> tuple[str, ...]:
        """The layers that get gradients at present."""
        pairs = zip(self.names, self.group.parameters, strict=True)
        return tuple(name for name, parameter in pairs if parameter.now().requires_grad)

    def follow_pass(self) -> None:
        """Tell the engine when the outermost backward pass that runs ends, or that none runs."""
        # After what FSDP2 has queued, also for other roots, which reduces modules whose inputs need no gradient.
        if not at_end_of_backward(lambda: at_end_of_backward(self._end_pass)):
            self.engine.end_pass()

    def _end_pass(self) -> None:
        # A pass within another one, such as that of a reentrant checkpoint, is a part of it.
        if inside_a_node() or self.engine.begins_step or not self.engine.attached:
            return
        self.engine.end_pass()
        # The updates of `CompressedAdamW` go on for parameters without gradients.
        if self.preconditioned is None:
            self.engine.drop(self.uses.end_pass())

    def begin_reduction(self, trained: Sequence[str]) -> None:
        """Note the layers that are about to be reduced, and follow the pass to its end."""
        self.use.reduce(trained)
        # A pipeline has gradients reduced after its backward passes, all in one step.
        followed = at_end_of_backward(lambda: at_end_of_backward(self._end_pass))
        if not followed and self.unit.last_step == self.engine.step:
            self.engine.end_pass()

    def shards(self) -> dict[str, Tensor]:
        """Return this rank's shards of the weights."""
        with torch.no_grad():
            return {n: _local(p.now()) for n, p in zip(self.names, self.group.parameters, strict=True)}

    def loss_scale(self) -> float:
        """Return the factor by which reduced values are larger than the gradients; 1 where it does not matter."""
        if self.scaler is None or not (self.engine.needs_loss_scale or self.preconditioned is not None):
            return 1.0  # asking for it stops a GPU
        return self.scaler.get_scale()

    def precondition(self, flat: Tensor, trained: Sequence[str], op: Any, loss_scale: float) -> None:
        """Replace the gradients of ``trained`` by what the optimizer sends, before they are reduced.

        Raises:
            NotImplementedError: FSDP would not reduce them to their mean.
            RuntimeError: the module has already sent updates in this step, to which these would be added.
        """
        if self.preconditioned is None:
            return
        if op != dist.ReduceOp.AVG:
            raise NotImplementedError(
                "CompressedAdamW sends updates, whose mean ranks step with: reduce gradients in float32 or bfloat16, "
                "and leave out set_gradient_divide_factor()"
            )
        if self.unit.last_step == self.engine.step and not self.engine.begins_step:
            raise RuntimeError(
                f"{self.unit.name or 'the root module'} is reduced twice in one backward pass, and CompressedAdamW "
                "cannot add gradients to the update that was sent: call fully_shard() on a module that is used once"
            )
        layers = {layer.name: layer for layer in self.unit.layers}
        placement = Placement([layers[name] for name in trained], self.size)
        self.preconditioned.make_sharded(flat, placement, loss_scale)

    def release_moments(self) -> None:
        """Leave gradients to the optimizer, at the module's next reduction after the wire was detached."""
        if self.preconditioned is not None:
            groups = [self.group.process_group, self.group.replicate_group]
            self.preconditioned.release([group for group in groups if group is not None], self.names)
            self.preconditioned = None

    def mean_over_replicas(self, part: Tensor) -> Future[Tensor]:
        """Start replacing this rank's part of the gradients, reduced among shards, by its mean over replicas."""
        after, self.reduction = self.reduction, None
        loss_scale = self.loss_scale()
        return self.engine.reduce_across(self.unit, part, self.trained, loss_scale=loss_scale, after=after)

    def keep(self, part: Tensor) -> None:
        """Overwrite this rank's shards with the values that other ranks decode (``master=False``)."""
        at = 0
        for name, shard in self.shards().items():
            shard.copy_(part[at : at + shard.numel()].view(shard.shape))
            at += self.padded[name]

    def check(self, doing: str, x: Tensor, names: tuple[str, ...], *hint: str) -> None:
        """Raise an exception unless a buffer has the expected dtype and layout."""
        met = doing, x.dtype, x.numel(), names
        if met not in self._checked:
            check_buffer(self.unit.name, doing, x.dtype, x.numel(), {name: self.padded[name] for name in names}, *hint)
            self._checked.add(met)


class _Comm:
    """The allocation of memory, which both collectives have in common."""

    def __init__(self, attached: Attached) -> None:
        self.attached = attached

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        # Padding that no shard fills is never written.
        make = torch.zeros if self.attached.pads else torch.empty
        return make(*size, dtype=dtype, device=device)


class QuantizedAllGather(_Comm):
    """An all-gather of compressed weights, for ``FSDPModule.set_custom_all_gather``."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        at = self.attached
        if not at.engine.attached or group.size() != at.size:
            if at.engine.attached:
                # Weights that arrived in forward have since been sharded in a smaller group (ZeRO++'s secondary shard).
                at.engine.stats.local_gathers += 1
            all_gather_single(output_tensor, input_tensor, group)
            return None
        at.follow_pass()
        at.use.watch(late=True)
        hint = "Call thinwire.compress() again after parameters were added, replaced or sharded again"
        at.check("gathers", input_tensor, at.names, hint)
        mine = output_tensor.view(at.size, -1)[at.unit.transport.rank]
        if mine.data_ptr() != input_tensor.data_ptr():
            mine.copy_(input_tensor)
        future = at.engine.gather(at.unit, output_tensor.view(-1), keep=at.keep)
        if at.on_device:
            # The gather is enqueued on the stream that FSDP2 gave it; an error in doing so is raised here.
            future.wait()
            return None
        return Work([future], output_tensor)


class QuantizedReduceScatter(_Comm):
    """A reduce-scatter of compressed gradients, for ``FSDPModule.set_custom_reduce_scatter``."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        at = self.attached
        if not at.engine.attached:
            at.release_moments()
            reduce_scatter_single(output_tensor, input_tensor, group, op)
            return None
        trained = at.trained
        at.check("reduces", output_tensor, trained)
        loss_scale = at.loss_scale()
        at.precondition(input_tensor.view(-1), trained, op, loss_scale)
        at.begin_reduction(trained)
        future = at.engine.reduce(
            at.unit,
            input_tensor.view(-1),
            output_tensor.view(-1),
            trained,
            scale=_scale(op, at.size),
            loss_scale=loss_scale,
            weights=at.shards,
        )
        # FSDP2 reads a sum at once, to divide it.
        if not at.overlap or op == dist.ReduceOp.SUM or at.on_device:
            future.wait()
        elif wait_late(future, at.group, output_tensor.dtype):
            at.engine.stats.overlapped += 1
            at.reduction = future if at.group.replicate_group is not None else None
        return None


def attach_fsdp(model: nn.Module, options: ShardedOptions) -> Wire:
    """Attach compression to an FSDP2 model; see `thinwire.compress_fsdp`."""
    former = _attached.get(model)
    if former is not None and former.attached:
        raise RuntimeError("this model is compressed already: call detach() on its Wire first, on every rank")
    for _, module in _modules(model):
        module.reshard()  # an earlier evaluation may have left it gathered
    every = _sharded(model)
    sharded = [entry for entry in every if not _unfit(entry[1])]
    if not sharded:
        why = _unfit(every[0][1]) if every else "none holds parameters that are sharded"
        raise TypeError(f"no module can be compressed: {why}")
    if whole := [entry for entry in sharded if entry[1].whole]:
        _check_whole(sharded, options)
        _attached[model] = wire = attach_whole(model, whole, options)
        return wire
    groups = {_ranks(group): group.process_group for _, group, _ in sharded}
    replicate_group = _replicate_group(sharded)
    # The Wire closes its transports; if anything fails before there is one, they are closed here.
    with ExitStack() as without_wire:
        network, record = options.network, describe_options(options)
        everyone = [*groups.values(), *([replicate_group] if replicate_group is not None else [])]
        hosts = [without_wire.enter_context(agreed_transport(g, network.timeout, record)) for g in everyone]
        with fail_together(hosts, "thinwire.compress()"):
            policy = _policy(options)
            if any(group.offloads for _, group, _ in sharded):
                raise NotImplementedError(
                    "CPUOffloadPolicy keeps shards on the host, and messages are made on the GPU: leave it out of "
                    "fully_shard()"
                )
            device = exchange_device(named_parameters(model), everyone[0], options.as_device, instead="")
        carriers = [carried(host, group, network, device) for host, group in zip(hosts, everyone, strict=True)]
        replicas = carriers.pop() if replicate_group is not None else None
        transports = dict(zip(groups, carriers, strict=True))
        with fail_together(hosts, "thinwire.compress()"):
            _check_shards([len(ranks) for ranks in groups], options, replicated=replicas is not None)
            left_out = [group for _, group, _ in every if _unfit(group)]
            plan, units, preconditioned = _prepare(model, sharded, left_out, transports, options)
        engine = ShardedEngine(
            plan,
            units,
            options.settings(policy),
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            make_world=lambda: bare_transport(dist.group.WORLD, network.timeout),  # pyright: ignore[reportArgumentType]
            master=options.master,
            replicas=replicas,
        )
        wire = Wire(engine)
        without_wire.pop_all()
    uses = Uses(engine.on_any_rank)
    for (module, group, _), unit in zip(sharded, units, strict=True):
        attached = Attached(wire, unit, module, group, options, preconditioned, uses)
        module.set_custom_all_gather(QuantizedAllGather(attached))  # pyright: ignore[reportArgumentType] - called, not checked
        module.set_custom_reduce_scatter(QuantizedReduceScatter(attached))  # pyright: ignore[reportArgumentType]
        if group.replicate_group is not None:
            means = ReplicaGroup(group, attached.mean_over_replicas, overlap=options.overlap and device is None)
            wire.at_detach(replace_replicas(group, means))
    _attached[model] = wire
    StepWatch(wire, named_parameters(model))
    wire.moments = preconditioned
    _warn_about_memory(wire, preconditioned)
    if isinstance(options.optimizer, QuantizedAdam):
        optimizer = options.optimizer
        wire.engine.keep_gradients_raw(until=lambda: optimizer.frozen)
    return wire


def _prepare(
    model: nn.Module,
    sharded: Sequence[tuple[FSDPModule, FSDPGroup, str]],
    left_out: Sequence[FSDPGroup],
    transports: Mapping[tuple[int, ...], Transport],
    options: ShardedOptions,
) -> tuple[Plan, list[Unit], Preconditioned | None]:
    """Check the arguments for this model. PyTorch goes on to send the groups ``left_out`` itself."""
    check_optimizer(options.optimizer, model)
    names = {id(parameter): name for name, parameter in named_parameters(model).items()}
    units = [_unit(path, group, transports[_ranks(group)], names, _ranks(group)[0]) for _, group, path in sharded]
    shapes = {layer.name: layer.shape for unit in units for layer in unit.layers}
    unfit = {names[id(p.now())]: (p.shape, _unfit(group)) for group in left_out for p in group.parameters}
    if unfit and isinstance(options.optimizer, CompressedAdamW | QuantizedAdam):
        name, (_, why) = next(iter(unfit.items()))
        raise ValueError(f"{type(options.optimizer).__name__} needs what is sent of every layer, and of {name} {why}")
    keep = replace(options.filter(model), unfit={name: why for name, (_, why) in unfit.items()})
    rules = options.rules(replicated=sharded[0][1].replicate_group is not None)
    plan = sharded_plan(shapes | {name: shape for name, (shape, _) in unfit.items()}, rules, keep)
    sent = {at_site(site, name) for site in rules for name in shapes}
    plan = replace(plan, layers={name: compressor for name, compressor in plan.layers.items() if name in sent})
    # Only the first stage of a schedule would ever be used.
    if plan.at_step(0, None) is not plan:
        raise ValueError("schedules are for DistributedDataParallel models: give density, rank or theta a number")
    _check_changes(plan, [g for _, g, _ in sharded], units, [path for path, _ in _modules(model)], options)
    if isinstance(options.optimizer, QuantizedAdam):
        # Its momentum is linear in the gradients, so their error feedback is that of the momentum.
        plan = plan.with_feedback("gradients/")
    preconditioned = None
    if isinstance(options.optimizer, CompressedAdamW):
        # The model's parameters as the optimizer has them, by the names of the units' layers.
        named = {name: p for name, p in named_parameters(model).items() if name in shapes}
        preconditioned, plan = Preconditioned(options.optimizer, named), plan.with_feedback("gradients/")
    check_feedback(plan.layers.values())
    warn_about_pairing(plan, options.optimizer)
    return plan, units, preconditioned


def _sharded(model: nn.Module) -> list[tuple[FSDPModule, FSDPGroup, str]]:
    """Return the groups of parameters that FSDP communicates together, each with its module and the module's path."""
    sharded: dict[int, tuple[FSDPModule, FSDPGroup, str]] = {}
    for path, module in _modules(model):
        for group in _checked(path, module):
            sharded.setdefault(id(group.identity), (module, group, path))
    return list(sharded.values())


def _unfit(group: FSDPGroup) -> str:
    """Return why nothing that a group gathers and reduces can be compressed; empty if it can."""
    dtypes = gathered_dtypes(group)
    if not dtypes.isdisjoint(GRADIENT_DTYPES):
        return ""
    return f"its dtype is {', '.join(map(str, dtypes))}, and compressors take float32, bfloat16 and float16"


def first_group(model: nn.Module) -> dist.ProcessGroup | None:
    """Return the process group that `attach_fsdp` meets first; None if no module has parameters of its own."""
    groups = (group for _, module in _modules(model) for group in fsdp_groups(module) if group.parameters)
    return next((group.replicate_group if group.whole else group.process_group for group in groups), None)


def _ranks(group: FSDPGroup) -> tuple[int, ...]:
    """Return the ranks, in the default process group, among which parameters are sharded."""
    return tuple(dist.get_process_group_ranks(group.process_group))


def _warn_about_memory(wire: Wire, preconditioned: Preconditioned | None) -> None:
    state_bytes = wire.memory + (preconditioned.num_bytes if preconditioned is not None else 0)
    if state_bytes >= 1 << 20:
        warn_caller(
            f"the compressors' state takes {state_bytes / 2**20:,.0f} MiB on each rank: error feedback keeps a "
            "residual of the whole model, not of its shard, on every rank, CompressedAdamW keeps second moments of it, "
            'and weights="delta(...)" all weights; leave them out where memory is short'
        )


def _policy(options: ShardedOptions) -> Policy | None:
    """Check the arguments that no plan depends on, and return the policy, if there is one."""
    check_arguments(options)
    for name in ("master", "overlap"):
        check_bool(name, getattr(options, name))
    if options.network.aggregator is not None:
        raise ValueError("Network(aggregator=...) is for DistributedDataParallel: leave it out for a sharded model")
    if options.adapt is not None and isinstance(options.optimizer, QuantizedAdam):
        raise ValueError(
            "with QuantizedAdam gradients are raw in the warm-up and have error feedback then: leave out adapt="
        )
    policy = make_policy(options.adapt)
    if isinstance(policy, Auto) or automatic(options.gradients):
        raise ValueError("auto is for DistributedDataParallel models: give weights= and gradients= instead")
    for name in ("weights", "gradients", "across"):
        check_compressor(name, getattr(options, name))
    return policy


def _check_changes(
    plan: Plan, groups: Sequence[FSDPGroup], units: Sequence[Unit], paths: Sequence[str], options: ShardedOptions
) -> None:
    """Raise an exception if changes of weights (``weights="delta(...)"``) are asked for where they cannot be sent.

    ``paths`` are those of all FSDP modules, because one without parameters of its own may be a root, too.
    """
    changing = [any(isinstance(plan[at_site("weights", layer.name)], Delta) for layer in u.layers) for u in units]
    if not any(changing):
        return
    if not options.master:
        raise ValueError('weights="delta(...)" sends changes to full-precision shards: leave out master=False')
    if options.adapt is not None:
        raise ValueError('adapt= weighs what is lost of weights, and weights="delta(...)" sends changes: leave it out')
    for group, unit, here in zip(groups, units, changing, strict=True):
        is_root = not any(not other or unit.name.startswith(f"{other}.") for other in paths if other != unit.name)
        if here and group.frees and not (is_root and group.frees_by_default):
            raise ValueError(
                f"{unit.name or 'the root module'} frees its weights after forward, and delta(...) keeps a copy of all "
                'weights on every rank: fully_shard(..., reshard_after_forward=False), or weights="minmax(bits=4)"'
            )


def _modules(model: nn.Module) -> list[tuple[str, FSDPModule]]:
    from torch.distributed.fsdp import FSDPModule  # this takes a second, which only sharded models should pay

    modules = [(unwrapped(path), module) for path, module in model.named_modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise TypeError(f"no module of this {type(model).__name__} is sharded: call fully_shard() on it first")
    return modules


def _checked(path: str, module: FSDPModule) -> list[FSDPGroup]:
    """Return the module's parameter groups, and raise an exception if their communication cannot be compressed."""
    where = path or "the root module"
    groups = [group for group in fsdp_groups(module) if group.parameters]
    if len(groups) > 1:
        raise ValueError(
            f"the parameters of {where} are sharded over several meshes (shard_placement_fn): PyTorch takes custom "
            "collectives only for one; call fully_shard() on the parts of each mesh by themselves"
        )
    for group in groups:
        if group.other_comm and group.other_comm not in (QuantizedAllGather.__name__, QuantizedReduceScatter.__name__):
            raise RuntimeError(
                f"the bytes of {where} are moved by {group.other_comm}: thinwire's cannot be beside it. Leave out "
                "set_symm_mem_for_comm(), set_allocate_memory_from_process_group_for_comm() and other custom comms"
            )
    return groups


def _replicate_group(sharded: Sequence[tuple[FSDPModule, FSDPGroup, str]]) -> dist.ProcessGroup | None:
    """Return the process group over whose ranks shards are replicated; None if they are not.

    Raises:
        ValueError: modules have different ones.
    """
    first, *others = (group.replicate_group for _, group, _ in sharded)
    for (_, _, path), other in zip(sharded[1:], others, strict=True):
        if (first is None) != (other is None) or (
            first is not None and dist.get_process_group_ranks(first) != dist.get_process_group_ranks(other)
        ):
            raise ValueError(
                f"{path or 'the root module'} has other replicas than {sharded[0][2] or 'the root module'}: call "
                "fully_shard() on all modules with one mesh"
            )
    return first


def _check_whole(sharded: Sequence[tuple[FSDPModule, FSDPGroup, str]], options: ShardedOptions) -> None:
    """Raise ``ValueError`` unless all modules are whole on every rank, and for arguments that need shards."""
    for _, group, path in sharded:
        if not group.whole:
            raise ValueError(
                f"{path or 'the root module'} is sharded and others are whole on every rank (replicate(), or a mesh "
                "whose shards have one rank): call fully_shard() on all modules with one mesh"
            )
    _replicate_group(sharded)
    for name, default in (("weights", None), ("across", None), ("master", True)):
        if getattr(options, name) != default:
            raise ValueError(
                f"{name}= is for shards, and every rank has the whole of each module: all that is sent are means of "
                "gradients, which gradients= compresses"
            )


def _check_shards(sizes: Collection[int], options: ShardedOptions, *, replicated: bool) -> None:
    """Raise ``ValueError``, or warn, if no module sends what the arguments compress."""
    if options.across is not None and not replicated:
        raise ValueError(
            "across= compresses means over replicas, and the model has none: call fully_shard() with a mesh of two "
            "dimensions, (replicas, shards)"
        )
    if max(sizes) == 1 and dist.get_world_size() > 1:
        warn_caller(
            "every module is sharded over one rank, so nothing is sent, and there is nothing to compress: "
            "for replicas of a model call fully_shard() with a mesh of two dimensions, (replicas, 1)"
        )


def _unit(path: str, group: FSDPGroup, transport: Transport, names: Mapping[int, str], first_rank: int) -> Unit:
    layers = []
    for parameter in group.parameters:
        now = parameter.now()
        name = names.get(id(now))
        if name is None:
            raise RuntimeError(
                f"{path or 'the root module'} holds a parameter that the model does not list: call thinwire.compress() "
                "while parameters are sharded (before the first forward pass, or after reshard())"
            )
        layer = ShardedLayer(name, parameter.shape, transport.world_size, parameter.dim)
        local = tuple(_local(now).shape)
        if layer.padded_numel != parameter.padded_numel or layer.chunk_shape(transport.rank) != local:
            raise RuntimeError(
                f"{name} of shape {parameter.shape} has shards of shape {local}, with room for "
                f"{parameter.padded_numel} elements, where {layer.chunk_shape(transport.rank)} and "
                f"{layer.padded_numel} were expected: this PyTorch lays out buffers in a way that thinwire does not "
                "know"
            )
        layers.append(layer)
    trained = tuple(layer.name for layer, p in zip(layers, group.parameters, strict=True) if p.now().requires_grad)
    return Unit(path, tuple(layers), transport, trained, first_rank=first_rank)


def _local(parameter: nn.Parameter) -> Tensor:
    """Return this rank's shard of a parameter that is a DTensor."""
    with torch.no_grad():
        return parameter.to_local()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]


def _scale(op: Any, size: int) -> float:
    """Return the factor of the sum by which ``size`` ranks reduce."""
    if op == dist.ReduceOp.AVG:
        return 1.0 / size
    if op == dist.ReduceOp.SUM:
        return 1.0
    factor = premul_factor(op) if op == dist.ReduceOp.PREMUL_SUM else None
    if factor is None:
        raise ValueError(f"gradients are reduced by {op}: thinwire adds up, and multiplies by one factor")
    return factor


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def prefetch(model: nn.Module) -> None:
    """Let every FSDP module of ``model`` gather the weights of the next two while it computes.

    On the CPU, FSDP2 gathers ahead in forward only if configured. The order is that in which modules are registered,
    and the reverse in backward, which most models execute; in a model that has another order, this costs memory and
    changes no result. With one module ahead, the link is idle from the end of one gather until the next module has
    begun; with two it is not, and the weights of one more are in memory. Only FSDP2's own
    ``set_modules_to_forward_prefetch`` and ``set_modules_to_backward_prefetch`` are used.

    Raises:
        TypeError: no module is sharded.
    """
    root, *modules = (module for _, module in _modules(model))
    for i, module in enumerate([root, *modules]):
        module.set_modules_to_forward_prefetch(modules[i : i + _AHEAD])
    # The root gathers first and reduces last, and its weights stay unless configured otherwise.
    for i, module in enumerate(modules):
        module.set_modules_to_backward_prefetch(modules[max(0, i - _AHEAD) : i][::-1])
