"""QuantizedAdam (AQ-SGD, section 4.3; 1-bit Adam): once its variance rests, its momentum travels in few bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from thinwire.compressors.norms import square_sum

_STABLE = 0.96
"""1-bit Adam (section 7.1): the variance rests once its norm keeps this share over 1/(1 − β2) steps."""


class QuantizedAdam(torch.optim.Optimizer):
    """AdamW that freezes its variance after a warm-up, so that what is left, a momentum, may be sent in few bits.

    Error feedback under Adam divides a gradient that comes late by the size of today's. A frozen variance takes that
    away: the update is linear in the momentum m, and of it nothing is lost.

        model = DistributedDataParallel(model)
        optimizer = thinwire.optim.QuantizedAdam(model.parameters(), lr=1e-3, warmup=200)
        wire = thinwire.compress(model, "minmax(bits=4)", optimizer=optimizer)

    In the first ``warmup`` steps gradients are averaged exactly, and this is AdamW. From then on rank i sends
    ``Q(m_i + δ_i)`` of ``m_i = β1·m + (1 − β1)·g_i``, with error feedback on both sides (equation of spec section 5);
    what arrives is handed to the training loop as the gradient that makes this momentum, so that clipping, `GradScaler`
    and whatever else looks at ``grad`` work as ever. The update is

        x −= lr·(m̂ / (√v̂ + eps) + weight_decay·x),   m̂ = m / (1 − β1^t),   v̂ = v_T / (1 − β2^T)

    with the variance of step T, at which it was frozen, corrected for T and not for t, which would let steps grow. A
    parameter whose gradients begin late, or are zero at first, counts its own steps: its variance is frozen once it had
    gradients for as many steps as the others' warm-up.

    Args:
        params: parameters or groups of them. Options may differ by group but for ``warmup``.
        lr: learning rate; schedulers work as with any optimizer.
        betas: β1 of the momentum, β2 of the variance.
        eps: added to the root of the variance.
        weight_decay: decoupled, as in AdamW.
        warmup: steps before the variance is frozen, at least as many as the learning rate warms up; "stable" freezes it
            once its norm has kept 96 % over 1/(1 − β2) steps; None never does, and this is AdamW.
        floor: when the variance is frozen, the least that √v may be, as a share of the layer's root mean variance.
            What had hardly a gradient in the warm-up (a rare token's row of an embedding) would otherwise be divided by
            next to nothing for ever, and so would the quantisation error in it. 0 leaves v as it is.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        warmup: int | Literal["stable"] | None = "stable",
        floor: float = 0.03,
    ) -> None:
        _check(lr, betas, eps, weight_decay, warmup, floor)
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "warmup": warmup,
            "floor": floor,
            "steps": 0,
            "frozen_at": 0,
            "variance": 0.0,
        }
        super().__init__(params, defaults)

    @property
    def frozen(self) -> bool:
        """Whether the variance is frozen: momentum travels, compressed."""
        return self.param_groups[0]["frozen_at"] > 0

    @property
    def frozen_at(self) -> int | None:
        """The step (counted from 1) whose variance is kept; None before."""
        return self.param_groups[0]["frozen_at"] or None

    def momentum(self, parameter: Tensor) -> Tensor | None:
        """m of a parameter; None where it never had a gradient."""
        state = self.state.get(parameter)
        return state["exp_avg"] if state else None

    def beta1(self, parameter: Tensor) -> float:
        """β1 of a parameter's group."""
        for group in self.param_groups:
            if any(parameter is other for other in group["params"]):
                return float(group["betas"][0])
        raise KeyError("this parameter is not the optimizer's")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Make a step from the gradients that are there; returns what ``closure`` returned, which computes them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        steps = self.param_groups[0]["steps"] + 1
        for group in self.param_groups:
            group["steps"] = steps
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        if not self.frozen and self._rests(steps):
            self._freeze(steps)
        return loss

    def _freeze(self, steps: int) -> None:
        """Keep the variances from now on of all parameters that had gradients for as long as the warm-up took.

        Others, and those that get their first gradient later, go on as under AdamW until they had as many.
        """
        for group in self.param_groups:
            group["frozen_at"] = steps
            for state in (self.state[p] for p in group["params"] if self.state.get(p)):
                self._keep_variance(state, group)

    def _keep_variance(self, state: dict[str, Any], group: dict[str, Any]) -> None:
        if state["frozen_at"] or state["seen"] < self.param_groups[0]["frozen_at"]:
            return
        state["frozen_at"] = state["step"]
        variance = state["exp_avg_sq"]
        # Summed in an order that no machine changes: the floor must be the same on all ranks.
        mean = math.sqrt(float(square_sum(variance.sqrt()))) / math.sqrt(max(1, variance.numel()))
        variance.clamp_(min=(group["floor"] * mean) ** 2)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        if gradient.is_sparse:
            raise TypeError("QuantizedAdam takes dense gradients: make the embedding dense (sparse=False)")
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            # Its own count of steps, those of them since its first gradient that was not zero, and which one's variance
            # is kept.
            state |= {"step": 0, "seen": 0, "frozen_at": 0}
        beta1, beta2 = group["betas"]
        state["step"] += 1
        state["exp_avg"].lerp_(gradient.to(parameter.dtype), 1 - beta1)
        if not state["frozen_at"]:
            state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            state["seen"] += int(state["seen"] > 0 or bool(gradient.any()))
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        corrected = 1 - beta2 ** (state["frozen_at"] or state["step"])
        divisor = state["exp_avg_sq"].sqrt().div_(math.sqrt(corrected)).add_(group["eps"])
        parameter.addcdiv_(state["exp_avg"], divisor, value=-group["lr"] / (1 - beta1 ** state["step"]))
        if self.frozen:
            self._keep_variance(state, group)

    def _rests(self, steps: int) -> bool:
        """Whether this step's variance is the one to keep. The same on all ranks, whose variances are."""
        group = self.param_groups[0]
        if group["warmup"] is None:
            return False
        if group["warmup"] != "stable":
            return steps >= group["warmup"]
        window = max(1, round(1 / (1 - group["betas"][1])))
        if steps % window:
            return False
        # Summed in an order that no machine changes: a rank that thinks otherwise would wait for ever.
        states = [self.state[p] for g in self.param_groups for p in g["params"] if self.state.get(p)]
        now = math.sqrt(math.fsum(float(square_sum(state["exp_avg_sq"])) for state in states))
        now /= 1 - group["betas"][1] ** steps
        before = group["variance"]
        for each in self.param_groups:
            each["variance"] = now
        return before > 0 and _STABLE <= now / before <= 1 / _STABLE


def _check(
    lr: float, betas: tuple[float, float], eps: float, weight_decay: float, warmup: object, floor: float
) -> None:
    if not lr >= 0:
        raise ValueError(f"lr must not be negative, not {lr}")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be two numbers, each at least 0 and below 1, not {betas}")
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps must not be negative, not {eps}")
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay must not be negative, not {weight_decay}")
    if not 0 <= floor < math.inf:
        raise ValueError(f"floor must not be negative, not {floor}: the least root of a variance, of its layer's mean")
    if not (warmup is None or warmup == "stable" or (type(warmup) is int and warmup >= 1)):
        raise ValueError(f'warmup must be a number of steps, at least 1, or "stable", or None, not {warmup!r}')
