"""The time that a step's communication costs, predicted from measured speeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from thinwire.compressors import Coded, Compressor, Raw, unwrap
from thinwire.plan.plan import Plan

_SAMPLE = (1 << 10, 1 << 10)
_LEAST_GAIN = 0.9


@dataclass(frozen=True)
class Speeds:
    """Measured speeds of one world: those of its slowest rank.

    ``codec_s`` has, for each compressor, the seconds that one element costs in a step: encoding, reducing and
    decoding together. ``bandwidth`` is the rate at which a rank sends while it receives as much, in bytes per second.
    """

    codec_s: Mapping[Compressor, float]
    bandwidth: float
    latency_s: float
    num_ranks: int
    crossings: float = 0.0
    """Number of times that a rank sends the bytes of an encoded bucket; 0 for 2(n−1)/n (scatter-reduce-all-gather)."""
    native: float = 0.0
    """Rate at which a rank sends in a native all-reduce, in bytes per second; 0 for ``bandwidth``."""

    def seconds_per_element(self, compressor: Compressor) -> float:
        """Return ``encode + bytes / bandwidth + decode`` for an element of a large layer (FFT paper, equation 1).

        Latency is left out: every layer shares the messages of its DDP bucket.
        """
        return self.codec_s.get(compressor, 0.0) + self.wire_seconds(compressor, _SAMPLE) / math.prod(_SAMPLE)

    def wire_seconds(self, compressor: Compressor, shape: Sequence[int]) -> float:
        """Return the seconds that the bytes of a layer of this shape take."""
        # Raw layers are the baseline, and sums have no alternative.
        native = isinstance(unwrap(compressor), Raw) or not isinstance(compressor, Coded)
        crossings = 0.0 if native else self.crossings
        num_bytes = sent_bytes(compressor, shape, self.num_ranks, crossings=crossings)
        return num_bytes / ((native and self.native) or self.bandwidth)


def sent_bytes(
    compressor: Compressor,
    shape: Sequence[int],
    num_ranks: int,
    dtype: torch.dtype = torch.float32,
    *,
    crossings: float = 0.0,
) -> float:
    """Return the bytes that a rank sends for a layer in a step.

    A coded layer is sent ``crossings`` times, or n−1 times if all ranks gather it whole; a sum by a native all-reduce
    is sent 2(n−1)/n times, whatever the collective algorithm.

    Args:
        compressor: the layer's compressor.
        shape: the layer's shape.
        num_ranks: the number of ranks.
        dtype: the gradient's dtype.
        crossings: how many times the collective algorithm sends the bytes of an encoded layer; 0 for 2(n−1)/n.
    """
    times = 2 * (num_ranks - 1) / num_ranks
    if isinstance(compressor, Coded):
        times = num_ranks - 1 if compressor.gathered else crossings or times
    return times * compressor.wire_bytes(shape, dtype)


def declined(plan: Plan, speeds: Speeds) -> Plan:
    """Return the plan with those layers raw whose compression would take longer than sending them uncompressed.

    Declining is nothing but a plan rewrite. A compressor must be 10 % faster: the model leaves out the other
    costs of messages than their bytes.
    """
    raw = speeds.seconds_per_element(Raw())
    pays = {c: speeds.seconds_per_element(c) < _LEAST_GAIN * raw for c in set(plan.layers.values())}
    layers = {name: c if pays[c] or isinstance(c, Raw) else Raw() for name, c in plan.layers.items()}
    return replace(plan, layers=layers)


def codec_seconds(compressor: Compressor, num_ranks: int, seconds_of: Mapping[str, float]) -> float:
    """Return an element's seconds in a step of a rank, from those of a pass over an element (``encode``, ``decode``).

    In a scatter-reduce-all-gather of n ranks a rank encodes and decodes (n−1)/n of the elements for the others, and
    for its own share decodes n−1 messages, encodes the mean and decodes it.
    """
    if not isinstance(compressor, Coded):
        return seconds_of["encode"] + seconds_of["decode"]
    if compressor.gathered:
        return seconds_of["encode"] + num_ranks * seconds_of["decode"]
    others = (num_ranks - 1) / num_ranks
    own = 1 / num_ranks
    encode = others + own
    decode = others + own * num_ranks
    return encode * seconds_of["encode"] + decode * seconds_of["decode"]
