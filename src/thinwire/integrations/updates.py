"""Changes of parameters by an optimizer's steps, for compressors whose scale follows them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch
from torch import Tensor

from thinwire.compressors import FollowsOptimizer, find_mixin
from thinwire.kernels import square_sums
from thinwire.plan import Plan
from thinwire.runtime import Wire


class Updates:
    """Hooks around the steps of an SGD optimizer that report the length of each step to a Wire.

    Only steps at a learning rate above 0 depend on the gradients: others are not reported, and leave a layer's learning
    rate at the last one that was above 0.
    """

    def __init__(self, wire: Wire, optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> None:
        self._wire = weakref.ref(wire)
        self._optimizer = optimizer
        self._parameters = parameters
        self._before: dict[str, Tensor] = {}
        self._rates: dict[str, float] = {}
        # A hook does not remove itself, because PyTorch goes through the hooks of a step while it calls them.
        wire.at_detach(optimizer.register_step_pre_hook(lambda *_: self._keep()).remove)
        wire.at_detach(optimizer.register_step_post_hook(lambda *_: self._report()).remove)

    @staticmethod
    def check(plan: Plan, optimizer: torch.optim.Optimizer | None, parameters: Mapping[str, Tensor]) -> bool:
        """Return whether any layer of the plan follows the optimizer.

        Raises:
            TypeError: The length of the optimizer's steps does not depend on that of the gradients.
            ValueError: The optimizer lacks one of those layers.
        """
        names = followers(plan)
        if not names or optimizer is None:  # a missing optimizer is an error of the plan
            return False
        if not isinstance(optimizer, torch.optim.SGD):
            raise TypeError(
                f"{plan[names[0]]} takes its scale from the optimizer's steps, and those of {type(optimizer).__name__} "
                "do not say how large the gradients are (Adam's are about as long whatever the gradients): it takes "
                "torch.optim.SGD. For any other optimizer there is scale=gradient, the default"
            )
        held = {p for group in optimizer.param_groups for p in group["params"]}
        for name in names:
            if parameters[name] not in held:
                raise ValueError(
                    f"{name} follows the optimizer, and the one given does not hold it: pass the optimizer that trains "
                    f"it, or leave it raw with exclude=[{name!r}]"
                )
        return True

    def learning_rates(self) -> dict[str, float]:
        """Return the learning rate of each layer that follows the optimizer; 0 before its first one above 0."""
        groups = self._optimizer.param_groups
        rates: dict[Tensor, float] = {p: float(group["lr"]) for group in groups for p in group["params"]}
        for name in self._followers():
            rate = rates.get(self._parameters[name], 0.0)
            if rate > 0.0 or name not in self._rates:
                self._rates[name] = rate
        return dict(self._rates)

    def _followers(self) -> list[str]:
        wire = self._wire()
        return [] if wire is None else followers(wire.plan)

    @torch.no_grad()
    def _keep(self) -> None:
        moving = {p for group in self._optimizer.param_groups if float(group["lr"]) > 0.0 for p in group["params"]}
        names = [name for name in self._followers() if self._parameters[name] in moving]
        self._before = {name: self._copy(name) for name in names}

    def _copy(self, name: str) -> Tensor:
        parameter, kept = self._parameters[name], self._before.get(name)
        return parameter.detach().clone() if kept is None else kept.copy_(parameter)

    @torch.no_grad()
    def _report(self) -> None:
        # This is in place, because the next step overwrites the copies anyway.
        changes = {name: square_sums([kept.sub_(self._parameters[name])]) for name, kept in self._before.items()}
        wire = self._wire()
        if wire is not None and changes:
            wire.engine.on_optimizer_step({name: float(change) for name, change in changes.items()})


def followers(plan: Plan) -> list[str]:
    """Return the layers whose compressor follows the optimizer."""
    following = {name: find_mixin(compressor, FollowsOptimizer) for name, compressor in plan.layers.items()}
    return [name for name, mixin in following.items() if mixin is not None and mixin.follows_optimizer]
