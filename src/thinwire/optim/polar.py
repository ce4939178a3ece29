"""Polar factors of matrices by Newton-Schulz iterations: what Muon and Dion step with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

STEP_RMS = 0.2
"""Root mean square of a step by polar factors, in units of the learning rate: about AdamW's (Liu et al. 2025,
2502.16982)."""
_COEFFICIENTS = (
    (8.426788, -24.936134, 18.492493),
    (4.111647, -3.059130, 0.574954),
    (3.714570, -2.778125, 0.542939),
    (2.781950, -2.074927, 0.463501),
)
"""Of each iteration's quintic: of what the iterations before it leave of singular values from 0.002 to 1, it brings the
farthest nearest to 1 (Polar Express, Amsel et al. 2025, 2505.16932)."""
_ROOM = 1.01
"""For rounding: above 1, the first quintic grows fast."""
_TINY = 1e-7


def newton_schulz(matrices: Tensor) -> Tensor:
    """The polar factors of matrices (k, m, n) with m <= n, in their dtype: U·Vᵀ, where U·S·Vᵀ is such a matrix.

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
    """The polar factor of each matrix (m, n), in bfloat16; matrices of one shape are iterated together.

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
    """The dtype in which matrices are iterated: bfloat16, but fp32 on a CPU that has no instructions for bfloat16 and
    takes two to twelve times as long with it."""
    return torch.float32 if device.type == "cpu" and not _cpu_has_bfloat16() else torch.bfloat16


def _cpu_has_bfloat16() -> bool:
    if not hasattr(torch.cpu, "get_capabilities"):  # older PyTorch reports the vector width alone
        return torch.backends.cpu.get_cpu_capability() == "AVX512"
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))


def _owners(matrices: Sequence[Tensor], ranks: int) -> list[int]:
    """The rank that computes each matrix: the largest first, each given to the rank with the least to do."""
    work = [0] * ranks
    owners = [0] * len(matrices)
    costs = [min(m.shape) * m.numel() for m in matrices]
    for index in sorted(range(len(matrices)), key=lambda i: -costs[i]):
        owners[index] = work.index(min(work))
        work[owners[index]] += costs[index]
    return owners
