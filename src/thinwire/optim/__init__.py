"""Optimizers whose messages are compressed: for methods that need more than a gradient hook sees."""

from thinwire.optim.compressed_adamw import CompressedAdamW as CompressedAdamW
from thinwire.optim.muon import Muon as Muon
from thinwire.optim.quantized_adam import QuantizedAdam as QuantizedAdam
