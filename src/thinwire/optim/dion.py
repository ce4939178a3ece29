"""Dion: Muon whose momentum is sent as low-rank factors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.optim.compressed_adamw import CompressedAdamW, Due
from thinwire.optim.muon import OUTPUT_HEADS, split_parameters
from thinwire.optim.polar import STEP_RMS, newton_schulz

_LEAST_RATIO = 2
"""Where a matrix has so many times the rows and columns of its rank, a basis of its columns pays."""
_ROUNDING = 1e-4
"""The share of a matrix's norm that may lie outside its rank."""
_TINY = 1e-7


class Dion(CompressedAdamW):
    """Muon for the price of low-rank factors (Dion, Ahn et al. 2025, 2504.05295).

    Each rank has a momentum M of every hidden matrix. `PowerSGD` sends it: one power iteration, whose factors are
    averaged. All ranks step with the orthonormalised mean D, and what D lacks of it stays in the momentum, which is
    thereby the error feedback, too. With a rank's own gradient G of a matrix of m x n:

        B = M + G,   D = mean(B) to the rank of the compressor,   M = B − (1 − momentum)·D
        W = (1 − lr·weight_decay)·W − 0.2·√(m·n)·lr·O/‖O‖,   O = orth(D)

    where orth(D) is the polar factor of D, of its rank: the nearest matrix whose nonzero singular values are 1. At full
    rank steps have the direction of Muon's without Nesterov's momentum. (Dion normalises the columns of D's right
    factor, Orth-Dion, 2605.16341, takes its QR factorisation; all three agree where columns are orthogonal.) Steps have
    a root mean square of 0.2·lr, about AdamW's, at every rank, so that matrices and other parameters share a learning
    rate.

    Until M has lost what was sent, for about 1/(1 − momentum) steps, the next steps repeat its directions and all
    others wait. At a small rank a ``momentum`` of 0.95, Dion's and Muon's, ends far above AdamW: the default is 0.5.

        model = DistributedDataParallel(model)
        optimizer = thinwire.optim.Dion(model.module, lr=1e-3)
        wire = thinwire.compress(model, "powersgd(rank=16)", optimizer=optimizer)

    A step sends ``(m + n)·rank`` values of a matrix. Embeddings, the output head, biases and norms are trained as by
    `CompressedAdamW`, at the same learning rate. Checkpoints, clipping and accumulation are those of `CompressedAdamW`,
    momenta in the place of second moments.

    Args:
        model: the model; all parameters that require gradients are trained.
        lr: learning rate of both, on AdamW's scale.
        weight_decay: decoupled weight decay of both.
        momentum: of hidden matrices; 0.95 is Muon's, for full rank.
        betas: of `CompressedAdamW`.
        adamw: names or patterns of further two-dimensional parameters for `CompressedAdamW`.

    Raises:
        ValueError: no hidden matrix is left, or an argument is outside its range.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.5,
        betas: tuple[float, float] = (0.9, 0.99),
        adamw: Sequence[str] = OUTPUT_HEADS,
    ) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be at least 0 and below 1, not {momentum}")
        hidden, others = split_parameters(model, adamw)
        if not hidden:
            raise ValueError("the model has no hidden matrix for Dion: use CompressedAdamW")
        groups = [{"params": hidden, "momentum": momentum}, {"params": others, "momentum": None}]
        self._ranks: dict[Tensor, int] = {}
        super().__init__([group for group in groups if group["params"]], lr, betas=betas, weight_decay=weight_decay)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._ranks = getattr(self, "_ranks", {})

    def expect_ranks(self, ranks: Mapping[Tensor, int]) -> None:
        """Take what is sent of these matrices for matrices of at most this rank."""
        self._ranks = dict(ranks)

    def is_matrix(self, parameter: Tensor) -> bool:
        """Whether a parameter is a hidden matrix, whose momentum is sent."""
        return self._group(parameter)["momentum"] is not None

    def local_moments(self, parameter: Tensor) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.is_matrix(parameter) else super().local_moments(parameter)

    def shared_moments(self, parameter: Tensor) -> tuple[str, ...]:
        return () if self.is_matrix(parameter) else super().shared_moments(parameter)

    def _make_updates(self, due: Sequence[Due]) -> None:
        super()._make_updates([one for one in due if not self.is_matrix(one.parameter)])
        for parameter, gradient, _ in due:
            if self.is_matrix(parameter):
                before, after = self.state[parameter]["momentum_buffer"], self._next[parameter].moments
                gradient.copy_(torch.add(before, gradient, out=after["momentum_buffer"]))

    def _take(self, due: Sequence[Due]) -> None:
        super()._take([one for one in due if not self.is_matrix(one.parameter)])
        for parameter, update, group in due:
            if self.is_matrix(parameter):
                self._step_matrix(parameter, update, group)

    def _step_matrix(self, parameter: Tensor, update: Tensor, group: Mapping[str, Any]) -> None:
        self.state[parameter]["momentum_buffer"].sub_(update, alpha=1 - group["momentum"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        step = orthonormal(update, self._ranks.get(parameter) if self._next[parameter].sent else None)
        size = STEP_RMS * math.sqrt(step.numel()) * group["lr"]
        parameter.sub_(step * (size / (torch.linalg.vector_norm(step, dtype=torch.float32) + _TINY)))


def orthonormal(matrix: Tensor, rank: int | None = None) -> Tensor:
    """The polar factor of a matrix (m, n), whose singular values are 1 but for those that are 0, in fp32.

    In bfloat16, which Muon uses, rounding would fill a matrix of low rank up, and every iteration makes small singular
    values 3.4 times larger.

    ``rank`` is what the matrix is expected to have at most. The iterations then work on ``rank`` x n values, its
    coordinates in an orthonormal basis of its columns: the same result up to rounding for less than a rank/m of the
    work. A matrix of a higher rank, such as one that was sent raw, is found out and treated as above.
    """
    x = matrix.float()
    if rank is not None and _LEAST_RATIO * rank <= min(x.shape):
        sketch = torch.randn(
            x.shape[1], rank, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu"
        ).to(x.device)
        basis = torch.linalg.qr(x @ sketch).Q
        within = basis.mT @ x
        outside = torch.linalg.vector_norm(x - basis @ within)
        if bool(outside <= _ROUNDING * torch.linalg.vector_norm(x)):
            return (basis @ newton_schulz(within[None])[0]).to(matrix.dtype)
    wide = x if x.shape[0] <= x.shape[1] else x.mT
    polar = newton_schulz(wide[None])[0]
    return (polar if wide is x else polar.mT).to(matrix.dtype)
