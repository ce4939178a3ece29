"""How activations and gradients are sent: each compressed, as it is, or both."""

# No `from __future__ import annotations` here: ranks make methods again of plain values.

from dataclasses import dataclass, replace
from typing import Literal

from experiments.papers.aqsgd import methods as pipelines

GRADIENT_BITS = 4
GRADIENTS = f"minmax(bits={GRADIENT_BITS}, bucket=128)"


@dataclass(frozen=True)
class Method(pipelines.Method):
    """One method. ``gradients``: what QuantizedAdam's momenta are sent in; empty for DDP under AdamW, plain or with one
    of
    PyTorch's hooks."""

    gradients: str = ""
    hook: Literal["", "bf16", "powersgd"] = ""


FP32 = Method("fp32", "FP32", "#222222")
ACTIVATIONS = Method(
    "activations",
    "activations only (AQ-SGD fw3 bw6)",
    "#1f6fb2",
    forward=pipelines.aqsgd(3, 6).forward,
    backward=pipelines.aqsgd(3, 6).backward,
)
ONLY_GRADIENTS = Method("gradients", f"gradients only ({GRADIENT_BITS} bits)", "#8250c4", gradients=GRADIENTS)


def aqsgd(forward: int, backward: int) -> Method:
    """AQ-SGD, and QuantizedAdam between replicas."""
    return _with_gradients(pipelines.aqsgd(forward, backward), "AQ-SGD")


def direct(forward: int, backward: int) -> Method:
    """DirectQ, and QuantizedAdam between replicas."""
    return _with_gradients(pipelines.direct(forward, backward), "DirectQ")


def _with_gradients(method: pipelines.Method, name: str) -> Method:
    bits = method.title.removeprefix(name).strip()
    title = f"{name} {bits} + QuantizedAdam {GRADIENT_BITS}"
    return Method(
        title.lower(), title, method.color, forward=method.forward, backward=method.backward, gradients=GRADIENTS
    )


ADAM = Method("adam", "Adam, fp32", "#222222")
BF16 = Method("bf16", "Adam, bf16 gradients", "#888888", hook="bf16")
POWERSGD = Method("powersgd", "Adam, PyTorch's PowerSGD", "#c0392b", hook="powersgd")
QUANTIZED = Method("quantized", f"QuantizedAdam, {GRADIENT_BITS} bits", "#0a7d4f", gradients=GRADIENTS)
WARMING = Method("warming", "QuantizedAdam in its warm-up", "#5fb88f", gradients="raw")

AQSGD, DIRECT = aqsgd(3, 6), direct(3, 6)
CONTROL = direct(2, 4)
"""Must fail: where it does not, a training forgives everything."""

_SPLIT_BACKWARD = "topk(density=0.2) | maxabs(bits=8)"
SPLIT_BITS = "fw2 bw8[0.2]"
SPLIT = {
    "fp32": FP32,
    "aqsgd": Method(
        "aqsgd", f"AQ-SGD {SPLIT_BITS}", "#1f6fb2", forward=pipelines.aqsgd(2, 8).forward, backward=_SPLIT_BACKWARD
    ),
    "direct": Method(
        "direct", f"DirectQ {SPLIT_BITS}", "#e8a33d", forward=pipelines.direct(2, 8).forward, backward=_SPLIT_BACKWARD
    ),
}
"""Of split learning (figure 10)."""

CENTER_BITS, SUM_BITS = (2, 3), (3, 4)


def _compared(name: str, title: str, forward: str) -> Method:
    return Method(name, title, "", forward=forward, backward="maxabs(bits=6)")


CENTERS = {"fp32": FP32}
"""Of appendix G: changes from cluster centers, or from nothing, in so many bits."""
SUMS = {"fp32": replace(FP32, forward="")}
"""Of appendix F: sums as they are, quantized, or what changed of them."""
for _bits in CENTER_BITS:
    _coder = pipelines.direct(_bits, 6).forward
    CENTERS[f"direct{_bits}"] = _compared(f"direct{_bits}", f"DirectQ fw{_bits} bw6", _coder)
    CENTERS[f"centers{_bits}"] = _compared(f"centers{_bits}", f"256 centers fw{_bits} bw6", _coder)
for _bits in SUM_BITS:
    _direct, _delta = pipelines.direct(_bits, 6).forward, pipelines.aqsgd(_bits, 6).forward
    SUMS[f"direct{_bits}"] = _compared(f"direct{_bits}", f"Q of sums, {_bits} bits", _direct)
    SUMS[f"delta{_bits}"] = _compared(f"delta{_bits}", f"delta compensation, {_bits} bits", _delta)
