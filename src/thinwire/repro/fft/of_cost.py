"""Figures 6 and 10: what the bitmap costs, and when compression pays at all."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from thinwire.compressors import parse
from thinwire.lab.units import format_rate
from thinwire.repro import plots
from thinwire.repro.fft import methods
from thinwire.repro.fft.cost import (
    Throughputs,
    measure,
    median_seconds,
    message_bytes,
    minimal_ratio,
    ratio_with_bitmap,
    useful_bandwidth,
)
from thinwire.repro.fft.study import Study
from thinwire.repro.findings import Finding

_MESSAGE_BYTES = 100_000_000
_RATIOS = (2, 5, 10, 20, 40, 80)
_THETAS = (0.5, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99)
_LIMITED = 0.8
_ETHERNET, _INFINIBAND = 10e9, 56e9
_PAPER_RATIO, _PAPER_SELECTION, _PAPER_LIMIT = 30, 12e9, 22e9
_FACTORS = (1, 4, 16)
_MOST_RATIO = 40
_SIDEWAYS: Any = {"rotation": 90, "ha": "right", "va": "top", "fontsize": "small", "color": "#888888"}


def figure_6(study: Study) -> list[Finding]:
    """100 MB of gradients, with the status bitmap and without."""
    without = [message_bytes(_MESSAGE_BYTES, k, bitmap=False) for k in _RATIOS]
    with_it = [message_bytes(_MESSAGE_BYTES, k, bitmap=True) for k in _RATIOS]
    numel = _MESSAGE_BYTES // 4
    sent = [parse(methods.constant(theta)).wire_bytes((numel,)) for theta in _THETAS]
    figure, (axes,) = plots.canvas(
        1, titles=["100 MB of gradients"], x="compression ratio without the bitmap", y="message (MB)"
    )
    axes.plot(_RATIOS, np.array(without) / 1e6, color="#aaaaaa", marker="o", label="values alone")
    axes.plot(_RATIOS, np.array(with_it) / 1e6, color="#c0392b", marker="o", label="with the bitmap")
    at = [_counted(theta) for theta in _THETAS]
    axes.plot(at, np.array(sent) / 1e6, color="#0a7d4f", marker="o", label="thinwire's fft: 10 bits, all included")
    axes.set(xscale="log", yscale="log")
    plots.save(figure, study.picture("6"))
    twenty, forty = ratio_with_bitmap(20), ratio_with_bitmap(40)
    rows = [
        Finding(
            "6",
            "ratio_with_bitmap",
            twenty,
            "x",
            "beyond a ratio of 20 dropping more gains little, for the bitmap",
            f"20x becomes {twenty:.1f}x with it, 40x {forty:.1f}x: {forty / twenty - 1:.0%} gained instead of 100 %",
            forty / twenty / 2 < _LIMITED,
            {"ratios": _RATIOS, "bytes_without": without, "bytes_with": with_it},
        )
    ]
    counted = _counted(methods.THETA)
    real = _MESSAGE_BYTES / parse(methods.SPECS["fft"]).wire_bytes((numel,))
    return [
        *rows,
        Finding(
            "6",
            "ratio_on_the_wire",
            real,
            "x",
            f"theta={methods.THETA} and 10 bits compress {counted:.1f}x, the bitmap not counted (section 4.2)",
            f"{real:.1f}x with everything that travels",
            real >= 0.95 * counted,
            {"thetas": _THETAS, "bytes": sent, "as_counted_by_the_paper": at},
        ),
    ]


def _counted(theta: float) -> float:
    """Compression ratio of FFT with 10 bits as the paper counts it: 32/10 from the float, and no bitmap."""
    return 32 / 10 / (1 - theta)


def figure_10(study: Study) -> list[Finding]:
    """The least useful ratio over the link's rate, from throughputs measured here."""
    scale = study.scale
    speeds = measure(scale.buffer_bytes // 4, methods.THETA, scale.repeats)
    x = torch.randn(scale.buffer_bytes // 4, generator=torch.Generator().manual_seed(0))
    codec = parse(methods.SPECS["fft"])
    built = median_seconds(lambda: codec.roundtrip(x), max(1, scale.repeats // 2)) / scale.buffer_bytes
    _draw_10(study, speeds, built)
    model = 2 * speeds.seconds_per_byte
    limit_bps = 8 * useful_bandwidth(model)
    built_limit_bps = 8 * useful_bandwidth(built)
    needed, fast = minimal_ratio(_ETHERNET / 8, model), minimal_ratio(_INFINIBAND / 8, model)
    said = {_ETHERNET: f"{needed:.2f}", _INFINIBAND: f"{fast:.2f}"}
    more = {"throughputs": asdict(speeds), "limit_bps": limit_bps, "threads": torch.get_num_threads()}
    return [
        Finding(
            "10",
            "minimal_ratio/10gbit",
            needed,
            "x",
            "a ratio of 2 is enough on 10 Gbit/s Ethernet (section 3.3)",
            f"it takes {said[_ETHERNET]}" if math.isfinite(needed) else f"none pays above {format_rate(limit_bps)}",
            needed <= 2,
            more,
        ),
        Finding(
            "10",
            "minimal_ratio/56gbit",
            fast,
            "x",
            "on 56 Gbit/s InfiniBand it takes about 30 (section 3.3)",
            f"it takes {said[_INFINIBAND]}" if math.isfinite(fast) else f"none pays above {format_rate(limit_bps)}",
            _PAPER_RATIO / 2 <= fast <= 2 * _PAPER_RATIO,
        ),
        Finding(
            "10",
            "useful_rate",
            limit_bps,
            "bit/s",
            "selection at 12 GB/s leaves no useful ratio above 22 Gbit/s (section 3.3)",
            f"here selection does {speeds.select / 1e9:.2f} GB/s and none is left above {format_rate(limit_bps)}",
            limit_bps <= _PAPER_LIMIT if speeds.select <= _PAPER_SELECTION else None,
        ),
        Finding(
            "10",
            "useful_rate_as_built",
            built_limit_bps,
            "bit/s",
            "",
            f"encoding and decoding pay up to {format_rate(built_limit_bps)}",
            None,
            {"spec": methods.SPECS["fft"], "seconds_per_byte": built},
            aside="what thinwire's own fft allows",
        ),
    ]


def _draw_10(study: Study, speeds: Throughputs, built: float) -> None:
    titles = ["selection T_s sped up", "packing T_p sped up"]
    figure, panels = plots.canvas(2, titles=titles, x="link (bit/s)", y="least useful compression ratio k")
    # The other way round, so that lines reach the top: on which link a ratio just pays.
    ratios = np.geomspace(1.001, _MOST_RATIO, 200)
    pays = 8 * (1 - 1 / ratios)
    for axes, name in zip(panels, ("select", "pack"), strict=True):
        for factor in _FACTORS:
            faster = replace(speeds, **{name: factor * getattr(speeds, name)})
            label = "as measured" if factor == 1 else f"{factor} times"
            axes.plot(pays * useful_bandwidth(2 * faster.seconds_per_byte), ratios, label=label)
        axes.plot(
            pays * useful_bandwidth(built),
            ratios,
            color="#333333",
            linestyle="--",
            label="thinwire's fft, there and back",
        )
        for rate, link in ((_ETHERNET, "10 Gbit/s"), (_INFINIBAND, "56 Gbit/s")):
            axes.axvline(rate, color="#aaaaaa", linewidth=1)
            axes.annotate(link, (rate, _MOST_RATIO), (-3, -3), textcoords="offset points", **_SIDEWAYS)
        axes.set(xscale="log", xlim=(10e6, 100e9), ylim=(1, _MOST_RATIO))
    plots.save(figure, study.picture("10"))
