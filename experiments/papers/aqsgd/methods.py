"""How activations and their gradients are sent between stages (as they are, quantized, or as what changed of them), and
the gradients of weights between replicas."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import thinwire
from experiments.papers.aqsgd.stages import Pipe
from experiments.papers.aqsgd.tasks import FineTuning

ScheduleName = Literal["gpipe", "1f1b"]


@dataclass(frozen=True)
class Method:
    """One method. ``store``: where messages are kept, of those that keep any, with ``precision`` bits a value;
    ``warmup_epochs``: visits of each sample that are sent uncompressed both ways. ``gradients``: the compressor of
    QuantizedAdam's momenta between replicas; empty for DDP under AdamW, plain or with the ``hook`` of PyTorch's."""

    name: str
    title: str
    color: str
    kind: str = "pipeline"
    forward: str = "raw"
    backward: str = "raw"
    store: Literal["memory", "disk"] = "memory"
    precision: int = 32
    warmup_epochs: int = 0
    schedule: ScheduleName = "gpipe"
    gradients: str = ""
    hook: Literal["", "bf16", "torch-powersgd"] = ""

    @property
    def warm_up_steps(self) -> int:
        """The first visits of samples, and steps like all later ones."""
        return 3

    def attached(self, task: FineTuning, seed: int, **options: Any) -> Pipe:
        """Build this rank's stage of ``task``, and send what crosses its boundaries so."""
        return Pipe(task, self, seed, **options)

    def place(self, folder: Path | None, num_samples: int) -> thinwire.store.Memory | thinwire.store.Disk:
        """The store of one training, whose files are in a folder of ``folder``."""
        if self.store == "memory":
            return thinwire.store.Memory(num_samples=num_samples)
        return thinwire.store.Disk(tempfile.mkdtemp(dir=folder), num_samples=num_samples)


FP32 = Method("fp32", "FP32", "#222222")


def direct(forward: int, backward: int) -> Method:
    """DirectQ: activations themselves are quantized."""
    name = f"direct {_bits(forward, backward)}"
    color = {2: "#e8a33d", 3: "#c0392b", 4: "#d4776c"}[forward]
    return Method(
        name,
        f"DirectQ {_bits(forward, backward)}",
        color,
        forward=f"direct({_forward(forward)})",
        backward=f"maxabs(bits={backward})",
    )


def aqsgd(
    forward: int,
    backward: int,
    *,
    store: Literal["memory", "disk"] = "memory",
    precision: int = 32,
    warmup_epochs: int = 0,
) -> Method:
    """AQ-SGD: what changed of each sample's activations since its last visit is quantized."""
    title = f"AQ-SGD {_bits(forward, backward)}"
    if store == "disk":
        title += ", disk"
    if precision != 32:
        title += f" m{precision}"
    color = {2: "#1f6fb2", 3: "#0a7d4f", 4: "#5fb88f"}[forward]
    if store == "disk":
        color = "#c9a3e8" if forward == 4 else "#8250c4"
    return Method(
        title.lower(),
        title,
        "#8250c4" if precision != 32 else color,
        forward=f"delta({_forward(forward)})",
        backward=f"maxabs(bits={backward})",
        store=store,
        precision=precision,
        warmup_epochs=warmup_epochs,
    )


def by_recipe(method: Method) -> Method:
    """The same, as the authors' code has it: gradients are rounded to the nearest, as activations are, and AQ-SGD sends
    the first epoch uncompressed both ways. DirectQ, which knows no samples, has no such epoch."""
    return replace(
        method,
        name=f"{method.name}, recipe",
        title=f"{method.title}, recipe",
        backward=method.backward.replace(")", ", rounding=nearest)"),
        warmup_epochs=int(method.forward.startswith("delta")),
    )


def _bits(forward: int, backward: int) -> str:
    """As the paper writes it."""
    return f"fw{forward} bw{backward}"


def _forward(bits: int) -> str:
    """The paper's quantizer (section 4.1): 2**bits intervals, of which values become the midpoints."""
    return f"maxabs(bits={bits}, midrise=True, rounding=nearest)"


# --- the full stack: activations, gradients, or both

GRADIENT_BITS = 4
GRADIENTS = f"minmax(bits={GRADIENT_BITS}, bucket=128)"
ACTIVATIONS = replace(aqsgd(3, 6), name="activations", title="activations only (AQ-SGD fw3 bw6)", color="#1f6fb2")
ONLY_GRADIENTS = Method("gradients", f"gradients only ({GRADIENT_BITS} bits)", "#8250c4", gradients=GRADIENTS)


def _stacked(method: Method) -> Method:
    """The same, and QuantizedAdam between replicas."""
    title = f"{method.title} + QuantizedAdam {GRADIENT_BITS}"
    return replace(method, name=title.lower(), title=title, gradients=GRADIENTS)


ADAM = Method("adam", "Adam, fp32", "#222222")
BF16 = Method("bf16", "Adam, bf16 gradients", "#888888", hook="bf16")
POWERSGD = Method("powersgd", "Adam, PyTorch's PowerSGD", "#c0392b", hook="torch-powersgd")
QUANTIZED = Method("quantized", f"QuantizedAdam, {GRADIENT_BITS} bits", "#0a7d4f", gradients=GRADIENTS)
WARMING = Method("warming", "QuantizedAdam in its warm-up", "#5fb88f", gradients="raw")

AQSGD, DIRECT = _stacked(aqsgd(3, 6)), _stacked(direct(3, 6))
CONTROL = _stacked(direct(2, 4))
"""Must fail: where it does not, a training forgives everything."""

SPLIT_BITS = "fw2 bw8[0.2]"


def _split(name: str, title: str, color: str, forward: str) -> Method:
    backward = "topk(density=0.2) | maxabs(bits=8)"
    return Method(name, f"{title} {SPLIT_BITS}", color, forward=forward, backward=backward)


_KEEPS_ZEROS = "minmax(bits=2, rounding=nearest)"
SPLIT = {
    "fp32": FP32,
    "aqsgd": _split("aqsgd", "AQ-SGD", "#1f6fb2", f"delta({_KEEPS_ZEROS})"),
    "direct": _split("direct", "DirectQ", "#e8a33d", f"direct({_KEEPS_ZEROS})"),
    "control": _split("control", "DirectQ without zero,", "#c0392b", direct(2, 8).forward),
}
"""Of split learning (figure 10), whose cuts lie behind ReLUs. The control's levels have no zero, and must fail."""

CENTER_BITS, SUM_BITS = (2, 3), (3, 4)
"""Of appendices G and F."""
