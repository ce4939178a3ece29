"""The methods of sending gradients in the IntSGD paper's section 5."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from experiments.framework.methods import Method

Network = Literal["pictures", "words"]
"""What is trained: a ResNet on images, or an LSTM on words."""
NETWORKS: dict[Network, str] = {"pictures": "ResNet", "words": "LSTM"}


def _method(name: str, title: str, color: str, spec: str, algorithm: str = "sra") -> Method:
    return Method(name, title, color, spec=spec, algorithm=algorithm, transport="auto")


SGD = Method("sgd", "SGD, all-reduce", "#555555", kind="all-reduce", spec="")
SGD_GATHERED = Method("sgd all-gather", "SGD, all-gather", "#aaaaaa", kind="all-gather", spec="")
QSGD = _method("qsgd", "QSGD", "#d98a00", "qsgd(levels=64, bucket=layer)", "allgather")
NATSGD = _method("natsgd", "NatSGD", "#8250c4", "natural()", "allgather")
POWERSGD = _method("powersgd", "PowerSGD (EF)", "#3b6fb6", "powersgd(rank=2)")
DETERM = _method("intsgd determ", "IntSGD (determ.)", "#7fb800", "intsgd(bits=8, rounding=determ)")
RANDOM = _method("intsgd", "IntSGD (random)", "#0a7d4f", "intsgd(bits=8)")
RANDOM_32 = _method("intsgd 32", "IntSGD, int32", "#00b3a4", "intsgd(bits=32)")
HEURISTIC = _method("heuristic", "Heuristic IntSGD, int8", "#c0392b", "heuristic_intsgd(bits=8)")
HEURISTIC_32 = _method("heuristic 32", "Heuristic IntSGD, int32", "#e58a80", "heuristic_intsgd(bits=32)")

TABLE = (SGD_GATHERED, QSGD, NATSGD, SGD, POWERSGD, DETERM, RANDOM)
"""Of tables 2 and 3, in their order."""
METHODS = (*TABLE, RANDOM_32, HEURISTIC, HEURISTIC_32)
TRAINED = tuple(method for method in METHODS if method is not SGD_GATHERED)
"""An all-gather of fp32 has the mean of an all-reduce: it is only timed."""


def on(network: Network, method: Method) -> Method:
    """``method`` as the paper has it on ``network``: PowerSGD takes rank 4 on words."""
    return replace(method, spec="powersgd(rank=4)") if network == "words" and method is POWERSGD else method


def sensitive(beta: float, eps: float) -> Method:
    """IntSGD with other constants than its default ones (C.4)."""
    constants = f"beta={beta:g}, eps={eps:g}"
    return replace(RANDOM, title=f"IntSGD, {constants}", spec=f"intsgd(bits=8, {constants})")
