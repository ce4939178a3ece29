"""``thinwire compare every``: one training with every compressor, and the biased ones without error feedback too."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rich.console import Console

from thinwire.compressors import parse
from thinwire.runtime import ParityError
from thinwire_tools.compare.compare import Bar, facts_of, share_of, write_figures
from thinwire_tools.compare.comparison import Comparison, Side
from thinwire_tools.compare.gpt import GPTConfig
from thinwire_tools.compare.paired import CONTROL, compare_training
from thinwire_tools.compare.statistics import Verdict
from thinwire_tools.compare.tasks import SIZES, GPTTask
from thinwire_tools.compare.variants import ALONE
from thinwire_tools.exits import FAILED, ends_command
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
_MEASURE = 10

TINY = replace(SIZES["small"], model=GPTConfig(width=128, layers=2), batch=4, steps=150, probe_every=15)
"""Half of the small task in both layers and batch."""


def every(
    *,
    seeds: int = 3,
    within: str = "1%",
    size: Literal["tiny", "small"] = "tiny",
    steps: int | None = None,
    ranks: int = 2,
    measure: int = _MEASURE,
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
    console = Console(highlight=False)
    with_feedback = _SMOKE if smoke else EVERY
    without = [WITHOUT[spec] for spec in with_feedback if spec in WITHOUT]
    task = _smoke_task() if smoke else {"tiny": TINY, "small": SIZES["small"]}[size]
    if steps is not None:
        task = replace(task, steps=steps, probe_every=max(1, steps // 10))
    with ends_command(ValueError, ImportError), ends_command(ParityError, code=FAILED):
        with Bar(console, task.steps) as bar:
            comparison = compare_training(
                task,
                [ALONE, *with_feedback, *without],
                seeds=range(1 if smoke else seeds),
                margin=share_of(within),
                control=CONTROL,
                num_ranks=ranks,
                measure=measure,
                watcher=bar,
            )
        parts = sections(comparison, without)
        convergence = list(converged(comparison))
    for title, part in parts:
        console.print()
        console.print(part.table(title))
    console.print("Biased compressors, with error feedback and without:")
    for line in convergence:
        console.print(f"  {line}", soft_wrap=True, markup=False)
    for line in comparison.remarks():
        console.print(line, soft_wrap=True)
    about = {"smoke": smoke, "measure": measure, "convergence": [str(c) for c in convergence]}
    write_figures(console, "thinwire compare every", comparison, facts_of(comparison) | about, json)
    return 0 if comparison.sensitive else 1


def _smoke_task() -> GPTTask:
    return replace(SIZES["smoke"], steps=20, probe_every=10, held_out_windows=32, probe_windows=8)


def sections(comparison: Comparison, without: Sequence[str]) -> list[tuple[str, Comparison]]:
    """The comparison's variants as a plan makes them, and those without error feedback."""
    unwrap = {str(parse(spec)) for spec in without}
    first = tuple(side for side in comparison.variants if side.name not in unwrap)
    second = tuple(side for side in comparison.variants if side.name in unwrap)
    return [
        ("Every compressor, biased ones with error feedback where a plan puts it", replace(comparison, variants=first)),
        ("Without error feedback", replace(comparison, variants=second)),
    ]


@dataclass(frozen=True)
class Convergence:
    """How one biased compressor ends, as a plan makes it and with its error feedback left out."""

    name: str
    feedback: str
    without: str | None

    def __str__(self) -> str:
        return f"{self.name}: {self.feedback}" + (f"; without error feedback: {self.without}" if self.without else "")


def converged(comparison: Comparison) -> Iterator[Convergence]:
    """For every biased variant, in a few words."""
    sides = {side.name: side for side in comparison.variants}
    pairs = {str(parse(spec)): str(parse(unwrap)) for spec, unwrap in WITHOUT.items()}
    for side in comparison.variants:
        if side.name == ALONE or parse(side.name).traits.unbiased or side.name in pairs.values():
            continue
        unwrap = sides.get(pairs.get(side.name, ""))
        yield Convergence(side.name, ending(comparison, side), ending(comparison, unwrap) if unwrap else None)


def ending(comparison: Comparison, side: Side) -> str:
    """How ``side`` ends, beside the baseline."""
    start = math.fsum(run.losses[0] for run in side.runs) / len(side.runs)
    if not side.held_out_loss < start:
        return "diverges"
    judged = comparison.judge(side)
    said = {Verdict.WITHIN: "converges to the same loss", Verdict.BEYOND: "ends at a higher loss"}
    return f"{said.get(judged.verdict, 'undecided')} ({judged.estimate.mean:+.2%})"
