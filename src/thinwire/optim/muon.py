"""Muon for whole models: orthogonalized momentum for hidden matrices, AdamW for everything else."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from thinwire.arguments import check_number
from thinwire.compat import makes_on_the_host, unwrapped
from thinwire.optim.compressed_adamw import run_closure
from thinwire.optim.shards import as_whole, is_sharded, local, sharded_like

_OUTPUT_HEADS = ("*head.weight", "*output.weight")
"""Usual names of output heads."""
_STEP_RMS = 0.2
"""Root mean square of a step by polar factors, in units of the learning rate: about AdamW's (Liu et al. 2025,
2502.16982)."""
_COEFFICIENTS = (
    (8.426788, -24.936134, 18.492493),
    (4.111647, -3.059130, 0.574954),
    (3.714570, -2.778125, 0.542939),
    (2.781950, -2.074927, 0.463501),
)
"""Coefficients of each iteration's quintic: of the singular values, from 0.002 to 1 at first, that the iterations
before it leave, it brings the farthest nearest to 1 (Polar Express, Amsel et al. 2025, 2505.16932)."""
_ROOM = 1.01
"""Margin for rounding: above 1, the first quintic grows fast."""
_TINY = 1e-7


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
        betas: AdamW's.
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
        adamw: Sequence[str] = _OUTPUT_HEADS,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        check_number("momentum", momentum, low=0, below=1)
        hidden, others = _split_parameters(model, adamw)
        if not hidden:
            raise ValueError("the model has no hidden matrix for Muon: use torch.optim.AdamW")
        self._adamw = AdamW(others, lr, betas, weight_decay=weight_decay) if others else None
        self._process_group = group
        groups: list[dict[str, Any]] = [{"params": hidden, "momentum": momentum}]
        super().__init__(
            groups + (self._adamw.param_groups if self._adamw else []), {"lr": lr, "weight_decay": weight_decay}
        )
        self._complete = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse further parameters: which are Muon's is known of the model's alone."""
        if getattr(self, "_complete", False):
            raise ValueError("Muon has the parameters of its model: make another Muon once all are in the model")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Perform one step; returns what ``closure`` returns."""
        loss = run_closure(closure)
        hidden, *others = self.param_groups
        self._step_matrices(hidden)
        if self._adamw is not None:
            # Loading a state replaces groups and state, so AdamW is given the present ones.
            self._adamw.param_groups, self._adamw.state = others, self.state
            # Before PyTorch 2.13 it makes the counters of its steps on the default device.
            with nullcontext() if makes_on_the_host() else torch.device("cpu"):
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
            size = _STEP_RMS * math.sqrt(max(p.shape)) * lr
            local(p).mul_(1 - lr * group["weight_decay"]).sub_(part, alpha=size)


def _split_parameters(model: nn.Module, adamw: Sequence[str]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the trained parameters of a model: its hidden matrices, and all others, which AdamW trains.

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


def newton_schulz(matrices: Tensor) -> Tensor:
    """Return the polar factors of matrices (k, m, n) with m <= n, in their dtype: U·Vᵀ, where U·S·Vᵀ is such a matrix.

    Singular values from 0.002 of the Frobenius norm on end between 0.67 and 1.33, smaller ones below; those that are 0
    stay 0. Four iterations of ``x = a·x + (b·x·xᵀ + c·(x·xᵀ)²)·x``, each with its own coefficients, do what five of
    `torch.optim.Muon` with the same coefficients do.
    """
    norms = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True, dtype=torch.float32)
    x = matrices / (_ROOM * norms + _TINY).to(matrices.dtype)
    for a, b, c in _COEFFICIENTS:
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def polar_factors(matrices: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Return the polar factor of each matrix (m, n), in bfloat16; matrices of one shape are iterated together.

    With ``group``, whose ranks give the same matrices, each rank computes a part of them and gathers the others, 2
    bytes an element: every rank then has the same bits.
    """
    if group is None or not matrices:
        return _by_shape(matrices)
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    owners = _owners(matrices, ranks)
    sizes = [sum(m.numel() for m, owner in zip(matrices, owners, strict=True) if owner == r) for r in range(ranks)]
    mine = _by_shape([m for m, owner in zip(matrices, owners, strict=True) if owner == rank])
    message = torch.zeros(max(sizes), dtype=torch.bfloat16, device=matrices[0].device)
    if mine:
        torch.cat([factor.flatten() for factor in mine], out=message[: sizes[rank]])
    gathered = message.new_empty(ranks * len(message))
    dist.all_gather_into_tensor(gathered, message, group=group)
    ends = [r * len(message) for r in range(ranks)]
    factors = []
    for matrix, owner in zip(matrices, owners, strict=True):
        start, ends[owner] = ends[owner], ends[owner] + matrix.numel()
        factors.append(gathered[start : ends[owner]].view(matrix.shape))
    return factors


def _by_shape(matrices: Sequence[Tensor]) -> list[Tensor]:
    wide = [m.bfloat16() if m.shape[0] <= m.shape[1] else m.bfloat16().mT for m in matrices]
    alike: dict[torch.Size, list[int]] = {}
    for index, matrix in enumerate(wide):
        alike.setdefault(matrix.shape, []).append(index)
    for indices in alike.values():
        stacked = torch.stack([wide[i] for i in indices])
        factors = newton_schulz(stacked.to(iteration_dtype(stacked.device))).bfloat16()
        for index, factor in zip(indices, factors, strict=True):
            wide[index] = factor
    return [w if m.shape[0] <= m.shape[1] else w.mT for m, w in zip(matrices, wide, strict=True)]


def iteration_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which matrices are iterated: bfloat16, but fp32 on a CPU that has no instructions for
    bfloat16 and takes two to twelve times as long with it."""
    return torch.float32 if device.type == "cpu" and not _cpu_has_bfloat16() else torch.bfloat16


def _cpu_has_bfloat16() -> bool:
    if not hasattr(torch.cpu, "get_capabilities"):  # older PyTorch reports the vector width alone
        return torch.backends.cpu.get_cpu_capability() == "AVX512"
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))


def _owners(matrices: Sequence[Tensor], ranks: int) -> list[int]:
    """Return the rank that computes each matrix: the largest first, each given to the rank with the least to do."""
    work = [0] * ranks
    owners = [0] * len(matrices)
    costs = [min(m.shape) * m.numel() for m in matrices]
    for index in sorted(range(len(matrices)), key=lambda i: -costs[i]):
        owners[index] = work.index(min(work))
        work[owners[index]] += costs[index]
    return owners
