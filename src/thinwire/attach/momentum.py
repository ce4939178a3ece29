"""What travels under `QuantizedAdam`: the momentum that each rank's gradient makes, in the gradient's place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from thinwire.compressors import Coded, Raw, Wrapper, ef
from thinwire.optim import QuantizedAdam
from thinwire.plan import Plan
from thinwire.wire.route import BucketLayers


class Momentum:
    """Turns a bucket of gradients into momenta before it is sent, and back when it has arrived."""

    def __init__(self, optimizer: QuantizedAdam, parameters: Mapping[str, Tensor]) -> None:
        """``parameters``: those of the model, by name.

        Raises:
            ValueError: the optimizer has not all of them that are trained.
        """
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        lacking = [name for name, p in parameters.items() if p.requires_grad and id(p) not in held]
        if lacking:
            raise ValueError(
                f"QuantizedAdam lacks {lacking[0]}: give it all trained parameters of the model, "
                "QuantizedAdam(model.parameters(), ...)"
            )
        self._optimizer = optimizer
        self._parameters = dict(parameters)
        self._beta = {n: optimizer.beta1(p) for n, p in parameters.items() if id(p) in held}

    @property
    def travels(self) -> bool:
        """Whether momenta are sent by now: the warm-up is over."""
        return self._optimizer.frozen

    def make(self, flat: Tensor, layers: BucketLayers, loss_scale: float) -> None:
        """``g ← β1·m + (1 − β1)·g``, in the gradients' units."""
        for gradient, momentum, beta in self._of(flat, layers):
            gradient.mul_(1 - beta)
            if momentum is not None:
                gradient.add_(momentum, alpha=beta * loss_scale)

    def undo(self, flat: Tensor, layers: BucketLayers, loss_scale: float) -> Tensor:
        """``g ← (g − β1·m) / (1 − β1)``: the gradient that makes the momentum which has arrived."""
        for gradient, momentum, beta in self._of(flat, layers):
            if momentum is not None:
                gradient.sub_(momentum, alpha=beta * loss_scale)
            gradient.div_(1 - beta)
        return flat

    def _of(self, flat: Tensor, layers: BucketLayers) -> list[tuple[Tensor, Tensor | None, float]]:
        found, start = [], 0
        with torch.no_grad():
            for name, shape in layers:
                numel = torch.Size(shape).numel()
                momentum = self._optimizer.momentum(self._parameters[name])
                gradient = flat[start : start + numel]
                found.append((gradient, None if momentum is None else momentum.reshape(-1), self._beta[name]))
                start += numel
        return found


def with_feedback(plan: Plan) -> Plan:
    """The plan with error feedback around all that is coded: QuantizedAdam has it on both sides."""
    fed = {
        name: ef(c) if isinstance(c, Coded) and not isinstance(c, Raw | Wrapper) else c
        for name, c in plan.layers.items()
    }
    return replace(plan, layers=fed)
