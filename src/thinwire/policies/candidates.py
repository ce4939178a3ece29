"""The candidates that policies choose from: compressors for each layer, with their errors (thesis, B.2) and costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire import kernels
from thinwire.compressors import DGC, Compressor, Feedback, PowerSGD, Sparsifier, TopK, UnsuitedError, Wrapper, ef
from thinwire.policies.policy import gradient_norm

Array = NDArray[np.float64]
Price = Callable[[str, Compressor, Sequence[int]], float]
"""A function that returns a compressor's cost for a layer, given the layer's name, the compressor and a shape."""
_POWER_STEPS = 5
"""Number of power steps, enough for an error close to that of the best approximation (thesis, B.2.2)."""
_OVERSAMPLING = 4
LARGEST_GRAM = 1024
"""Rows or columns up to which all singular values are taken: beyond, the ranks asked for are few in comparison."""


@dataclass(frozen=True)
class LayerCandidates:
    """The candidates of one layer, in parallel sequences."""

    name: str
    numel: int
    norm: float
    """L2 norm of the layer's gradient."""
    candidates: tuple[Compressor, ...]
    errors: Array
    """Squared L2 error of each candidate; infinite where decoded values are not finite."""
    costs: Array
    reference: int
    """Index of the reference, whose error counts toward the budget."""
    offers_reference: bool = True
    """Whether the reference is itself a candidate. If not, it only sets the budget."""

    @property
    def has_budget(self) -> bool:
        return bool(np.isfinite(self.errors[self.reference]))

    @staticmethod
    def evaluate(
        name: str, gradient: Tensor, candidates: Iterable[Compressor], reference: Compressor, price: Price
    ) -> LayerCandidates:
        """Evaluate ``reference``, and those of ``candidates`` that suit a layer of this shape, on its gradient."""
        shape = tuple(gradient.shape)
        suited = []
        for candidate in candidates:
            try:
                suited.append(candidate.fit(shape))
            except UnsuitedError:
                continue
        kept = tuple(dict.fromkeys((reference, *suited)))
        errors = np.array(squared_errors(gradient, kept))
        errors[~np.isfinite(errors)] = np.inf
        costs = np.array([price(name, candidate, shape) for candidate in kept], dtype=np.float64)
        return LayerCandidates(
            name,
            gradient.numel(),
            gradient_norm(gradient),
            kept,
            errors,
            costs,
            0,
            offers_reference=reference in suited,
        )


def usable_gradients(names: Iterable[str], gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of those layers of ``names`` that are neither zero nor infinite nor NaN.

    A layer that was frozen or unused in the interval has none, and nothing is decided for it.
    """
    return {
        name: gradients[name] for name in names if name in gradients and 0 < gradient_norm(gradients[name]) < np.inf
    }


def with_error_feedback(candidates: Iterable[Compressor]) -> tuple[Compressor, ...]:
    """Return all candidates with error feedback if one has or wants it, so that residuals survive a change."""
    listed = tuple(candidates)
    if not any(c.traits.wants_feedback or isinstance(c, Wrapper) for c in listed):
        return listed
    given = next((c for c in listed if isinstance(c, Wrapper)), None)
    return tuple(c if isinstance(c, Wrapper) else fed_like(given, c) for c in listed)


def fed_like(given: Compressor | None, compressor: Compressor) -> Compressor:
    """Return ``compressor`` with the error feedback that ``given`` has, with its options, where it can have that."""
    if isinstance(given, Feedback) or (isinstance(given, DGC) and isinstance(compressor, Sparsifier)):
        return given.around(compressor)
    return ef(compressor)


def squared_errors(gradient: Tensor, candidates: Sequence[Compressor]) -> list[float]:
    """Return the squared L2 errors of ``candidates`` on a layer's gradient, without error feedback.

    All densities of a top-k come from one selection and one sort, all ranks from one spectrum (thesis, B.2: from the
    singular values where the range is wide, from power steps where the matrix is large); others are encoded and
    decoded, one after the other. On the device of the gradient.

    Args:
        gradient: in the shape of its layer, any floating dtype.
        candidates: compressors that take layers of this shape.
    """
    exact = gradient.detach().float()
    inner = [c.coder if isinstance(c, Wrapper) else c for c in candidates]
    errors: dict[Compressor, float] = {}
    densities = [c for c in inner if type(c) is TopK]
    if densities:
        errors |= _density_errors(exact, densities)
    ranks = [c for c in inner if type(c) is PowerSGD]
    if ranks:
        errors |= _rank_errors(exact, ranks)
    for compressor in inner:
        if compressor not in errors:
            errors[compressor] = float((compressor.roundtrip(exact, 0) - exact).square().sum(dtype=torch.float64))
    return [errors[compressor] for compressor in inner]


def _density_errors(x: Tensor, candidates: Sequence[TopK]) -> dict[Compressor, float]:
    """Return the energy without the largest k elements, for every k, from one sort of the largest ones."""
    flat = x.reshape(-1).contiguous()
    rooms = {c: c.room(flat.numel()) for c in candidates}
    most = max(rooms.values())
    _, values, *_ = kernels.select_topk(flat, 0, flat.numel(), most)
    energy = _descending(values.square()).double().cumsum(0)
    total = float(flat.square().sum(dtype=torch.float64))
    ends = torch.tensor([rooms[c] for c in candidates], dtype=torch.int64, device="cpu").clamp_(max=energy.numel()) - 1
    kept = energy[ends.to(energy.device)].tolist()
    return {c: max(0.0, total - some) for c, some in zip(candidates, kept, strict=True)}


def _descending(values: Tensor) -> Tensor:
    if values.is_cuda:
        return values.sort(descending=True).values
    # PyTorch's sort also returns where each value was, at a tenth of the speed.
    return torch.from_numpy(np.sort(values.numpy())).flip(0)


def _rank_errors(x: Tensor, candidates: Sequence[PowerSGD]) -> dict[Compressor, float]:
    """Return ``Σ σᵢ²`` of the singular values beyond each rank; of a schedule, beyond its first."""
    ranks = {c: c.first_rank for c in candidates}
    matrix = x.reshape(x.shape[0], -1)
    if matrix.shape[0] > matrix.shape[1]:
        matrix = matrix.T
    most = min(max(ranks.values()), matrix.shape[0])
    if matrix.shape[0] <= LARGEST_GRAM:
        # Eigenvalues of M Mᵀ: far less work than singular values, and good to 1e-7 of the largest's square.
        squares = torch.linalg.eigvalsh((matrix @ matrix.T).double()).flip(0)
    else:
        squares = _leading_squares(matrix, most)
    total = float(matrix.square().sum(dtype=torch.float64))
    energy = squares.clamp_(min=0).cumsum(0).tolist()
    return {c: max(0.0, total - energy[min(rank, len(energy)) - 1]) for c, rank in ranks.items()}


def _leading_squares(matrix: Tensor, rank: int) -> Tensor:
    """Return the squares of about the ``rank`` largest singular values, by power steps on a subspace."""
    width = min(rank + _OVERSAMPLING, matrix.shape[0])
    q = torch.randn(
        matrix.shape[1], width, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu"
    ).to(matrix)
    p = matrix @ q
    for _ in range(_POWER_STEPS):
        q = matrix.T @ torch.linalg.qr(p).Q
        p = matrix @ torch.linalg.qr(q).Q
    return torch.linalg.svdvals(torch.linalg.qr(p).Q.T @ matrix).double().square()
