"""Muon for whole models: orthogonalised momentum for hidden matrices, AdamW for everything else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

OUTPUT_HEADS = ("*head.weight", "*output.weight")
"""The usual names of output heads."""


def split_parameters(model: nn.Module, adamw: Sequence[str] = OUTPUT_HEADS) -> tuple[list[Tensor], list[Tensor]]:
    """The trained parameters of a model: its hidden matrices, and all others, which AdamW trains.

    The others are embeddings, biases, norms, and matrices whose names match one of the patterns ``adamw``.
    """
    tables = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    hidden: list[Tensor] = []
    others: list[Tensor] = []
    for name, p in model.named_parameters():
        is_hidden = p.ndim == 2 and id(p) not in tables and not any(fnmatchcase(name, pattern) for pattern in adamw)
        if p.requires_grad:
            (hidden if is_hidden else others).append(p)
    return hidden, others


class Muon(Optimizer):
    """`torch.optim.Muon` for a model's hidden matrices and `torch.optim.AdamW` for its other parameters, as one.

    Embeddings, the output head, biases and norms are trained by AdamW (Jordan 2024; Liu et al. 2025, 2502.16982).
    Muon's updates are scaled to the root mean square of AdamW's (0.2·sqrt(max(rows, columns))), so both take the same
    learning rate and schedule. It is the inner optimizer of MuLoCo (2505.23725), which finds that its pseudo-gradients
    may be compressed to fewer bits than AdamW's.

    Args:
        model: the model; all parameters that require gradients are trained.
        lr: learning rate of both, on AdamW's scale.
        weight_decay: decoupled weight decay of both.
        momentum: Nesterov momentum of Muon.
        betas: of AdamW.
        ns_steps: Newton-Schulz iterations, which are most of the cost of a step of Muon.
        adamw: names or patterns of further two-dimensional parameters for AdamW. By default output heads are found by
            the usual names, ``head``, ``lm_head`` and ``output``.

    Raises:
        ValueError: no hidden matrix is left for Muon, or an argument is outside its range.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.99),
        ns_steps: int = 5,
        adamw: Sequence[str] = OUTPUT_HEADS,
    ) -> None:
        hidden, others = split_parameters(model, adamw)
        if not hidden:
            raise ValueError("the model has no hidden matrix for Muon: use torch.optim.AdamW")
        self._muon = torch.optim.Muon(
            hidden, lr, weight_decay, momentum, ns_steps=ns_steps, adjust_lr_fn="match_rms_adamw"
        )
        self._adamw = AdamW(others, lr, betas, weight_decay=weight_decay) if others else None
        super().__init__([group for part in self._parts() for group in part.param_groups], {})

    def _parts(self) -> tuple[Optimizer, ...]:
        return (self._muon,) if self._adamw is None else (self._muon, self._adamw)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Perform one step; returns what ``closure`` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Loading a state replaces groups and state: the parts work on whatever is there now.
        for part, group in zip(self._parts(), self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state
            part.step()
        return loss
