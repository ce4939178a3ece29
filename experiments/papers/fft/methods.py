"""The methods of the FFT paper's section 4.2."""

from __future__ import annotations

from dataclasses import replace

from experiments.framework.methods import FP32 as PLAIN, Method

THETA = 0.85
"""Share of the components that is dropped, by FFT and by top-k alike (section 4.2)."""
MILD, STRONG = 0.5, 0.9
"""Of figures 12 and 13: a theta that changes nothing, and one that does."""
STRONGER, STRONGEST = 0.99, 0.999
"""Keep a tenth and a hundredth of what `STRONG` does: graded controls, of which the second must be clearly worse."""

# Seven clusters of QSGD's 3 bits (section 4.2.1) take one scale for many values, and that of the largest: steps of a
# layer's L2 norm would leave next to nothing but zeros. TernGrad's scale is that of the largest by definition.
_QSGD = "qsgd(bits=3, bucket=layer, norm=linf)"


def _method(name: str, title: str, color: str, spec: str, exclude: tuple[str, ...] = ()) -> Method:
    return Method(name, title, color, spec=spec, transport="auto", exclude=exclude)


FP32 = replace(PLAIN, title="SGD fp32")
FFT = _method("fft", "FFT", "#0a7d4f", f"fft(theta={THETA}, feedback=False)")
TOPK = _method("topk", "top-k", "#c0392b", f"topk(density={1 - THETA:.2f}, feedback=False)")
QSGD = _method("qsgd", "QSGD", "#d98a00", _QSGD)
# The paper's TernGrad leaves the classifier's last layer as it is.
TERNGRAD = _method("terngrad", "TernGrad", "#8250c4", "terngrad()", exclude=("head",))
LOSSY = (FFT, TOPK, QSGD, TERNGRAD)

ALL = (FP32, *LOSSY)


def constant(theta: float) -> Method:
    """FFT at one theta, whose values are sent in 32 bits: what is lost is what is dropped."""
    return _method(f"theta {theta}", f"theta={theta}", "#0a7d4f", f"fft(theta={theta}, bits=32, feedback=False)")


def dropped(theta: float, step: int) -> Method:
    """FFT at ``theta`` that drops nothing from ``step`` on (theorem 3.5, section 4.1)."""
    spec = f"fft(theta=((0, {theta}), ({step}, 0.0)), bits=32, feedback=False)"
    return _method("dropped", f"theta={theta}, then 0", "#d98a00", spec)


def diminishing(theta: float, rate: float) -> Method:
    """FFT whose theta follows the learning rate η, ``θ² = Lη`` (theorem 3.5), from ``theta`` at η = ``rate`` on."""
    spec = f"fft(theta=diminishing, lipschitz={theta**2 / rate:g}, bits=32, feedback=False)"
    return _method("diminishing", f"theta² = Lη from {theta}", "#8250c4", spec)


CONTROL = replace(constant(STRONGEST), color="#222222")
"""Must be worse."""


def convergence(drop_step: int, rate: float) -> dict[str, Method]:
    """The methods of figure 13; at ``drop_step`` the learning rate falls from ``rate``."""
    return {
        "sgd": replace(FP32, title="SGD"),
        "mild": constant(MILD),
        "strong": replace(constant(STRONG), color="#c0392b"),
        "dropped": dropped(STRONG, drop_step),
        "stronger dropped": replace(dropped(STRONGER, drop_step), color="#1f6fb2"),
        "diminishing": diminishing(STRONGER, rate),
        "control": CONTROL,
    }
