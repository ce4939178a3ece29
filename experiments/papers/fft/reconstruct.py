"""What receivers see of recorded gradients (figures 5 and 15)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from experiments.framework.training import Gradients
from thinwire.compressors import Compressor

_QUANTILES = 1000


@dataclass(frozen=True)
class Reconstruction:
    """The mean gradient over ranks and what is received of it: fp32, flat."""

    exact: Tensor
    received: Tensor

    @property
    def relative_error(self) -> float:
        """``‖exact − received‖ / ‖exact‖``."""
        return float((self.exact - self.received).norm() / self.exact.norm())

    @property
    def errors(self) -> Tensor:
        """``|g_i − ĝ_i|``."""
        return (self.exact - self.received).abs()


def reconstruct(gradients: Gradients, step: int, compressor: Compressor) -> Reconstruction:
    """Send the gradients recorded at the ``step``-th step, each rank's own and layer by layer, and average."""
    return join([reconstruct_layer(gradients, step, i, compressor) for i in range(len(gradients.names))])


def reconstruct_layer(gradients: Gradients, step: int, layer: int, compressor: Compressor) -> Reconstruction:
    """The ``layer``-th layer of `reconstruct`."""
    ranks = gradients.layers[step]
    own = [layers[layer] for layers in ranks]
    seen = [compressor.roundtrip(part, key=layer * len(ranks) + rank) for rank, part in enumerate(own)]
    return Reconstruction(torch.stack(own).mean(0).flatten(), torch.stack(seen).mean(0).flatten())


def largest_layer(gradients: Gradients) -> int:
    """Which layer has the most elements."""
    sizes = [layer.numel() for layer in gradients.layers[0][0]]
    return sizes.index(max(sizes))


def join(parts: Sequence[Reconstruction]) -> Reconstruction:
    """Several steps' or layers' as one."""
    return Reconstruction(torch.cat([part.exact for part in parts]), torch.cat([part.received for part in parts]))


def quantiles(values: Tensor) -> np.ndarray:
    """`_QUANTILES` quantiles of ``values``, from that of 0 to that of 1."""
    return np.quantile(values.numpy(), np.linspace(0, 1, _QUANTILES))


def share_with_least_error(errors: Mapping[str, np.ndarray], name: str, others: Sequence[str] = ()) -> float:
    """Share of the cumulative distribution over which ``name``'s error is the least (Fig. 15 e): of all, or of its own
    and that of ``others``. ``errors`` holds the `quantiles` of the errors."""
    least = np.min([errors[key] for key in others or errors if key != name], axis=0)
    return float(np.mean(errors[name] <= least))


def distance(reconstruction: Reconstruction, edges: np.ndarray) -> float:
    """Total variation between the histograms of exact and received values: 0 for the same, 1 for disjoint ones.

    Values outside the edges count to the outermost bins.
    """
    exact, received = (histogram(part, edges) for part in (reconstruction.exact, reconstruction.received))
    return float(np.abs(exact - received).sum() / 2)


def histogram(values: Tensor, edges: np.ndarray) -> np.ndarray:
    """Share of ``values`` in each bin; values outside the edges count to the outermost ones."""
    counts, _ = np.histogram(np.clip(values.numpy(), edges[0], edges[-1]), edges)
    return counts / max(1, values.numel())
