"""QuantizedAdam (AQ-SGD, section 4.3; 1-bit Adam): Adam whose momentum is sent in few bits once its variance is
stable."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.arguments import check_int, check_number
from thinwire.kernels import AdamGradient, AdamStep, MovingAverage, adam_apply, adam_normalize, square_sums
from thinwire.optim.compressed_adamw import check_adam, run_closure
from thinwire.optim.shards import local, over_shards

_STABLE = 0.96
"""Share of its norm that the variance keeps over 1/(1 − β2) steps once it is stable (1-bit Adam, section 7.1)."""
_AT_ONCE = 1 << 22
"""Number of elements after which pending steps are taken: their gradients are copied."""

Divisors = Callable[[], Mapping[Tensor, Tensor]]
"""Returns the scalars by which a step divides gradients, by parameter."""


class QuantizedAdam(torch.optim.Optimizer):
    """AdamW that freezes its variance after a warm-up, so that its momentum can be sent in few bits.

    Under Adam, error feedback divides a delayed gradient by the variance of the step that receives it, so residuals
    are not made up for. With a frozen variance the update is linear in the momentum m, and they are.

        model = DistributedDataParallel(model)
        optimizer = thinwire.optim.QuantizedAdam(model.parameters(), lr=1e-3, warmup=200)
        wire = thinwire.compress(model, "minmax(bits=4)", optimizer=optimizer)

    In the first ``warmup`` steps gradients are averaged exactly, and this is AdamW. From then on rank i sends
    ``Q(m_i + δ_i)`` of ``m_i = β1·m + (1 − β1)·g_i``, with error feedback on both sides. The training loop gets the
    gradient that yields the received momentum, so that clipping, `GradScaler` and other code that reads ``grad`` work
    unchanged. The update is

        x −= lr·(m̂ / (√v̂ + eps) + weight_decay·x),   m̂ = m / (1 − β1^t),   v̂ = v_T / (1 − β2^T)

    with the variance of step T, in which it was frozen, and its bias correction for T: that for t would let steps grow.
    Under FSDP2 gradients are sent in the place of momenta, with error feedback: the momentum is linear in them, so
    that late gradients only make it late.

    A parameter whose gradients start late, or are zero at first, counts its own steps: its variance is frozen once it
    has had gradients for as many steps as the warm-up.

    Args:
        params: parameters or groups of them. Options may differ by group but for ``warmup``.
        lr: learning rate; schedulers work as with any optimizer.
        betas: β1 of the momentum, β2 of the variance.
        eps: added to the root of the variance.
        weight_decay: decoupled, as in AdamW.
        warmup: steps before the variance is frozen, at least as many as the learning rate warms up; "stable" freezes it
            once its norm has kept 96 % over 1/(1 − β2) steps; None never does, and this is AdamW.
        floor: when the variance is frozen, the least that √v may be, as a share of the layer's root mean variance.
            Elements with hardly any gradient in the warm-up, such as a rare token's row of an embedding, would
            otherwise be divided by almost zero from then on, and so would their quantization errors. 0 leaves v as it
            is.

    Raises:
        ValueError: an option is out of range.
    """

    _divisors: tuple[Divisors, ...] = ()

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
        check_adam(lr, betas, eps, weight_decay)
        check_number("floor", floor, low=0)
        if warmup is not None and warmup != "stable":
            check_int('warmup (or "stable", or None)', warmup, 1)
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
        """Whether the variance is frozen, and the momentum is sent compressed."""
        return self.param_groups[0]["frozen_at"] > 0

    @property
    def frozen_at(self) -> int | None:
        """Step (counted from 1) whose variance is kept; None before."""
        return self.param_groups[0]["frozen_at"] or None

    def momentum(self, parameter: Tensor) -> Tensor | None:
        """Return the momentum m of a parameter; None if it never had a gradient."""
        state = self.state.get(parameter)
        return state["exp_avg"] if state else None

    def register_divisors(self, divisors: Divisors) -> Callable[[], None]:
        """Have every step divide gradients by what ``divisors`` returns, once its closure has computed them; ``grad``
        stays as it is. Returns the function that ends this."""
        self._divisors = (*self._divisors, divisors)

        def remove() -> None:
            self._divisors = tuple(other for other in self._divisors if other is not divisors)

        return remove

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Perform one step with the present gradients; returns what ``closure``, which may compute them, returns."""
        loss = run_closure(closure)
        divisors = {parameter: divisor for get in self._divisors for parameter, divisor in get().items()}
        steps = self.param_groups[0]["steps"] + 1
        self._note_first_gradients()
        due: list[tuple[AdamGradient, AdamStep]] = []
        pending = 0
        for group in self.param_groups:
            group["steps"] = steps
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient, divisor = local(parameter.grad), divisors.get(parameter)
                update = torch.clone(gradient) if divisor is None else gradient / divisor
                due.append(self._update(parameter, update, group))
                pending += parameter.grad.numel()
                if pending >= _AT_ONCE:
                    _take(due)
                    pending = 0
        _take(due)
        if not self.frozen and self._is_stable(steps):
            for group in self.param_groups:
                group["frozen_at"] = steps
        if self.frozen:
            self._keep_variances()
        return loss

    def _note_first_gradients(self) -> None:
        """Make the states of parameters that have a gradient, and start the counts of those with a nonzero one.

        All ranks must agree about a sharded parameter.
        """
        unseen = []
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            if parameter.grad.is_sparse:
                raise TypeError("QuantizedAdam takes dense gradients: make the embedding dense (sparse=False)")
            state = self.state[parameter]
            if not state:
                state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                # The parameter's steps, those since its first nonzero gradient, and the step of the frozen variance.
                state |= {"step": 0, "seen": 0, "frozen_at": 0}
            if not state["frozen_at"] and not state["seen"]:
                unseen.append(parameter)
        if unseen:
            nonzeros = torch.stack([local(parameter.grad).any().to(torch.int32) for parameter in unseen])
            for parameter, nonzero in zip(
                unseen, over_shards(nonzeros, unseen, dist.ReduceOp.MAX).tolist(), strict=True
            ):
                # Its update increases this to 1.
                self.state[parameter]["seen"] = 0 if nonzero else -1

    def _keep_variances(self) -> None:
        """Freeze the variances of all parameters that have had gradients during the whole warm-up.

        The others, and parameters whose first gradient comes later, continue as under AdamW until they have had
        gradients for as many steps.
        """
        warmup = self.param_groups[0]["frozen_at"]
        ready = [
            (parameter, group["floor"])
            for group in self.param_groups
            for parameter in group["params"]
            if (state := self.state.get(parameter)) and not state["frozen_at"] and state["seen"] >= warmup
        ]
        if not ready:
            return
        # A fixed order of summation: the floor must be the same on all ranks.
        sums = square_sums([local(self.state[p]["exp_avg_sq"]).sqrt() for p, _ in ready])
        totals = over_shards(sums, [p for p, _ in ready], dist.ReduceOp.SUM).tolist()
        for (parameter, floor), total in zip(ready, totals, strict=True):
            state = self.state[parameter]
            state["frozen_at"] = state["step"]
            mean = math.sqrt(total) / math.sqrt(max(1, parameter.numel()))
            local(state["exp_avg_sq"]).clamp_(min=(floor * mean) ** 2)

    def _update(self, parameter: Tensor, update: Tensor, group: dict[str, Any]) -> tuple[AdamGradient, AdamStep]:
        """Return the conversion of a gradient to an ``update``, and the step that is taken with it."""
        state, lr = self.state[parameter], group["lr"]
        beta1, beta2 = group["betas"]
        weights = local(parameter)
        update = update.to(weights.dtype).contiguous()
        momentum, variance = local(state["exp_avg"]), local(state["exp_avg_sq"])
        state["step"] += 1
        state["seen"] += not state["frozen_at"]
        kept = 1.0 if state["frozen_at"] else beta2
        # x / (√(v / c²) + eps) = c·x / (√v + c·eps): an operation less for each element.
        correction = math.sqrt(1 - beta2 ** (state["frozen_at"] or state["step"]))
        normalized = AdamGradient(
            update,
            MovingAverage(variance, variance, kept),
            MovingAverage(momentum, momentum, beta1),
            correction * group["eps"],
            correction / (1 - beta1 ** state["step"]),
        )
        return normalized, AdamStep(weights, update, None, 1 - lr * group["weight_decay"], lr)

    def _is_stable(self, steps: int) -> bool:
        """Whether the variance is to be frozen in this step. All ranks agree, because their variances are equal."""
        group = self.param_groups[0]
        if group["warmup"] is None:
            return False
        if group["warmup"] != "stable":
            return steps >= group["warmup"]
        window = max(1, round(1 / (1 - group["betas"][1])))
        if steps % window:
            return False
        # A fixed order of summation: ranks that decided differently would wait for each other for ever.
        held = [p for g in self.param_groups for p in g["params"] if self.state.get(p)]
        if not held:
            return False
        sums = square_sums([local(self.state[p]["exp_avg_sq"]) for p in held])
        now = math.sqrt(math.fsum(over_shards(sums, held, dist.ReduceOp.SUM).tolist()))
        now /= 1 - group["betas"][1] ** steps
        before = group["variance"]
        for each in self.param_groups:
            each["variance"] = now
        return before > 0 and _STABLE <= now / before <= 1 / _STABLE


def _take(due: list[tuple[AdamGradient, AdamStep]]) -> None:
    """Take these steps, and remove them from the list."""
    adam_normalize([gradient for gradient, _ in due])
    adam_apply([step for _, step in due])
    due.clear()
