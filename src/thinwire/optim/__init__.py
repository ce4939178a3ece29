"""Optimizers whose messages are compressed: for methods that need more than a gradient hook sees."""

from thinwire.optim.compressed_adamw import CompressedAdamW
from thinwire.optim.muon import Muon
from thinwire.optim.quantized_adam import QuantizedAdam

__all__ = ["CompressedAdamW", "Muon", "QuantizedAdam"]
