"""What receivers see of recorded gradients (figures 5 and 15), and what messages take (section 3.3)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from torch import Tensor

from experiments.framework.training import Gradients
from thinwire import kernels
from thinwire.compressors import FFT, Compressor
from thinwire.compressors.floats import best_mantissa
from thinwire.kernels import Table

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


VALUE_BITS = 32


@dataclass(frozen=True)
class Throughputs:
    """Throughputs of the primitives of FFT compression, in bytes of fp32 gradient per second (table 1).

    That is the gradient of a message, over the seconds that the primitive takes for it; values are converted to the
    range-based float after they are selected.

    ``convert`` (T_m) is that of a precision conversion, of which a message takes two: to half precision and to the
    range-based float.
    """

    convert: float
    transform: float
    pack: float
    select: float

    @property
    def seconds_per_byte(self) -> float:
        """``2/T_m + 1/T_f + 1/T_p + 1/T_s``."""
        return 2 / self.convert + 1 / self.transform + 1 / self.pack + 1 / self.select


def ratio_with_bitmap(ratio: float) -> float:
    """A compression ratio after the status bitmap, one bit for each fp32 value, is sent too (Fig. 6)."""
    return 1 / (1 / ratio + 1 / VALUE_BITS)


def message_bytes(num_bytes: float, ratio: float, *, bitmap: bool) -> float:
    """Bytes of a message for ``num_bytes`` of fp32 gradient, with the status bitmap or without."""
    return num_bytes / (ratio_with_bitmap(ratio) if bitmap else ratio)


def measure(numel: int, fft: FFT, repeats: int) -> Throughputs:
    """Throughputs of what ``fft`` computes for a message of ``numel`` values: medians of ``repeats``.

    They are thinwire's own kernels, but for the transform and the conversion to half precision, which are PyTorch's.
    """
    assert fft.block != "whole"
    assert not isinstance(fft.theta, str | tuple)
    numel = max(fft.block, numel - numel % fft.block)
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    parts = torch.view_as_real(fft.spectrum(x))
    count = len(parts)
    kept = math.ceil((1 - fft.theta) * count)
    half, bitmap = torch.empty(numel, dtype=torch.float16), _message(kernels.index_bytes(count, kept))
    values = torch.empty(2 * kept)
    codes, table = _message(kernels.rangefloat_bytes(2 * kept, fft.bits)), Table(torch.tensor([[0, 2 * kept, 0, 0, 0]]))

    def select() -> Tensor:
        real, imaginary = parts[:, 0], parts[:, 1]
        magnitude = torch.mul(real, real).addcmul_(imaginary, imaginary)
        return kernels.select_topk(magnitude, 0, count, kept, key=0)[0]

    chosen = select()

    def pack() -> None:
        kernels.pack_indices(chosen, count, kept, bitmap, 0)
        torch.index_select(parts, 0, chosen, out=values.view(-1, 2))

    pack()
    top = float(values.abs().max())
    params = torch.tensor([[top, float(best_mantissa(values, top, fft.bits, "nearest"))]])

    def throughput(run: Callable[[], object]) -> float:
        return 4 * numel / median_seconds(run, repeats)

    to_half = throughput(lambda: half.copy_(x))
    to_range = throughput(
        lambda: kernels.rangefloat_encode(values, table, codes, params, bits=fft.bits, rounding="nearest", key=0)
    )
    return Throughputs(
        convert=2 / (1 / to_half + 1 / to_range),
        transform=throughput(lambda: fft.spectrum(x)),
        pack=throughput(pack),
        select=throughput(select),
    )


def _message(num_bytes: int) -> Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


def median_seconds(run: Callable[[], object], repeats: int) -> float:
    """Seconds that ``run`` takes: the median of ``repeats``, after one that does not count."""
    run()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return median(seconds)
