"""Fragments, parts of a model that are exchanged one after the other (Streaming DiLoCo, Douillard et al. 2025), and the
outer optimizer, which moves their shared weights by the mean pseudo-gradient of a round."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from thinwire.arguments import check_int, check_number, check_type, warn_caller
from thinwire.collectives import returned_zeros
from thinwire.compressors import Compressor, OnePass, Raw, Wrapper, ef, parse, unwrap
from thinwire.optim import CompressedAdamW
from thinwire.optim.shards import is_sharded, local
from thinwire.plan import Filter, Plan, named_parameters
from thinwire.plan.contraction import check_feedback
from thinwire.runtime import Wire

FEW_BITS = "gaussian(bits=2, bucket=256)"
"""Compressor of pseudo-gradients where none was chosen."""
_FEW_EXCHANGES = 20
_FEW_FOR_A_HIGH_GAIN = 100
_HIGH_GAIN = 2.0

_new: weakref.WeakSet[LocalUpdates] = weakref.WeakSet()
"""Local updates of which no optimizer has taken a step."""
_hook: RemovableHandle | None = None
"""The hook that they share."""


def _look(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    for updates in list(_new) if _new and not torch.compiler.is_compiling() else ():
        updates._check_start(optimizer)


@dataclass(frozen=True)
class Nesterov:
    """SGD with Nesterov momentum on the shared weights: ``u = μ·u + d;  A = A − η·(d + μ·u)``.

    ``d`` is the mean over workers of ``A − w``, so ``Nesterov(lr=1, momentum=0)`` averages weights (local SGD). In the
    long run a round moves the shared weights by `gain` times the mean progress of the workers. Gains of 1 to 1.5 suit
    tens to hundreds of rounds; DiLoCo's published 0.7 and 0.9 (a gain of 7) are meant for thousands.

    Args:
        lr: η, above 0.
        momentum: μ, at least 0 and below 1. Zero takes no memory.
        dtype: floating-point dtype in which u is kept; ``torch.bfloat16`` takes half the memory of fp32.

    Raises:
        ValueError: a value is outside its range, or ``dtype`` is not floating point.
    """

    lr: float = 0.7
    momentum: float = 0.5
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        check_number("lr", self.lr, above=0)
        check_number("momentum", self.momentum, low=0, below=1)
        check_type("dtype", self.dtype, torch.dtype, "a floating-point dtype, as torch.bfloat16")
        if not self.dtype.is_floating_point:
            raise ValueError(f"dtype must be floating point, as torch.bfloat16, not {self.dtype}")

    @property
    def gain(self) -> float:
        """Factor ``η / (1 − μ)`` by which repeated equal pseudo-gradients move the shared weights, a round."""
        return self.lr / (1 - self.momentum)

    def update(self, anchor: Tensor, momentum: Tensor, mean: Tensor) -> None:
        """Apply one round's mean pseudo-gradient to the shared weights, in place.

        Args:
            anchor: A, the shared weights (fp32).
            momentum: u, of the same shape, in ``dtype``; zeros before the first round.
            mean: d, of the same shape. Undefined afterwards.
        """
        anchor.sub_(mean, alpha=self.lr)
        if self.momentum:
            mean.add_(momentum, alpha=self.momentum)
            momentum.copy_(mean)
            anchor.sub_(mean, alpha=self.lr * self.momentum)


def chosen_outer(outer: Nesterov | None, every: int, total_steps: int | None) -> Nesterov:
    """Return the outer optimizer as given, or the default for an exchange ``every`` so many of ``total_steps``.

    A momentum needs exchanges to build up, and its value after the last one is lost: below 20 exchanges plain
    averages of the weights, ``Nesterov(lr=1, momentum=0)``, end at a lower loss. Warns where exchanges
    are too few for the optimizer, or for learning at all.

    Raises:
        TypeError: ``outer`` is another optimizer.
    """
    exchanges = None if total_steps is None else total_steps / every
    if outer is None:
        few = exchanges is not None and exchanges < _FEW_EXCHANGES
        outer = Nesterov(lr=1.0, momentum=0.0) if few else Nesterov()
    check_type("outer", outer, Nesterov, "a thinwire.local.Nesterov(lr=..., momentum=...)")
    if outer.gain > _HIGH_GAIN and (exchanges is None or exchanges < _FEW_FOR_A_HIGH_GAIN):
        warn_caller(
            f"outer={outer} has a gain lr / (1 - momentum) of {outer.gain:.1f}, which suits thousands of rounds; with "
            f"fewer than about {_FEW_FOR_A_HIGH_GAIN}, Nesterov(lr=0.7, momentum=0.5) ends at a lower loss"
        )
    if exchanges is not None and exchanges < 2:
        warn_caller(
            f"every={every} leaves {exchanges:.1f} exchanges in {total_steps} steps: workers hardly learn "
            "from each other; exchange more often"
        )
    return outer


def balanced_fragments(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Split layers into ``count`` fragments of nearly equal size.

    Layers are placed by decreasing size, each into the smallest fragment so far; layers of equal size therefore go to
    the fragments in turn, which is the strided pattern that the paper prefers (section 3.3). Within a fragment layers
    keep their order. The result depends on names and sizes alone, so all ranks return the same.

    Args:
        sizes: elements by layer name, in the order of the model.
        count: number of fragments.

    Returns:
        The names of each fragment. No fragment is empty.

    Raises:
        ValueError: there are fewer layers than fragments.
    """
    check_int("fragments", count, 1, len(sizes), "no fragment is empty")
    fragments: list[list[str]] = [[] for _ in range(count)]
    loads = [0] * count
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        smallest = min(range(count), key=lambda i: (loads[i], len(fragments[i]), i))
        fragments[smallest].append(name)
        loads[smallest] += sizes[name]
    order = {name: i for i, name in enumerate(sizes)}
    return [sorted(names, key=order.__getitem__) for names in fragments]


@dataclass
class Fragment:
    """A part of the model, and its outer state as flat tensors: fp32, but for the momentum."""

    parameters: Mapping[str, nn.Parameter]
    keeps: bool = False
    """Whether the weights at sending are needed when the mean is received."""
    device: torch.device | None = None
    """Device of the outer state; None for that of the parameters."""
    dtype: torch.dtype = torch.float32
    """Dtype of the momentum."""
    gathering: Sequence[Any] = ()
    """FSDP modules, which may hold gathered copies of the weights."""
    sent_at: int = 0
    """Inner step after which the fragment was sent last."""
    anchor: Tensor = field(init=False)
    momentum: Tensor = field(init=False)
    mean: Tensor | None = field(default=None, init=False)
    """Pseudo-gradient, and once it is received its mean over workers; None between two exchanges."""
    sent: Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        self.anchor = self.read()
        self.momentum = returned_zeros(self.anchor.numel(), self.dtype, self.anchor.device)
        self.sent = torch.zeros_like(self.anchor) if self.keeps else None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.parameters)

    @property
    def layers(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Name and shape of each parameter, in the order of the flat tensors."""
        return tuple((name, tuple(local_values(p).shape)) for name, p in self.parameters.items())

    def read(self) -> Tensor:
        """Return the worker's weights, flat, in fp32, on the device of the outer state."""
        flat = torch.cat([local_values(p).reshape(-1).float() for p in self.parameters.values()])
        return flat if self.device is None else flat.to(self.device)

    def apply(self, outer: Nesterov, mix: Literal["keep"] | float, step: int) -> bool:
        """Move the shared weights by the received mean, and continue from them; return whether the mean is finite."""
        assert self.mean is not None, "a mean was received"
        mean, self.mean = self.mean, None
        # Summing takes a tenth of the time of `isfinite`. Finite values may have an infinite sum, not the converse.
        finite = bool(torch.isfinite(mean.sum())) or bool(torch.isfinite(mean).all())
        if not finite:
            # All workers do the same, and the Wire leaves its residuals alone: the round changes nothing.
            warn_caller(
                f"an exchange at step {step} was dropped: a worker's weights are not finite. All workers "
                "go on from the shared weights; that worker's optimizer may hold NaN still"
            )
            self.write(self.anchor)
            return False
        outer.update(self.anchor, self.momentum, mean)
        self.take_shared(mix)
        return True

    @torch.no_grad()
    def write(self, weights: Tensor) -> None:
        """Set the worker's weights."""
        for module in self.gathering:
            module.reshard()
        for parameter, values in zip(self.parameters.values(), self._split(weights), strict=True):
            local_values(parameter).copy_(values.view(local_values(parameter).shape))

    def take_shared(self, mix: Literal["keep"] | float) -> None:
        """Continue from the shared weights, with what the worker has learned since it sent its own."""
        if mix == "keep":
            self.write(self.anchor if self.sent is None else self.anchor + (self.read() - self.sent))
        else:
            self.write(self.anchor.lerp(self.read(), float(mix)))

    def saved(self, *, with_mean: bool) -> dict[str, Tensor]:
        """Return views of the outer state, by parameter; the last exchange's only while it is under way."""
        kinds = {"anchor": self.anchor, "momentum": self.momentum}
        if with_mean:
            self.mean = torch.zeros_like(self.anchor) if self.mean is None else self.mean
            kinds |= {"mean": self.mean} | ({"sent": self.sent} if self.sent is not None else {})
        return {
            f"{kind}/{name}": values.view(local_values(self.parameters[name]).shape)
            for kind, flat in kinds.items()
            for name, values in zip(self.parameters, self._split(flat), strict=True)
        }

    def _split(self, flat: Tensor) -> tuple[Tensor, ...]:
        return flat.split([local_values(p).numel() for p in self.parameters.values()])


def finite_mean(values: Tensor, weight: float, all_reduce: Callable[[Tensor], object]) -> Tensor:
    """Return the mean over workers, each counted with its ``weight``, of those whose values are finite; where none is,
    this worker's own. What is the same on all workers stays as it is, to the bit."""
    finite = values.isfinite()
    sums = weight * torch.stack([torch.where(finite, values, 0).double(), finite.double()])
    all_reduce(sums)
    return torch.where(sums[1] > 0, sums[0] / sums[1], values.double()).to(values.dtype)


def local_values(parameter: Tensor) -> Tensor:
    """Return this rank's values of a parameter or buffer, without its gradient's history."""
    return local(parameter.detach())


def trained_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """Return the parameters of ``model`` that are exchanged: those that are trained, and of which this rank has values.

    Where the optimizer is a `CompressedAdamW`, it is marked as one whose updates no Wire sends.

    Raises:
        TypeError: a parameter is not floating point.
        ValueError: the optimizer lacks a parameter.
    """
    parameters = {name: p for name, p in named_parameters(model).items() if p.requires_grad and local_values(p).numel()}
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in parameters.items():
        if not parameter.is_floating_point():
            raise TypeError(f"{name} is {parameter.dtype}, and pseudo-gradients are floating point")
        if id(parameter) not in held:
            raise ValueError(f"the inner optimizer does not hold {name}: make it after the model is wrapped")
    if isinstance(optimizer, CompressedAdamW):
        optimizer.expect_no_wire()
    return parameters


def exchange_plan(
    shapes: Mapping[str, Sequence[int]], compressor: str | Compressor = FEW_BITS, *, feedback: bool = True
) -> Plan:
    """Return the compressor of each parameter's pseudo-gradient.

    Gradients leave biases, norms and small layers raw. Here a quantizer with error feedback takes those that it makes
    smaller, too: in a model of a hundred thousand weights they would be a fifth of what 2 bits send.
    """
    chosen = parse(compressor)
    if feedback and not isinstance(chosen, Raw | Wrapper):
        chosen = ef(chosen)
    rules: dict[str, str | Compressor] = {"*": chosen}
    if isinstance(chosen, Wrapper) and isinstance(unwrap(chosen), OnePass):
        small = [name for name, shape in shapes.items() if Filter().keeps_raw(name, shape)]
        rules |= {name: chosen for name in small if chosen.wire_bytes(shapes[name]) < Raw().wire_bytes(shapes[name])}
    return Plan.build(shapes, rules)


def exchange_algorithm(num_workers: int) -> str:
    """Return the collective algorithm of exchanges for which none was chosen.

    Two workers gather each other's messages: the bytes are those of other algorithms, and means are not coded again.
    """
    return "allgather" if num_workers == 2 else "sra"


class LocalUpdates:
    """Local updates of a model, which is exchanged in fragments."""

    wire: Wire
    overlap = 0
    _fragments: Sequence[Fragment]

    def __init__(
        self,
        model: nn.Module,
        inner_optimizer: torch.optim.Optimizer,
        compressor: str | Compressor,
        *,
        feedback: bool,
        every: int,
        outer: Nesterov | None,
        weighted: bool,
        total_steps: int | None,
    ) -> None:
        check_int("every", every, 1)
        self.every, self.weighted = every, weighted
        self.outer = chosen_outer(outer, every, total_steps)
        module = model.module if isinstance(model, DistributedDataParallel) else model
        self._module = module
        self._buffers = [b for b in module.buffers() if b.is_floating_point()]
        self._parameters = trained_parameters(module, inner_optimizer)
        self._shapes = {name: tuple(local_values(p).shape) for name, p in self._parameters.items()}
        self._plan = exchange_plan(self._shapes, compressor, feedback=feedback)
        check_feedback(self._plan.layers.values())
        self._told = False
        global _hook
        # It stays: none can be removed while a step goes through them.
        _hook = _hook or register_optimizer_step_pre_hook(_look)
        _new.add(self)

    def _gathering(self) -> list[Any]:
        """Return the FSDP modules of the model."""
        if not any(map(is_sharded, self._parameters.values())):
            return []
        from torch.distributed.fsdp import FSDPModule  # this takes a second, which only sharded models should pay

        return [module for module in self._module.modules() if isinstance(module, FSDPModule)]

    def _check_start(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise an exception, before the first step of all, if the model was changed after its weights were shared."""
        own = {id(p) for p in self._parameters.values()}
        if own.isdisjoint(id(p) for group in optimizer.param_groups for p in group["params"]):
            return
        _new.discard(self)
        if any(not torch.equal(f.read(), f.anchor) for f in self._fragments):
            raise RuntimeError(
                f"the model has other weights than those that {type(self).__name__} found and shares: load a model "
                f"first, and make {type(self).__name__} then; to resume, load its own state, too"
            )

    def _start(self) -> None:
        """Train from a state that was loaded, in which workers' weights are not the shared ones."""
        _new.discard(self)

    def _tell_of_frozen(self) -> None:
        """Warn once if other layers are trained by now than are exchanged."""
        held, named = self._parameters, named_parameters(self._module)
        late = [n for n, p in named.items() if p.requires_grad and n not in held and local_values(p).numel()]
        frozen = [n for n, p in held.items() if not p.requires_grad]
        if self._told or not (late or frozen):
            return
        self._told = True
        drift = f"{late[0]} is trained by now and not exchanged, so that workers drift apart" if late else ""
        what = drift or f"{frozen[0]} is frozen by now, and what was learned of it before still moves it"
        kind = type(self).__name__
        warn_caller(f"{what}: freeze and unfreeze layers before {kind} is made, or close it and make another")

    def __repr__(self) -> str:
        """Return the workers, steps between exchanges, compressors, bytes, and the fragments if there are several."""
        plan, size, fragments = self.wire.plan, self.wire.world_size, self._fragments
        raw = Plan(dict.fromkeys(plan.layers, Raw()))
        now, fp32 = (sum(sent_in_exchange(f, p, size) for f in fragments) for p in (plan, raw))
        who = "one worker, which sends nothing" if size == 1 else f"{size} workers"
        ratio = f", {fp32 / now:.1f} times less than fp32" if now else ""
        kind = type(self).__name__
        lines = [f"{kind} of {who}: exchange of the model every {self.every} steps, {now:,} bytes a round{ratio}"]
        specs = Counter("raw" if isinstance(c, Raw) else str(c) for c in plan.layers.values())
        for spec, count in specs.most_common():
            what = "compressor" if len(lines) == 1 else ""
            lines.append(f"  {what:10}  {spec}, {count} of {len(plan.layers)} layers")
        lines.append(f"  {'outer':10}  {self.outer}" + (", workers weighted by their tokens" if self.weighted else ""))
        several = len(fragments) > 1
        if several or self.overlap:
            used = f", used {self.overlap} steps after it is sent" if self.overlap else ""
            every = self.every // len(fragments)
            lines.append(f"  {'fragments':10}  {len(fragments)}, one every {every} steps{used}")
        for number, fragment in enumerate(fragments if several else ()):
            sent = sent_in_exchange(fragment, plan, size)
            numel = sum(math.prod(shape) for _, shape in fragment.layers)
            what = f"{len(fragment.layers)} layers, {numel:,} elements, {sent:,} bytes"
            lines.append(f"  {f'fragment {number}':10}  {what}")
        return "\n".join(lines)

    @contextmanager
    def shared_weights(self) -> Iterator[None]:
        """Put the shared weights into the model, to evaluate or save them, and this worker's own back on leaving."""
        own = [fragment.read() for fragment in self._fragments]
        try:
            for fragment in self._fragments:
                fragment.write(fragment.anchor)
            yield
        finally:
            for fragment, weights in zip(self._fragments, own, strict=True):
                fragment.write(weights)

    def _check_tokens(self, tokens: int | None) -> None:
        """Raise ``ValueError`` unless ``step(tokens=...)`` is given tokens where they count, and there alone."""
        if (tokens is None) == self.weighted:
            needed = "step(tokens=...) is needed" if self.weighted else "step() takes no tokens"
            raise ValueError(f"{needed} with weighted={self.weighted}")


def sent_in_exchange(fragment: Fragment, plan: Plan, num_workers: int) -> int:
    """Return the bytes that a worker sends in an exchange of a fragment, by formula."""
    payloads = sum(plan[name].wire_bytes(shape) for name, shape in fragment.layers)
    return math.ceil(payloads * 2 * (num_workers - 1) / num_workers)


def state_entry(state: Mapping[str, Tensor], name: str, shape: Sequence[int]) -> Tensor:
    value = state.get(name)
    if not isinstance(value, Tensor) or tuple(value.shape) != tuple(shape):
        problem = "is missing" if value is None else f"is {getattr(value, 'shape', value)}"
        raise ValueError(
            f"the state's {name!r} {problem}, where {tuple(shape)} is wanted: it is of another model, of another "
            "number of fragments, or another worker's state_dict(); gather_state_dict() suits any number of workers"
        )
    return value
