"""Figures 5 and 15: recorded gradients as receivers see them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from thinwire.compressors import parse
from thinwire.repro import plots
from thinwire.repro.fft import methods
from thinwire.repro.fft.methods import FFT, LOSSY, QSGD, TERNGRAD, TOPK
from thinwire.repro.fft.reconstruct import (
    Reconstruction,
    distance,
    histogram,
    join,
    largest_layer,
    num_levels,
    quantiles,
    reconstruct,
    reconstruct_layer,
    share_with_least_error,
)
from thinwire.repro.fft.study import Study
from thinwire.repro.findings import Finding

_SHOWN = 200
# Odd, so that zero lies within a bin.
_BINS = 81
_PAPER_ERROR = {"fft": 0.0209, "topk": 0.0246}
_LEAST_ERROR_SHARE = 0.997


def figure_5(study: Study) -> list[Finding]:
    """FFT and top-k at one theta, without quantisation: which is nearer to the gradient?"""
    gradients = study.gradients()
    steps, middle, layer = range(len(gradients.steps)), len(gradients.steps) // 2, largest_layer(gradients)
    specs = {"fft": methods.SPECS["fft unquantised"], "topk": methods.SPECS["topk"]}
    found = {name: [reconstruct(gradients, i, parse(spec)) for i in steps] for name, spec in specs.items()}
    errors = {name: [part.relative_error for part in parts] for name, parts in found.items()}
    absolute = {name: float(np.mean([float(part.errors.mean()) for part in parts])) for name, parts in found.items()}
    shown = {name: reconstruct_layer(gradients, middle, layer, parse(spec)) for name, spec in specs.items()}
    exact = shown["fft"].exact
    start = max(0, min(int(exact.abs().argmax()) - _SHOWN // 2, exact.numel() - _SHOWN))
    titles = [f"{m.title}: error {shown[m.name].relative_error:.0%} of the layer's norm" for m in (FFT, TOPK)]
    figure, panels = plots.canvas(2, titles=titles, x=f"element of {gradients.names[layer]}", y="gradient")
    at = np.arange(start, min(start + _SHOWN, exact.numel()))
    for axes, method in zip(panels, (FFT, TOPK), strict=True):
        axes.ticklabel_format(axis="y", scilimits=(-2, 3))
        axes.locator_params(axis="x", nbins=5)
        axes.plot(at, exact[at].numpy(), color="#aaaaaa", linewidth=1.5, label="sent")
        axes.plot(at, shown[method.name].received[at].numpy(), color=method.colour, linewidth=1, label="received")
    plots.save(figure, study.picture("5"))
    mean = {name: float(np.mean(values)) for name, values in errors.items()}
    claim = f"at one theta, FFT's error ({_PAPER_ERROR['fft']}) is below top-k's ({_PAPER_ERROR['topk']})"
    text = f"relative errors {mean['fft']:.3f} and {mean['topk']:.3f} at theta={methods.THETA}, unquantised"
    return [
        Finding(
            "5",
            f"relative_error/{name}",
            mean[name],
            "",
            claim if name == "fft" else "",
            text,
            mean["fft"] < mean["topk"] if name == "fft" else None,
            {
                "steps": gradients.steps,
                "errors": errors[name],
                "mean_absolute_error": absolute[name],
                "paper": _PAPER_ERROR[name],
                "spec": specs[name],
            },
        )
        for name in specs
    ]


def figure_15(study: Study) -> list[Finding]:
    """Histograms of what is received of the largest layer by each method, and the distribution of all errors."""
    gradients = study.gradients()
    steps, layer = range(len(gradients.steps)), largest_layer(gradients)
    codecs = {method.name: parse(methods.SPECS[method.name]) for method in LOSSY}
    # One layer of one step: others have other scales, and clusters vanish among them.
    by_step = {name: [reconstruct_layer(gradients, i, layer, codec) for i in steps] for name, codec in codecs.items()}
    distances = {name: float(np.mean([distance(p, _edges(p)) for p in parts])) for name, parts in by_step.items()}
    found = {name: join([reconstruct(gradients, i, codec) for i in steps]) for name, codec in codecs.items()}
    errors = {name: quantiles(part.errors) for name, part in found.items()}
    shown = {name: parts[len(steps) // 2] for name, parts in by_step.items()}
    _draw_15(study, gradients.names[layer], shown, errors)
    text = "distance of histograms: " + ", ".join(f"{m.title} {distances[m.name]:.2f}" for m in LOSSY)
    rows = [
        Finding(
            "15",
            f"distance/{name}",
            distances[name],
            "",
            "FFT's histogram is the closest to the original" if name == "fft" else "",
            text,
            distances["fft"] <= min(distances.values()) if name == "fft" else None,
            {"edges": (edges := _edges(part)).tolist(), "histogram": histogram(part.received, edges).tolist()},
        )
        for name, part in shown.items()
    ]
    for name in errors:
        share = share_with_least_error(errors, name)
        below = {m.title: share_with_least_error(errors, name, [m.name]) for m in LOSSY if m.name != name}
        rows.append(
            Finding(
                "15",
                f"least_error_share/{name}",
                share,
                "",
                "FFT's errors are the least for 99.7 % of the gradients" if name == "fft" else "",
                f"over {share:.1%} of the distribution; below "
                + ", ".join(f"{title}'s over {other:.0%}" for title, other in below.items()),
                share >= _LEAST_ERROR_SHARE if name == "fft" else None,
                {
                    "error_quantiles": quantiles(found[name].errors, 101).tolist(),
                    "relative_error": found[name].relative_error,
                },
            )
        )
    # The step that shows most: the outermost cluster of one side may be empty.
    own = [gradients.layers[i][0][layer] for i in steps]
    for method, levels in ((QSGD, 7), (TERNGRAD, 3)):
        count = max(num_levels(part, codecs[method.name]) for part in own)
        rows.append(
            Finding(
                "15",
                f"levels/{method.name}",
                count,
                "",
                f"{method.title} shows {levels} clusters (section 4.2.1)",
                f"up to {count} values received of one rank's layer ({method.spec})",
                count == levels,
            )
        )
    return rows


def _edges(reconstruction: Reconstruction) -> np.ndarray:
    """Bins over all but the outermost thousandth of the gradient."""
    limit = float(np.quantile(reconstruction.exact.abs().numpy(), 0.999)) or 1.0
    return np.linspace(-limit, limit, _BINS + 1)


def _draw_15(study: Study, layer: str, shown: Mapping[str, Reconstruction], errors: Mapping[str, np.ndarray]) -> None:
    titles = [f"{method.title}: {layer}" for method in LOSSY]
    y = ["share of elements"] * len(LOSSY) + ["share of elements with at most this error"]
    x = f"mean of {study.runs.num_ranks} ranks (last bars: all beyond)"
    figure, panels = plots.canvas(len(LOSSY) + 1, titles=[*titles, "error, all layers and steps"], x=x, y=y)
    edges = _edges(shown["fft"])
    for axes, method in zip(panels, LOSSY, strict=False):
        part = shown[method.name]
        received = histogram(part.received, edges)
        axes.stairs(received, edges, fill=True, color=method.colour, alpha=0.6, label="received")
        axes.stairs(histogram(part.exact, edges), edges, color="#333333", label="sent")
        axes.set_yscale("log")
        axes.ticklabel_format(axis="x", scilimits=(-2, 3))
    for method in LOSSY:
        at = errors[method.name]
        panels[-1].plot(at, np.linspace(0, 1, len(at)), color=method.colour, label=method.title)
    # What top-k sends is exact: its curve does not begin at 0.
    least = float(np.quantile(errors["fft"], 0.01))
    panels[-1].set(xlabel="|sent − received|", xscale="log", xlim=(max(least, 1e-12), None), ylim=(0, 1.02))
    plots.save(figure, study.picture("15"))
