"""What receivers see of recorded gradients: errors, distributions (Fig. 5 and 15)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from thinwire.compressors import Compressor
from thinwire.repro.fft.runs import Gradients

_QUANTILES = 1000


@dataclass(frozen=True)
class Reconstruction:
    """The mean gradient over ranks and what is received of it: fp32, flat, over all layers."""

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
    exact: list[Tensor] = []
    received: list[Tensor] = []
    ranks = gradients.layers[step]
    for i in range(len(gradients.names)):
        own = [layers[i] for layers in ranks]
        seen = [compressor.roundtrip(layer, key=i * len(ranks) + rank) for rank, layer in enumerate(own)]
        exact.append(torch.stack(own).mean(0).flatten())
        received.append(torch.stack(seen).mean(0).flatten())
    return Reconstruction(torch.cat(exact), torch.cat(received))


def join(parts: Sequence[Reconstruction]) -> Reconstruction:
    """Several steps' as one."""
    return Reconstruction(torch.cat([part.exact for part in parts]), torch.cat([part.received for part in parts]))


def quantiles(values: Tensor, count: int = _QUANTILES) -> np.ndarray:
    """``count`` quantiles of ``values``, from that of 0 to that of 1."""
    return np.quantile(values.numpy(), np.linspace(0, 1, count))


def share_with_least_error(errors: Mapping[str, Tensor], name: str) -> float:
    """Share of the cumulative distribution over which ``name``'s error is the least of all (Fig. 15 e)."""
    found = {key: quantiles(value) for key, value in errors.items()}
    others = np.min([found[key] for key in found if key != name], axis=0)
    return float(np.mean(found[name] <= others))


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


def num_levels(layer: Tensor, compressor: Compressor) -> int:
    """How many different values are received of ``layer``."""
    return int(compressor.roundtrip(layer).unique().numel())
