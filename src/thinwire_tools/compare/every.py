"""The command ``thinwire compare every``: one training with every compressor, the biased ones also without feedback."""

from __future__ import annotations

from dataclasses import replace

from thinwire_tools.compare.gpt import GPTConfig
from thinwire_tools.compare.tasks import SIZES

EVERY = (
    "minmax(bits=4, bucket=128)",
    "lattice(bits=8, bucket=1024)",
    "levels(bits=4, bucket=1024, learn_at=(15, 75), min_numel=10000)",
    "gaussian(bits=4)",
    "qsgd(bits=4)",
    "maxabs(bits=4)",
    "terngrad(clip=2.5)",
    "shared_terngrad",
    "natural",
    "rangefloat(bits=8)",
    "cast(bf16)",
    "intsgd(bits=8)",
    "intdiana(bits=2)",
    "heuristic_intsgd(bits=8)",
    "onebit",
    "sign",
    "topk(density=0.01)",
    "topk(density=0.01) | minmax(bits=8)",
    "globaltopk(density=0.01)",
    "chunktopk(k=64)",
    "threshold(lam=0.003)",
    "dgc(topk(density=0.01), momentum=0)",
    "randk(density=0.1)",
    "ef(randk(density=0.1))",
    "truncate(gamma=10)",
    "fft(theta=0.85)",
    "powersgd(rank=4)",
    "atomo(rank=4)",
)
"""Compressors at sensible settings; a plan puts error feedback around those that want it. All train by AdamW, with
whose momentum `DGC` must not have one of its own."""

WITHOUT = {
    "topk(density=0.01)": "topk(density=0.01, feedback=False)",
    "onebit": "onebit(feedback=False)",
    "sign": "sign(feedback=False)",
    "powersgd(rank=4)": "powersgd(rank=4, feedback=False)",
    "fft(theta=0.85)": "fft(theta=0.85, feedback=False)",
}
"""Biased compressors, and the same without error feedback."""

SMOKE = ("minmax(bits=4, bucket=128)", "onebit", "topk(density=0.01)", "powersgd(rank=4)")
SMOKE_TASK = replace(SIZES["smoke"], steps=20, probe_every=10, held_out_windows=32, probe_windows=8)

TINY = replace(SIZES["small"], model=GPTConfig(width=128, layers=2), batch=4, steps=150, probe_every=15)
"""Task of half the small one's layers and batch."""
