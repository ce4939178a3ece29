"""Muon for whole models: orthogonalised momentum for hidden matrices, AdamW for everything else."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from thinwire.arguments import check_number
from thinwire.compat import unwrapped
from thinwire.optim.polar import STEP_RMS, polar_factors
from thinwire.optim.shards import as_whole, is_sharded, local, sharded_like

OUTPUT_HEADS = ("*head.weight", "*output.weight")
"""The usual names of output heads."""


def split_parameters(model: nn.Module, adamw: Sequence[str] = OUTPUT_HEADS) -> tuple[list[Tensor], list[Tensor]]:
    """The trained parameters of a model: its hidden matrices, and all others, which AdamW trains.

    The others are embeddings, biases, norms, and matrices whose names match one of the patterns ``adamw``.
    """
    tables = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    hidden: list[Tensor] = []
    others: list[Tensor] = []
    for path, p in model.named_parameters():
        name = unwrapped(path)
        is_hidden = p.ndim == 2 and id(p) not in tables and not any(fnmatchcase(name, pattern) for pattern in adamw)
        if p.requires_grad:
            (hidden if is_hidden else others).append(p)
    return hidden, others


class Muon(Optimizer):
    """Muon for a model's hidden matrices and `torch.optim.AdamW` for its other parameters, as one optimizer.

    Embeddings, the output head, biases and norms are trained by AdamW (Jordan 2024; Liu et al. 2025, 2502.16982). A
    hidden matrix W (m, n) with the gradient G steps as under `torch.optim.Muon`:

        M = momentum·M + (1 − momentum)·G
        W = (1 − lr·weight_decay)·W − 0.2·√max(m, n)·lr·polar(momentum·M + (1 − momentum)·G)

    where polar(U·S·Vᵀ) is U·Vᵀ, by Newton-Schulz iterations in bfloat16, or in fp32 on a CPU without instructions for
    bfloat16. Such steps have the root mean square of AdamW's, so both take the same learning rate and schedule.
    Matrices of one shape are iterated together. It is the inner optimizer of MuLoCo (2505.23725), which finds that its
    pseudo-gradients may be compressed to fewer bits than AdamW's.

    Under FSDP2 every rank puts the momentum of one matrix after the other together, in bfloat16, and steps with its own
    part of the polar factor. With ``group`` ranks divide the iterations, which are most of the cost of a step; they
    then exchange 2 bytes an element, so give it the ranks of a node, not those across a slow link:

        optimizer = thinwire.optim.Muon(model, lr=1e-3, group=node)

    Args:
        model: the model; all parameters that require gradients are trained.
        lr: learning rate of both, on AdamW's scale.
        weight_decay: decoupled weight decay of both.
        momentum: Nesterov momentum of Muon.
        betas: of AdamW.
        adamw: names or patterns of further two-dimensional parameters for AdamW. By default output heads are found by
            the usual names, ``head``, ``lm_head`` and ``output``.
        group: ranks that have the same gradients and divide the iterations among them.

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
        adamw: Sequence[str] = OUTPUT_HEADS,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        check_number("momentum", momentum, low=0, below=1)
        hidden, others = split_parameters(model, adamw)
        if not hidden:
            raise ValueError("the model has no hidden matrix for Muon: use torch.optim.AdamW")
        self._adamw = AdamW(others, lr, betas, weight_decay=weight_decay) if others else None
        self._process_group = group
        groups: list[dict[str, Any]] = [{"params": hidden, "momentum": momentum}]
        super().__init__(
            groups + (self._adamw.param_groups if self._adamw else []), {"lr": lr, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Perform one step; returns what ``closure`` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        hidden, *others = self.param_groups
        self._step_matrices(hidden)
        if self._adamw is not None:
            # Loading a state replaces groups and state: AdamW works on whatever is there now.
            self._adamw.param_groups, self._adamw.state = others, self.state
            self._adamw.step()
        return loss

    def _step_matrices(self, group: Mapping[str, Any]) -> None:
        parameters = [p for p in group["params"] if p.grad is not None]
        lr, updates = float(group["lr"]), []
        for p in parameters:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p.grad)
            momentum = self.state[p]["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
            updates.append(as_whole(p.grad.lerp(momentum, group["momentum"]).bfloat16()))
        for p, factor in zip(parameters, polar_factors(updates, self._process_group), strict=True):
            part = local(sharded_like(factor, p)) if is_sharded(p) else factor
            size = STEP_RMS * math.sqrt(max(p.shape)) * lr
            local(p).mul_(1 - lr * group["weight_decay"]).sub_(part, alpha=size)
