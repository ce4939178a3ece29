"""Where compression pays: equations 1 to 3 of the FFT paper (section 3.3), and the throughputs that go into them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

VALUE_BITS = 32
_BLOCK = 4096
_MANTISSA, _LEAST = 3, 2.0**-10


@dataclass(frozen=True)
class Throughputs:
    """Throughputs of the primitives of FFT compression, in bytes of fp32 gradient per second (table 1).

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


def compression_seconds(num_bytes: float, speeds: Throughputs) -> float:
    """Equation 1: seconds to compress ``num_bytes``; the paper takes as many to decompress."""
    return num_bytes * speeds.seconds_per_byte


def communication_seconds(num_bytes: float, bandwidth: float, ratio: float) -> float:
    """Equation 2: seconds on a link of ``bandwidth`` bytes per second after compression by ``ratio``."""
    return num_bytes / (bandwidth * ratio)


def saved_seconds(num_bytes: float, bandwidth: float, ratio: float) -> float:
    """Equation 3: seconds of communication that compression by ``ratio`` saves."""
    return communication_seconds(num_bytes, bandwidth, 1.0) - communication_seconds(num_bytes, bandwidth, ratio)


def ratio_with_bitmap(ratio: float) -> float:
    """A compression ratio after the status bitmap, one bit for each fp32 value, is sent too (Fig. 6)."""
    return 1 / (1 / ratio + 1 / VALUE_BITS)


def message_bytes(num_bytes: float, ratio: float, *, bitmap: bool) -> float:
    """Bytes of a message for ``num_bytes`` of fp32 gradient, with the status bitmap or without."""
    return num_bytes / (ratio_with_bitmap(ratio) if bitmap else ratio)


def range_codes(x: Tensor, mantissa: int, least: float) -> Tensor:
    """Algorithm 1 for positive values: the code of each in ``int32``, 1 for ``least``; ``mantissa`` bits are kept."""
    shift = 23 - mantissa
    base = torch.tensor(least, dtype=torch.float32).view(torch.int32) >> shift
    return (x.view(torch.int32) >> shift) - base + 1


def measure(numel: int, theta: float, repeats: int) -> Throughputs:
    """Throughputs of this machine's primitives in PyTorch, on ``numel`` values: medians of ``repeats``.

    Blocks of 4096, which is kind: one transform over all values takes several times as long.
    """
    numel = max(_BLOCK, numel - numel % _BLOCK)
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    half, blocks = torch.empty(numel, dtype=torch.float16), x.view(-1, _BLOCK)
    magnitudes = torch.fft.rfft(blocks).abs()[:, : _BLOCK // 2]
    keep = round((1 - theta) * magnitudes.shape[1])
    mask = magnitudes >= magnitudes.topk(keep, dim=1).values[:, -1:]

    def throughput(run: Callable[[], object]) -> float:
        return 4 * numel / median_seconds(run, repeats)

    positive = x.abs()
    to_half = throughput(lambda: half.copy_(x))
    to_range = throughput(lambda: range_codes(positive, _MANTISSA, _LEAST))
    return Throughputs(
        convert=2 / (1 / to_half + 1 / to_range),
        transform=throughput(lambda: torch.fft.rfft(blocks)),
        pack=throughput(lambda: magnitudes.masked_select(mask)),
        select=throughput(lambda: magnitudes.topk(keep, dim=1, sorted=False)),
    )


def median_seconds(run: Callable[[], object], repeats: int) -> float:
    """Seconds that ``run`` takes: the median of ``repeats``, after one that does not count."""
    run()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return median(seconds)
