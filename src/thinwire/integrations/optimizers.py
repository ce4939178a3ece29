"""Checks of the optimizer that trains a compressed model, and the lengths of its steps."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.arguments import warn_caller
from thinwire.compressors import (
    DGC,
    FFT,
    Chain,
    Compressor,
    FollowsOptimizer,
    OneBit,
    RandK,
    Sign,
    Sparsifier,
    Wrapper,
    find_mixin,
)
from thinwire.kernels import square_sums
from thinwire.plan import Plan
from thinwire.runtime import Wire

_ADAM_LIKE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax)


def held_by(optimizer: torch.optim.Optimizer) -> dict[Tensor, dict[str, Any]]:
    """Return the group of each parameter of ``optimizer``."""
    return {p: group for group in optimizer.param_groups for p in group["params"]}


def check_optimizer(optimizer: torch.optim.Optimizer | None, module: nn.Module) -> None:
    """Raise ``ValueError`` if an optimizer holds no parameter of ``module``, so that it trains another model."""
    held = held_by(optimizer) if optimizer is not None else {}
    if held and held.keys().isdisjoint(module.parameters()):
        raise ValueError(
            f"optimizer holds no parameter of this model: pass the one that trains it, {type(optimizer).__name__}"
            "(model.parameters()), made after the model was moved, converted or sharded"
        )


def check_holds_all(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise ``ValueError`` if ``optimizer`` lacks one of the ``parameters``, by name, that are trained."""
    held = held_by(optimizer)
    lacking = [name for name, p in parameters.items() if p.requires_grad and p not in held]
    if lacking:
        kind = type(optimizer).__name__
        raise ValueError(
            f"{kind} lacks {lacking[0]}: give it all trained parameters of the model, {kind}(model.parameters(), ...)"
        )


def warn_about_pairing(plan: Plan, optimizer: torch.optim.Optimizer | None) -> None:
    """Warn if ``optimizer`` is Adam or a relative and the plan has `DGC`, or error feedback around one bit, signs or a
    sparse choice of the gradient.

    Late values arrive as spikes and inflate Adam's second moment; one bit makes it nearly equal for all values of a
    bucket, so that preconditioning is lost (1-bit Adam, Tang et al. 2021, section 3). DGC keeps a momentum of its
    own, which Adam's would double (Lin et al. 2018, section 3).
    """
    from thinwire.optim import CompressedAdamW  # imported here because most runs do without

    name = type(optimizer).__name__
    for compressor in dict.fromkeys(plan.layers.values()):
        if isinstance(optimizer, CompressedAdamW):
            if not _sparse(compressor) or all(group["order"] == "update" for group in optimizer.param_groups):
                continue
            # The momentum has forgotten a value before the next one is sent.
            name = 'CompressedAdamW(order="pre"), whose momentum forgets values that are sent seldom'
            problem = 'use CompressedAdamW(..., order="update")'
        elif not isinstance(optimizer, _ADAM_LIKE):
            continue
        elif isinstance(compressor, DGC):
            problem = f"it has its own momentum, and {name} adds another: use torch.optim.SGD(..., momentum=0)"
        elif _spikes(compressor):
            order = ', order="update"' if _sparse(compressor) else ""
            problem = (
                f"error feedback on gradients inflates the second moment of {name}: use thinwire.optim.CompressedAdamW"
                f"(model.parameters(), ...{order}), or minmax(bits=4) without feedback, or this compressor under "
                "torch.optim.SGD"
            )
        else:
            continue
        warn_caller(f"{compressor} trains badly under {name}: {problem}")


def _spikes(compressor: Compressor) -> bool:
    """Return whether a compressor sends one bit, signs or a sparse choice, with error feedback."""
    if not isinstance(compressor, Wrapper):
        return False
    inner = compressor.inner
    if isinstance(inner, RandK):
        return not inner.traits.dense
    one_bit = isinstance(inner, OneBit | Sign) or getattr(inner, "bits", None) == 1
    return one_bit or _sparse(compressor)


def _sparse(compressor: Compressor) -> bool:
    """Return whether a compressor sends a sparse choice."""
    return isinstance(compressor.inner if isinstance(compressor, Wrapper) else compressor, Sparsifier | Chain | FFT)


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
            TypeError: the length of the optimizer's steps does not depend on that of the gradients.
            ValueError: the optimizer lacks one of those layers.
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
        held = held_by(optimizer)
        for name in names:
            if parameters[name] not in held:
                raise ValueError(
                    f"{name} follows the optimizer, and the one given does not hold it: pass the optimizer that trains "
                    f"it, or leave it raw with exclude=[{name!r}]"
                )
        return True

    def learning_rates(self) -> dict[str, float]:
        """Return the learning rate of each layer that follows the optimizer; 0 before its first one above 0."""
        held = held_by(self._optimizer)
        for name in self._followers():
            rate = float(held.get(self._parameters[name], {}).get("lr", 0.0))
            if rate > 0.0 or name not in self._rates:
                self._rates[name] = rate
        return dict(self._rates)

    def _followers(self) -> list[str]:
        wire = self._wire()
        return [] if wire is None else followers(wire.plan)

    @torch.no_grad()
    def _keep(self) -> None:
        before, self._before, held = self._before, {}, held_by(self._optimizer)
        for name in self._followers():
            parameter = self._parameters[name]
            if float(held.get(parameter, {}).get("lr", 0.0)) > 0.0:
                kept = before.get(name)
                self._before[name] = parameter.detach().clone() if kept is None else kept.copy_(parameter)

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
