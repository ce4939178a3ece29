"""How activations and gradients travel: each compressed, as it is, or both."""

# No `from __future__ import annotations` here: ranks make ways again of plain values.

from dataclasses import dataclass
from typing import Literal

from thinwire.repro.aqsgd import ways as pipelines

GRADIENT_BITS = 4
GRADIENTS = f"minmax(bits={GRADIENT_BITS}, bucket=128)"


@dataclass(frozen=True)
class Way(pipelines.Way):
    """One way. ``gradients``: what QuantizedAdam's momenta travel in; empty for DDP under AdamW, plain or with one of
    PyTorch's hooks."""

    gradients: str = ""
    hook: Literal["", "bf16", "powersgd"] = ""


FP32 = Way("fp32", "FP32", "#222222")
ACTIVATIONS = Way(
    "activations",
    "activations only (AQ-SGD fw3 bw6)",
    "#1f6fb2",
    forward=pipelines.aqsgd(3, 6).forward,
    backward=pipelines.aqsgd(3, 6).backward,
)
ONLY_GRADIENTS = Way("gradients", f"gradients only ({GRADIENT_BITS} bits)", "#8250c4", gradients=GRADIENTS)


def aqsgd(forward: int, backward: int) -> Way:
    """AQ-SGD, and QuantizedAdam between replicas."""
    return _with_gradients(pipelines.aqsgd(forward, backward), "AQ-SGD")


def direct(forward: int, backward: int) -> Way:
    """DirectQ, and QuantizedAdam between replicas."""
    return _with_gradients(pipelines.direct(forward, backward), "DirectQ")


def _with_gradients(way: pipelines.Way, name: str) -> Way:
    bits = way.title.removeprefix(name).strip()
    title = f"{name} {bits} + QuantizedAdam {GRADIENT_BITS}"
    return Way(title.lower(), title, way.colour, forward=way.forward, backward=way.backward, gradients=GRADIENTS)


ADAM = Way("adam", "Adam, fp32", "#222222")
BF16 = Way("bf16", "Adam, bf16 gradients", "#888888", hook="bf16")
POWERSGD = Way("powersgd", "Adam, PyTorch's PowerSGD", "#c0392b", hook="powersgd")
QUANTIZED = Way("quantized", f"QuantizedAdam, {GRADIENT_BITS} bits", "#0a7d4f", gradients=GRADIENTS)
WARMING = Way("warming", "QuantizedAdam in its warm-up", "#5fb88f", gradients="raw")
