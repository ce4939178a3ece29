"""Compression that falls linearly along the layers' order (thesis, section 3.6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from thinwire.policies.mapped import MappedPolicy
from thinwire.policies.policy import gradient_norm


@dataclass(frozen=True, kw_only=True)
class Linear(MappedPolicy):
    """Sorts layers by the norm of their gradient over their size; the first are compressed most (thesis, 3.6)."""

    def places(self, gradients: Mapping[str, Tensor]) -> Mapping[str, float]:
        order = sorted(gradients, key=lambda name: gradient_norm(gradients[name]) / gradients[name].numel())
        return {name: place / max(1, len(order) - 1) for place, name in enumerate(order)}
