"""Which compressors are measured, what family each belongs to, and where its formula comes from."""

from __future__ import annotations

import inspect
import re

from thinwire.compressors import Chain, Coded, Compressor, Summed, Wrapper

SERIES: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("minmax(bits={}, bucket=128)", (1, 2, 3, 4, 6, 8)),
    ("minmax(bits={}, bucket=128, rounding=nearest)", (2, 4, 8)),
    ("minmax(bits={}, bucket=1024)", (4, 8)),
    ("lattice(bits={}, bucket=1024)", (4, 8)),
    ("levels(bits={}, bucket=1024)", (2, 4)),
    ("gaussian(bits={})", (2, 4)),
    ("maxabs(bits={})", (2, 4, 8)),
    ("maxabs(bits={}, scale=row, rounding=nearest)", (4,)),
    ("terngrad({})", ("", "clip=2.5", "bucket=256")),
    ("shared_terngrad", ("",)),
    ("qsgd(bits={})", (2, 3, 4, 6, 8)),
    ("qsgd(bits={}, norm=linf)", (3, 4)),
    ("qsgd(levels={}, bucket=layer)", (64,)),
    ("natural", ("",)),
    ("rangefloat(bits={})", (6, 8, 10)),
    ("cast({})", ("bf16", "fp16")),
    ("intsgd(bits={})", (8,)),
    ("intsgd(bits={}, rounding=determ)", (8,)),
    ("heuristic_intsgd(bits={})", (8, 32)),
    ("onebit(bucket={})", (64, 512)),
    ("sign", ("",)),
    ("sign(bucket={})", (128,)),
    ("topk(density={})", (0.001, 0.01, 0.05, 0.15, 0.3)),
    ("topk(density={}, select=sampled)", (0.01,)),
    ("topk(density={}) | minmax(bits=8)", (0.01, 0.05, 0.15)),
    ("globaltopk(density={})", (0.01, 0.05)),
    ("chunktopk(k={})", (64,)),
    ("threshold(lam={})", (0.001, 0.003)),
    ("randk(density={})", (0.01, 0.1)),
    ("ef(randk(density={}))", (0.1,)),
    ("truncate(gamma={})", (10,)),
    ("fft(theta={})", (0.995, 0.98, 0.95, 0.9, 0.85, 0.7, 0.5, 0.2)),
    ("fft(theta={}, bits=6)", (0.85,)),
    ("fft(theta=0.85, block={})", (256, 4096, "whole")),
    ("powersgd(rank={})", (1, 2, 4, 8, 16)),
    ("atomo(rank={})", (4,)),
)
"""Templates of specs, and what is put into them. Thresholds fit the demo's gradients, whose deviation is 0.0007."""

SMOKE = (
    *("minmax(bits=2, bucket=128)", "minmax(bits=4, bucket=128)", "levels(bits=4, min_numel=0)"),
    *(
        "terngrad()",
        "qsgd(bits=3)",
        "natural",
        "cast(bf16)",
        "onebit",
        "threshold(lam=0.01)",
        "globaltopk(density=0.05)",
    ),
    *("topk(density=0.15)", "topk(density=0.05) | minmax(bits=8)", "randk(density=0.1)", "powersgd(rank=2)"),
    *("fft(theta=0.95)", "fft(theta=0.85)", "fft(theta=0.3)"),
)

FAMILIES = {
    "min-max": ("minmax", "lattice", "levels", "gaussian"),
    "max-abs": ("maxabs", "terngrad", "shared_terngrad"),
    "QSGD": ("qsgd",),
    "floats": ("natural", "rangefloat", "cast"),
    "integers": ("intsgd", "heuristic_intsgd"),
    "one bit": ("onebit", "sign"),
    "top-k": ("topk", "threshold", "globaltopk", "chunktopk"),
    "random": ("randk", "truncate"),
    "FFT": ("fft",),
    "low rank": ("powersgd", "atomo"),
}
_CITATION = re.compile(r"\(([^()]*(?:\b(?:19|20)\d\d\b|\bthesis\b|\bsection\b|\bS\d\b)[^()]*)\)")
_SENTENCE = re.compile(r"[.,:;](?:\s|$)")
_NAME = re.compile(r"\w+")


def default_specs() -> list[str]:
    return [template.format(value) for template, values in SERIES for value in values]


def family(compressor: Compressor) -> str:
    """Its family; "other" for one from another package."""
    names = [name for name in _NAME.findall(str(compressor)) if name not in ("ef", "dgc")]
    return next((title for title, members in FAMILIES.items() if names and names[0] in members), "other")


def source(compressor: Compressor) -> str:
    """Where its formula comes from: the first work that its documentation, or that of its module, cites; or else what
    the former says first."""
    if isinstance(compressor, Wrapper):
        return source(compressor.inner)
    if isinstance(compressor, Chain):
        return f"{source(compressor.first)} | {source(compressor.values)}"
    kind = type(compressor)
    doc = inspect.getdoc(kind) or str(compressor)
    for text in (doc, inspect.getdoc(inspect.getmodule(kind)) or ""):
        cited = _CITATION.search(" ".join(text.split("\n\n")[0].split()))
        if cited:
            return cited[1]
    return _SENTENCE.split(" ".join(doc.split()))[0].replace("``", "")


def meets(compressor: Compressor) -> str:
    """How its messages meet others': "summed" by a native all-reduce, "coded" (owners add and encode again) or
    "gathered" (everybody decodes everybody's)."""
    if isinstance(compressor, Summed):
        return "summed"
    return "gathered" if isinstance(compressor, Coded) and compressor.gathered else "coded"
