"""Figures 5 and 15: recorded gradients as receivers see them."""

from __future__ import annotations

import numpy as np

from thinwire.compressors import parse
from thinwire.repro.fft import methods, plots
from thinwire.repro.fft.findings import Finding
from thinwire.repro.fft.methods import FFT, LOSSY, QSGD, TERNGRAD, TOPK
from thinwire.repro.fft.reconstruct import (
    Reconstruction,
    distance,
    histogram,
    join,
    num_levels,
    quantiles,
    reconstruct,
    share_with_least_error,
)
from thinwire.repro.fft.study import Study

_SHOWN = 200
_BINS = 81
_PAPER_ERROR = {"fft": 0.0209, "topk": 0.0246}
_LEAST_ERROR_SHARE = 0.997


def figure_5(study: Study) -> list[Finding]:
    """FFT and top-k at one theta, without quantisation: which is nearer to the gradient?"""
    gradients = study.gradients()
    middle = len(gradients.steps) // 2
    specs = {"fft": methods.SPECS["fft unquantised"], "topk": methods.SPECS["topk"]}
    found = {
        name: [reconstruct(gradients, i, parse(s)) for i in range(len(gradients.steps))] for name, s in specs.items()
    }
    errors = {name: [part.relative_error for part in parts] for name, parts in found.items()}
    shown = {name: parts[middle] for name, parts in found.items()}
    start = shown["fft"].exact.abs().argmax().clamp(_SHOWN // 2, shown["fft"].exact.numel() - _SHOWN // 2) - _SHOWN // 2
    titles = [f"{m.title}: error {errors[m.name][middle]:.3f} of the norm" for m in (FFT, TOPK)]
    figure, panels = plots.canvas(2, titles=titles, x=f"element, from {int(start)}", y="gradient")
    for axes, method in zip(panels, (FFT, TOPK), strict=True):
        part = slice(int(start), int(start) + _SHOWN)
        axes.plot(shown[method.name].exact[part].numpy(), color="#aaaaaa", linewidth=1.5, label="sent")
        axes.plot(shown[method.name].received[part].numpy(), color=method.colour, linewidth=1, label="received")
    plots.save(figure, study.picture("5"))
    mean = {name: float(np.mean(values)) for name, values in errors.items()}
    claim = "at one theta, FFT's error (0.0209) is below top-k's (0.0246)"
    text = f"relative errors {mean['fft']:.3f} and {mean['topk']:.3f} at theta={methods.THETA}, unquantised"
    return [
        Finding(
            "5",
            f"relative_error/{name}",
            mean[name],
            "",
            claim if name == "fft" else "",
            text,
            mean["fft"] < mean["topk"],
            {"steps": gradients.steps, "errors": errors[name], "paper": _PAPER_ERROR[name], "spec": specs[name]},
        )
        for name in specs
    ]


def figure_15(study: Study) -> list[Finding]:
    """Histograms of what is received by each method, and the distribution of its error."""
    gradients = study.gradients()
    steps = range(len(gradients.steps))
    codecs = {method.name: parse(methods.SPECS[method.name]) for method in LOSSY}
    found = {name: join([reconstruct(gradients, i, codec) for i in steps]) for name, codec in codecs.items()}
    edges = _edges(found["fft"])
    _draw_15(study, found, edges)
    distances = {name: distance(part, edges) for name, part in found.items()}
    rows = [
        Finding(
            "15",
            f"distance/{name}",
            value,
            "",
            "FFT alone keeps the distribution of the gradient" if name == "fft" else "",
            "distance of histograms: " + ", ".join(f"{m.title} {distances[m.name]:.2f}" for m in LOSSY),
            distances["fft"] <= min(distances.values()),
            {"edges": edges.tolist(), "histogram": histogram(found[name].received, edges).tolist()},
        )
        for name, value in distances.items()
    ]
    errors = {name: part.errors for name, part in found.items()}
    for name in errors:
        share = share_with_least_error(errors, name)
        rows.append(
            Finding(
                "15",
                f"least_error_share/{name}",
                share,
                "",
                "FFT's errors are the least for 99.7 % of the gradients" if name == "fft" else "",
                f"over {share:.1%} of the distribution",
                share >= _LEAST_ERROR_SHARE if name == "fft" else None,
                {
                    "error_quantiles": quantiles(errors[name], 101).tolist(),
                    "relative_error": found[name].relative_error,
                },
            )
        )
    middle = gradients.layers[len(gradients.steps) // 2][0]
    layer = max(middle, key=lambda part: part.numel())
    for method, levels in ((QSGD, 7), (TERNGRAD, 3)):
        count = num_levels(layer, codecs[method.name])
        rows.append(
            Finding(
                "15",
                f"levels/{method.name}",
                count,
                "",
                f"{method.title} shows {levels} clusters",
                f"{count} values received of one layer ({method.spec})",
                count == levels,
            )
        )
    return rows


def _edges(reconstruction: Reconstruction) -> np.ndarray:
    """Bins over all but the outermost thousandth of the gradient."""
    limit = float(np.quantile(reconstruction.exact.abs().numpy(), 0.999))
    return np.linspace(-limit, limit, _BINS) if limit else np.linspace(-1.0, 1.0, _BINS)


def _draw_15(study: Study, found: dict[str, Reconstruction], edges: np.ndarray) -> None:
    titles = [f"received by {method.title}" for method in LOSSY] + ["error"]
    y = ["share"] * len(LOSSY) + ["share of elements with at most this error"]
    figure, panels = plots.canvas(len(LOSSY) + 1, titles=titles, x="gradient (last bars: all beyond)", y=y)
    middles = (edges[1:] + edges[:-1]) / 2
    for axes, method in zip(panels, LOSSY, strict=False):
        part = found[method.name]
        axes.bar(middles, histogram(part.received, edges), width=edges[1] - edges[0], color=method.colour, alpha=0.6)
        axes.step(middles, histogram(part.exact, edges), where="mid", color="#333333", linewidth=1, label="sent")
        axes.set_yscale("log")
    for method in LOSSY:
        at = quantiles(found[method.name].errors)
        panels[-1].plot(at, np.linspace(0, 1, len(at)), color=method.colour, label=method.title)
    panels[-1].set(xscale="symlog", xlabel="|sent − received|")
    least = float(np.quantile(found["fft"].errors.numpy(), 0.01))
    panels[-1].set_xscale("symlog", linthresh=max(least, 1e-12))
    plots.save(figure, study.picture("15"))
