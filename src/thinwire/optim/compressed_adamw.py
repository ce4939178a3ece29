"""CompressedAdamW: AdamW whose gradients are preconditioned on each rank before they are compressed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.arguments import check_choice, check_number
from thinwire.kernels import AdamGradient, AdamStep, MovingAverage, adam_apply, adam_normalize
from thinwire.optim.shards import as_whole, is_sharded, local, over_shards, sharded_like

_LOOKS = 8
"""Number of steps in which updates are compared with those that arrived."""


@dataclass
class _NextMoments:
    """Local moments after the step under way: they count once the optimizer steps, so a skipped step leaves none."""

    moments: dict[str, Tensor]
    sent: bool = False
    length: Tensor | None = None
    """Norm of the mean update that arrived, if it was noted."""


class ParameterStep(NamedTuple):
    """A parameter, and a gradient that becomes its update or an update that it steps by. All tensors have one shape."""

    parameter: Tensor
    values: Tensor
    """Gradient, or mean update, of the whole layer or of this rank's shard of it."""
    group: Mapping[str, Any]


class CompressedAdamW(torch.optim.Optimizer):
    """AdamW for gradients that are sent in one or two bits, as low-rank factors or as a few values.

    Error feedback delivers what one step could not send in a later one. In front of Adam, late gradients are divided by
    a second moment that does not fit them. Here every rank normalizes its own gradient first, by a second moment of its
    own, and error feedback adds up what is missing *of the update*, the learning rate included:

        model = DistributedDataParallel(model)
        optimizer = thinwire.optim.CompressedAdamW(model.parameters(), lr=1e-3)
        wire = thinwire.compress(model, "gaussian(bits=2)", optimizer=optimizer)

    On each rank, with its own gradient g and second moment v, ``order="pre"`` sends x with error feedback. All ranks
    step with its mean d:

        v = β2·v + (1 − β2)·g²,   x = lr·g / (√(v / (1 − β2^t)) + eps)
        m = β1·m + (1 − β1)·d,   w = (1 − lr·weight_decay)·w − m / (1 − β1^t)

    The momentum follows the mean and smooths what compression adds. ``order="update"`` sends Adam's whole update,
    whose momentum is then each rank's own; sparse compressors need that, because a value that is sent once in a hundred
    steps would otherwise leave the momentum before the next one is received:

        m = β1·m + (1 − β1)·g,   x = lr·m̂ / (√v̂ + eps),   w = (1 − lr·weight_decay)·w − d

    Without `thinwire.compress`, or on one rank, the same steps are taken with the gradient at hand: Adam with the
    momentum behind the normalization (LaProp, Ziyin et al. 2020), or AdamW.

    After a compressed backward pass, ``grad`` is the mean update d (times a `GradScaler`'s scale). Its norm is not
    that of the gradient, so `torch.nn.utils.clip_grad_norm_` does not apply: give ``clip``. To accumulate gradients,
    use ``model.no_sync()``: a second backward pass without it would add a gradient to an update.

    Second moments (and with ``order="update"`` momenta) differ between ranks. They are part of the wire's state:
    ``wire.gather_state_dict()`` saves those of all ranks, and a world of another size starts with their mean.

    Under FSDP2 each rank normalizes its own gradients of whole layers, as under DDP, so that these moments take as much
    memory on every rank as the unsharded model; the momentum of ``order="pre"``, which all ranks share, is sharded.

    Args:
        params: parameters, or groups of them with options of their own.
        lr: learning rate, in AdamW's units; any scheduler may change it.
        betas: β1 of the momentum, β2 of the second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay.
        order: ``"pre"``, or ``"update"`` for sparse compressors.
        clip: the largest root mean square of a layer's update in units of lr (Adafactor, Shazeer and Stern 2018,
            section 6, uses 1.0); it shortens local updates before they are sent. None: no limit.

    Raises:
        ValueError: an argument is outside its range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        order: Literal["pre", "update"] = "pre",
        clip: float | None = None,
    ) -> None:
        self._next: dict[Tensor, _NextMoments] = {}
        self._groups: dict[Tensor, dict[str, Any]] = {}
        self._loaded: dict[Tensor, dict[str, Tensor]] = {}
        check_adam(lr, betas, eps, weight_decay)
        check_choice("order", order, ("pre", "update"))
        if clip is not None:
            check_number("clip", clip, above=0)
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        self._expects_wire = True
        self._looks = _LOOKS
        super().__init__(params, defaults | {"order": order, "clip": clip})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Replace groups and moments. Called by `load_state_dict`, copy and pickle."""
        super().__setstate__(state)
        self._next, self._groups = {}, {}
        self._loaded = getattr(self, "_loaded", {})
        self._expects_wire = getattr(self, "_expects_wire", True)
        self._looks = getattr(self, "_looks", _LOOKS)

    def expect_no_wire(self) -> None:
        """Do not warn that nothing compresses gradients: a Wire is attached, or ranks are to train alone."""
        self._expects_wire = False

    @torch.no_grad()
    def outgoing(self, gradients: Sequence[tuple[Tensor, Tensor]], scale: float) -> None:
        """Replace local gradients by the updates that this rank sends.

        ``gradients``: parameters, each with its gradient, of its shape and ``scale`` times its size, as the update is,
        too. That of a sharded parameter is that of the whole layer.
        """
        due = []
        for parameter, gradient in gradients:
            self._after_next_step(parameter, whole=True)
            own = _like(parameter, gradient)
            due.append(ParameterStep(parameter, own if scale == 1.0 else own.div_(scale), self._group(parameter)))
        self._make_updates(due)
        for (parameter, gradient), (_, own, _) in zip(gradients, due, strict=True):
            if scale != 1.0:
                own.mul_(scale)
            if own.dtype != gradient.dtype:
                gradient.copy_(own)
            self._next[parameter].sent = True

    @torch.no_grad()
    def note_arrived(self, updates: Iterable[tuple[Tensor, Tensor]], scale: float) -> None:
        """Note how long mean updates are, by parameter and ``scale`` times their size: no loop should change that."""
        for parameter, update in updates if self._looks else ():
            self._next[parameter].length = update.float().norm() / scale

    def forget_sent(self) -> None:
        """Take the next gradients for gradients, whatever was sent and never stepped with."""
        self._next.clear()

    def local_moments(self, parameter: Tensor) -> tuple[str, ...]:
        """Return the names of the moments that each rank has for itself."""
        return ("exp_avg_sq",) if self._group(parameter)["order"] == "pre" else ("exp_avg_sq", "exp_avg")

    def local_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the moments that this rank has for itself, of whole layers, flat, by name."""
        state = self._get_state(parameter, whole=True)
        return {name: state[name].detach().reshape(-1).clone() for name in self.local_moments(parameter)}

    def load_local_state(self, parameter: Tensor, moments: Mapping[str, Tensor]) -> None:
        """Continue with these moments, of whole layers, at the next step, before or after `load_state_dict`."""
        self._loaded[parameter] = dict(moments)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Perform one step with the present gradients; returns what ``closure``, which may compute them, returns."""
        if self._expects_wire and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._expects_wire = False
            kind = type(self).__name__
            warnings.warn(
                f"no Wire is attached to this {kind}, and it steps with whatever gradients it finds, uncompressed: "
                f"thinwire.compress(model, ..., optimizer=optimizer) has it compress what {kind} sends",
                stacklevel=4,  # PyTorch wraps it twice
            )
        loss = run_closure(closure)
        due = [
            ParameterStep(p, p.grad, group)
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        if any(gradient.is_sparse for _, gradient, _ in due):
            raise TypeError("CompressedAdamW takes dense gradients: make the embedding dense (sparse=False)")
        received = []
        for parameter, gradient, group in due:
            sent = parameter in self._next and self._next[parameter].sent
            self._after_next_step(parameter, whole=sent)
            update = _like(parameter, local(gradient))
            if sent:
                self._advance(parameter)
                received.append(ParameterStep(parameter, update, group))
                continue
            # One at a time: each takes as much memory as its parameter.
            own = ParameterStep(parameter, torch.empty_like(local(parameter)).copy_(update), group)
            self._make_updates([own])
            self._advance(parameter)
            self._take([own])
        if self._looks:
            self._check_lengths(received)
        self._take(received)
        for parameter, _, _ in received:
            self._next[parameter].sent = False
        self._groups = {}  # a loop may move parameters to other groups
        return loss

    def _check_lengths(self, received: Sequence[ParameterStep]) -> None:
        """Warn if a loop has shortened the updates that arrived."""
        lengths = [(u.float().norm(), was) for p, u, _ in received if (was := self._next[p].length) is not None]
        if not lengths:
            return
        self._looks -= 1
        now, arrived = (float(torch.stack(each).norm()) for each in zip(*lengths, strict=True))
        if now < arrived / 2:
            self._looks = 0
            warnings.warn(
                f"{type(self).__name__}'s updates were made {arrived / max(now, 1e-38):.3g} times smaller between "
                "backward() and step(), and so is each step: clip_grad_norm_() and a GradScaler take them for "
                "gradients. Give the optimizer clip= in place of the former, and thinwire.compress() grad_scaler= for "
                "the latter",
                stacklevel=5,  # PyTorch wraps a step twice
            )

    def _advance(self, parameter: Tensor) -> None:
        """Replace the moments by those that the present step leaves."""
        state, after = self.state[parameter], self._next[parameter].moments
        state["step"] += 1
        for name in after:
            state[name], after[name] = after[name], state[name]

    def _take(self, due: Sequence[ParameterStep]) -> None:
        """Change parameters by the mean of all ranks' updates, of this rank's shard of each, and apply weight decay."""
        steps = []
        for parameter, update, group in due:
            state, kept = self.state[parameter], 1 - group["lr"] * group["weight_decay"]
            if group["order"] == "pre":
                beta1, momentum = group["betas"][0], local(state["exp_avg"])
                mean, size = MovingAverage(momentum, momentum, beta1), 1 / (1 - beta1 ** state["step"])
            else:
                mean, size = None, 1.0
            steps.append(AdamStep(local(parameter), update, mean, kept, size))
        adam_apply(steps)

    def _make_updates(self, due: Sequence[ParameterStep]) -> None:
        """Replace this rank's gradients by its contributions to the mean. The moments that they leave count once the
        step is taken."""
        adam_normalize([self._unlimited(*one) for one in due])
        for parameter, update, group in due:
            if group["clip"] is None:
                continue
            total = update.square().sum()
            if update.numel() != parameter.numel():
                (total,) = over_shards(total.reshape(1), [parameter], dist.ReduceOp.SUM)
            rms = (total / parameter.numel()).sqrt_()
            update.mul_((group["clip"] / rms).clamp_(max=1.0).mul_(group["lr"]))

    def _unlimited(self, parameter: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> AdamGradient:
        """Return the conversion of a gradient to an update, in units of the learning rate if those are limited."""
        state, moments = self.state[parameter], self._next[parameter].moments
        (beta1, beta2), step = group["betas"], state["step"] + 1
        square = MovingAverage(local(state["exp_avg_sq"]), local(moments["exp_avg_sq"]), beta2)
        momentum = None
        # x / (√(v / c²) + eps) = c·x / (√v + c·eps): an operation less for each element.
        correction = math.sqrt(1 - beta2**step)
        eps = correction * group["eps"]
        if group["order"] == "update":
            momentum = MovingAverage(local(state["exp_avg"]), local(moments["exp_avg"]), beta1)
            correction /= 1 - beta1**step
        factor = correction * (group["lr"] if group["clip"] is None else 1.0)
        return AdamGradient(gradient, square, momentum, eps, factor)

    def _after_next_step(self, parameter: Tensor, *, whole: bool) -> _NextMoments:
        state = self._get_state(parameter, whole=whole)
        after = self._next.get(parameter)
        if after is None or (
            is_sharded(parameter) and any(is_sharded(m) != is_sharded(state[name]) for name, m in after.moments.items())
        ):
            after = _NextMoments({name: torch.empty_like(state[name]) for name in self.local_moments(parameter)})
            self._next[parameter] = after
        return after

    def _get_state(self, parameter: Tensor, *, whole: bool) -> dict[str, Any]:
        """Return the state of a parameter. Moments that each rank of a sharded one has for itself are of the whole
        layer if ``whole``, otherwise of this rank's shard; turning a shard's into the layer's is a collective call."""
        state = self.state[parameter]
        names = self.local_moments(parameter)
        if not state:
            state["step"] = 0
            for name in ("exp_avg_sq", "exp_avg"):
                state[name] = _zeros(parameter, whole=whole and name in names)
        for name, moment in self._loaded.pop(parameter, {}).items():
            state[name] = _zeros(parameter, whole=True).copy_(moment.view(parameter.shape))
        for name in names if is_sharded(parameter) else ():
            state[name] = as_whole(state[name]) if whole else sharded_like(state[name], parameter)
        return state

    def _group(self, parameter: Tensor) -> dict[str, Any]:
        if parameter not in self._groups:
            self._groups = {p: group for group in self.param_groups for p in group["params"]}
        return self._groups[parameter]


def _zeros(parameter: Tensor, *, whole: bool) -> Tensor:
    """Return zeros for each element of a parameter, with its memory layout; of a sharded one for the whole layer if
    ``whole``."""
    if whole and is_sharded(parameter):
        return torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    return torch.zeros_like(parameter, memory_format=torch.preserve_format)


def _like(parameter: Tensor, values: Tensor) -> Tensor:
    """Return values in the dtype of a parameter."""
    # An unneeded ``to`` takes microseconds, too: after a pass over memory no cache holds PyTorch's dispatcher.
    return values if values.dtype == parameter.dtype else values.to(parameter.dtype)


def run_closure(closure: Callable[[], Any] | None) -> Any:
    """Return what the closure of an optimizer's step returns, which may compute gradients; None without one."""
    with torch.enable_grad():
        return None if closure is None else closure()


def check_adam(lr: float | Tensor, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Raise an error unless the arguments that variants of Adam share are in their ranges."""
    check_number("lr", lr.item() if isinstance(lr, Tensor) else lr, low=0)
    if len(betas) != 2:
        raise ValueError(f"betas must be two numbers, not {betas}")
    for beta in betas:
        check_number("betas", beta, low=0, below=1)
    check_number("eps", eps, low=0)
    check_number("weight_decay", weight_decay, low=0)
