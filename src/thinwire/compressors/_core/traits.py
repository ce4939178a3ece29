"""Traits: what a caller may know about a compressor without running it."""

from __future__ import annotations

import math
from typing import NamedTuple


class Traits(NamedTuple):
    """Properties of a compressor. The defaults suit a biased quantiser."""

    unbiased: bool = False
    """The expected value of the decompressed tensor is the tensor."""
    exact_bits: bool = True
    """Messages are the same bytes on every machine. False for compressors that use an FFT or matrix products."""
    exact_natively: bool = False
    """They are where the native core computes them, at every instruction-set level and on any number of threads."""
    dense: bool = True
    """Every element is sent, not a choice of them."""
    keeps_constants: bool = True
    """A dense compressor decodes a layer with one value to that value, up to rounding."""
    contracts: bool = True
    """Residuals of error feedback stay bounded. The error is smaller than the input by the Euclidean norm, for normally
    distributed values. For heavy-tailed ones, or one large value among small ones, a quantizer of few bits may err by
    more for a while: its error is then below the input's largest magnitude, so that residuals stop growing."""
    wants_feedback: bool = False
    """So much is dropped or distorted that a plan adds error feedback."""
    takes_every_layer: bool = False
    """Biases, norms and small layers are compressed, too. A plan leaves these raw otherwise."""
    bounded: bool = False
    """The size of a message has an upper bound, but is not a function of the shape alone; see `Bounded`."""
    plain_sum: bool = True
    """The owner of a chunk adds up what ranks send. Otherwise the compressor overrides `Coded.add_up`."""
    plain_mean: bool = True
    """Whoever gathers all messages takes their mean. Otherwise the compressor overrides `Coded.mean`."""
    largest: float = math.inf
    """Largest magnitude that can be represented. Beyond it, values saturate or become Inf.

    Where they saturate, it is that of unscaled gradients: what is encoded may be `CodecCall.loss_scale` times as large.
    """
    absolute: bool = False
    """What is sent depends on how large values are in the gradient's own units: it reads `CodecCall.loss_scale`."""
