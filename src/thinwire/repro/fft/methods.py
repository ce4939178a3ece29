"""The ways that gradients travel in the FFT paper's section 4.2: the one list of their specs."""

from __future__ import annotations

from dataclasses import dataclass

THETA = 0.85
"""Share of the components that is dropped, by FFT and by top-k alike (section 4.2)."""

NOTHING = "nothing"
"""Sends nothing, so that ranks drift apart: how fast a step can be at best."""

_FFT = "bits=10, block=4096"
# Seven clusters of QSGD's 3 bits (section 4.2.1) take one scale for many values, and that of the largest: steps of a
# layer's L2 norm would leave next to nothing but zeros. TernGrad's scale is that of the largest by definition.
_QSGD = "qsgd(bits=3, bucket=layer, norm=linf)"

SPECS = {
    "fft": f"fft(theta={THETA}, {_FFT}, feedback=False)",
    "topk": f"topk(density={1 - THETA:.2f}, feedback=False)",
    "qsgd": _QSGD,
    "terngrad": "terngrad()",
    "fft ef": f"fft(theta={THETA}, {_FFT})",
    "topk ef": f"topk(density={1 - THETA:.2f})",
    "qsgd ef": f"ef({_QSGD})",
    "terngrad ef": "ef(terngrad())",
    "fft unquantised": f"fft(theta={THETA}, bits=32, block=whole, feedback=False)",
    "fft theta": f"fft(theta={{theta}}, {_FFT}, feedback=False)",
    "fft theta to 0": f"fft(theta=((0, {{theta}}), ({{step}}, 0.0)), {_FFT}, feedback=False)",
}
"""Compressors by method; "ef": with error feedback, which the plan adds to biased ones on its own. TernGrad's error can
be larger than the gradient, and its residual grows: feedback is not for it, and it is here to be seen so."""


@dataclass(frozen=True)
class Method:
    """One way of sending gradients.

    ``ratio`` is the compression ratio that the paper counts for it, ``accuracy`` its loss of top-1 accuracy there in
    percentage points, ``speedup`` its speed over fp32 (table 2, ResNet-32). ``exclude``: layers that stay raw.
    """

    name: str
    title: str
    colour: str
    ratio: float = 1.0
    accuracy: float = 0.0
    speedup: float = 1.0
    exclude: tuple[str, ...] = ()

    @property
    def spec(self) -> str | None:
        """Its spec; None for plain DDP."""
        return SPECS.get(self.name)

    def with_feedback(self) -> Method:
        """The same with error feedback; the paper has no figures of that."""
        return Method(f"{self.name} ef", f"{self.title} + EF", self.colour, self.ratio, exclude=self.exclude)


FP32 = Method("fp32", "SGD fp32", "#555555")
FFT = Method("fft", "FFT", "#0a7d4f", 21.3, 0.12, 1.33)
TOPK = Method("topk", "top-k", "#c0392b", 6.67, 1.80, 1.12)
QSGD = Method("qsgd", "QSGD", "#d98a00", 10.6, 3.45, 1.21)
# The paper's TernGrad leaves the classifier's last layer as it is.
TERNGRAD = Method("terngrad", "TernGrad", "#8250c4", 16.0, 5.21, 1.24, exclude=("head",))
LOSSY = (FFT, TOPK, QSGD, TERNGRAD)


def constant(theta: float) -> str:
    """FFT at one theta, without error feedback."""
    return SPECS["fft theta"].format(theta=theta)


def dropped(theta: float, step: int) -> str:
    """FFT at ``theta`` that drops nothing from ``step`` on, but still sends 10 bits (theorem 3.5, section 4.1)."""
    return SPECS["fft theta to 0"].format(theta=theta, step=step)


def all_specs() -> list[str]:
    """Every spec that the figures use, with a theta and a step filled in."""
    return [spec.format(theta=THETA, step=1) if "{" in spec else spec for spec in SPECS.values()]
