"""``thinwire compare every``: one training with every compressor, and the biased ones without error feedback too."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from thinwire_tools.compare.compare import conduct
from thinwire_tools.compare.gpt import GPTConfig
from thinwire_tools.compare.paired import CONTROL
from thinwire_tools.compare.tasks import SIZES
from thinwire_tools.compare.variants import ALONE
from thinwire_tools.results import OutputFile

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
"""Each at a sensible setting; a plan puts error feedback around those that want it. All train by AdamW, beside whose
momentum `DGC` must not have one of its own."""

WITHOUT = {
    "topk(density=0.01)": "topk(density=0.01, feedback=False)",
    "onebit": "onebit(feedback=False)",
    "sign": "sign(feedback=False)",
    "powersgd(rank=4)": "powersgd(rank=4, feedback=False)",
    "fft(theta=0.85)": "fft(theta=0.85, feedback=False)",
}
"""Biased ones, and the same without error feedback."""

_SMOKE = ("minmax(bits=4, bucket=128)", "onebit", "topk(density=0.01)", "powersgd(rank=4)")
_SMOKE_TASK = replace(SIZES["smoke"], steps=20, probe_every=10, held_out_windows=32, probe_windows=8)

TINY = replace(SIZES["small"], model=GPTConfig(width=128, layers=2), batch=4, steps=150, probe_every=15)
"""Half of the small task in both layers and batch."""


def every(
    *,
    seeds: int = 3,
    within: str = "1%",
    size: Literal["tiny", "small"] = "tiny",
    steps: int | None = None,
    ranks: int = 2,
    measure: int = 10,
    smoke: bool = False,
    json: OutputFile = None,
) -> int:
    """Train a GPT with every compressor: held-out loss, difference to fp32's, bytes, error of the mean (alpha).

    Paired runs as in `thinwire compare`, at fp32's learning rate, by AdamW; then the biased ones without their error
    feedback. In the row "alone" ranks send nothing: a compressor that ends above it is worse than no network. Exits
    with 1 if the control, which must fail, does not.

    Examples:
      thinwire compare every
      thinwire compare every --steps 600 --json every.json
      thinwire compare every --smoke

    Args:
        seeds: number of seeds, each one paired run of every variant; a verdict takes at least 2.
        within: how much higher a loss may be and still be the same: 1% or 0.01.
        size: of the GPT: tiny (0.4 M parameters, 150 steps) or small (that of `thinwire compare`).
        steps: of each run, in place of the size's.
        ranks: number of ranks, over loopback.
        measure: steps between two measurements of alpha.
        smoke: a tiny model, few compressors, few steps and one seed: the same path, no figures worth keeping.
        json: write the figures to this file.
    """
    specs = _SMOKE if smoke else EVERY
    task = _SMOKE_TASK if smoke else {"tiny": TINY, "small": SIZES["small"]}[size]
    if steps is not None:
        task = replace(task, steps=steps, probe_every=max(1, steps // 10))
    variants = [ALONE, *specs, *(WITHOUT[spec] for spec in specs if spec in WITHOUT)]
    options = {"control": CONTROL, "num_ranks": ranks, "measure": measure}
    seeds = 1 if smoke else seeds
    found = conduct("thinwire compare every", task, variants, seeds=seeds, within=within, json=json, **options)
    return 0 if found.sensitive else 1
