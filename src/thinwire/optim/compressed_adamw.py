"""CompressedAdamW: AdamW whose gradients are preconditioned on each rank before they are compressed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass
class _Next:
    """Local moments after the step under way: they count once the optimizer steps, so a skipped step leaves none."""

    moments: dict[str, Tensor]
    sent: bool = False


class CompressedAdamW(torch.optim.Optimizer):
    """AdamW for gradients that are sent in one or two bits, as low-rank factors or as a few values.

    Error feedback delivers what one step could not send in a later one. In front of Adam, late gradients are divided by
    a second moment that does not fit them. Here every rank normalises its own gradient first, by a second moment of its
    own, and error feedback adds up what is missing *of the update*, the learning rate included:

        model = DistributedDataParallel(model)
        optimizer = thinwire.optim.CompressedAdamW(model.parameters(), lr=1e-3)
        wire = thinwire.compress(model, "gaussian(bits=2)", optimizer=optimizer)

    On each rank, with its own gradient g and second moment v, ``order="pre"`` sends x with error feedback. All ranks
    step with its mean d:

        v = β2·v + (1 − β2)·g²,   x = lr·g / (√(v / (1 − β2^t)) + eps)
        m = β1·m + (1 − β1)·d,   w = (1 − lr·weight_decay)·w − m / (1 − β1^t)

    The momentum comes after the mean and smooths what compression adds. ``order="update"`` sends Adam's whole update,
    whose momentum is then each rank's own; sparse compressors need that, because a value that is sent once in a hundred
    steps would otherwise leave the momentum before the next one arrives:

        m = β1·m + (1 − β1)·g,   x = lr·m̂ / (√v̂ + eps),   w = (1 − lr·weight_decay)·w − d

    Without `thinwire.compress`, or on one rank, the same steps are taken with the gradient at hand: Adam with the
    momentum behind the normalisation (LaProp, Ziyin et al. 2020), or AdamW.

    After a compressed backward pass, ``grad`` holds the mean update d (times a `GradScaler`'s scale). Its norm is not
    that of the gradient, so `torch.nn.utils.clip_grad_norm_` does not apply: give ``clip``. To accumulate gradients,
    use ``model.no_sync()``: a second backward pass without it would add a gradient to an update.

    Second moments (and with ``order="update"`` momenta) differ between ranks. They are part of the wire's state:
    ``wire.gather_state_dict()`` saves those of all ranks, and a world of another size starts with their mean.

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
        self._next: dict[Tensor, _Next] = {}
        self._group_of: dict[Tensor, dict[str, Any]] = {}
        self._loaded: dict[Tensor, dict[str, Tensor]] = {}
        if not 0 <= lr < math.inf:
            raise ValueError(f"lr must be a number of at least 0, not {lr}")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be two numbers, each at least 0 and below 1, not {betas}")
        if not 0 <= eps < math.inf:
            raise ValueError(f"eps must be a number of at least 0, not {eps}")
        if not 0 <= weight_decay < math.inf:
            raise ValueError(f"weight_decay must be a number of at least 0, not {weight_decay}")
        if order not in ("pre", "update"):
            raise ValueError(f'order must be "pre" or "update", not {order!r}')
        if clip is not None and not 0 < clip < math.inf:
            raise ValueError(f"clip must be a number above 0, or None, not {clip}")
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"order": order, "clip": clip})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called by `load_state_dict`, copy and pickle: they replace groups and moments."""
        super().__setstate__(state)
        self._next, self._group_of = {}, {}
        self._loaded = getattr(self, "_loaded", {})

    @torch.no_grad()
    def outgoing(self, parameter: Tensor, gradient: Tensor, scale: float) -> None:
        """Replace a local gradient, flat and ``scale`` times its size, by what this rank sends, scaled alike."""
        after = self._after_next_step(parameter)
        local = gradient.to(parameter.dtype)
        update = self._update(parameter, local / scale if scale != 1.0 else local, after.moments)
        gradient.copy_(update.mul_(scale) if scale != 1.0 else update)
        after.sent = True

    def forget_sent(self) -> None:
        """Take the next gradients for gradients, whatever was sent and never stepped with."""
        self._next.clear()

    def local_moments(self, parameter: Tensor) -> tuple[str, ...]:
        """The names of the moments that each rank has for itself."""
        return ("exp_avg_sq",) if self._group(parameter)["order"] == "pre" else ("exp_avg_sq", "exp_avg")

    def local_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """The moments that this rank has for itself, flat, by name."""
        state = self._state_of(parameter)
        return {name: state[name].detach().reshape(-1).clone() for name in self.local_moments(parameter)}

    def load_local_state(self, parameter: Tensor, moments: Mapping[str, Tensor]) -> None:
        """Continue with these at the next step, whether `load_state_dict` comes before or after."""
        self._loaded[parameter] = dict(moments)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Perform one step with the present gradients; returns what ``closure``, which may compute them, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group)
        return loss

    def _step(self, parameter: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        if gradient.is_sparse:
            raise TypeError("CompressedAdamW takes dense gradients: make the embedding dense (sparse=False)")
        after, update = self._after_next_step(parameter), gradient.to(parameter.dtype)
        if not after.sent:
            update = self._update(parameter, update.reshape(-1), after.moments).view_as(parameter)
        after.sent = False
        state = self.state[parameter]
        state["step"] += 1
        for name in after.moments:
            state[name], after.moments[name] = after.moments[name], state[name]
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        if group["order"] == "pre":
            beta1 = group["betas"][0]
            state["exp_avg"].lerp_(update, 1 - beta1)
            parameter.sub_(state["exp_avg"], alpha=1 / (1 - beta1 ** state["step"]))
        else:
            parameter.sub_(update)

    def _update(self, parameter: Tensor, gradient: Tensor, after: Mapping[str, Tensor]) -> Tensor:
        """What this rank's gradient (flat) contributes to the mean; ``after`` gets the moments that it leaves."""
        state, group = self.state[parameter], self._group(parameter)
        (beta1, beta2), step = group["betas"], state["step"] + 1
        square = after["exp_avg_sq"].view(-1)
        torch.mul(state["exp_avg_sq"].view(-1), beta2, out=square).addcmul_(gradient, gradient, value=1 - beta2)
        divisor = square.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
        if group["order"] == "pre":
            update = torch.div(gradient, divisor, out=divisor)
        else:
            momentum = torch.lerp(state["exp_avg"].view(-1), gradient, 1 - beta1, out=after["exp_avg"].view(-1))
            update = torch.div(momentum, divisor, out=divisor).div_(1 - beta1**step)
        if group["clip"] is not None:
            rms = update.square().mean().sqrt_()
            update.mul_((group["clip"] / rms).clamp_(max=1.0))
        return update.mul_(group["lr"])

    def _after_next_step(self, parameter: Tensor) -> _Next:
        state = self._state_of(parameter)
        if parameter not in self._next:
            self._next[parameter] = _Next({n: torch.empty_like(state[n]) for n in self.local_moments(parameter)})
        return self._next[parameter]

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            # As torch.optim.AdamW's: in one piece, so that flat views of them exist.
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        for name, moment in self._loaded.pop(parameter, {}).items():
            state[name].view(-1).copy_(moment)
        return state

    def _group(self, parameter: Tensor) -> dict[str, Any]:
        if parameter not in self._group_of:
            self._group_of = {p: group for group in self.param_groups for p in group["params"]}
        return self._group_of[parameter]
