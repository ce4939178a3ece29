"""``thinwire repro lgreco``: the thesis's chapter on L-GreCo, table by table, each beside what the thesis says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from thinwire.lab.units import parse_rate
from thinwire.repro import plots
from thinwire.repro.data import standard_library
from thinwire.repro.fft.images import load
from thinwire.repro.findings import Finding
from thinwire.repro.lgreco import methods, of_buckets, of_metric, of_policies, of_quality, of_ranks, of_solver, of_speed
from thinwire.repro.lgreco.study import CONTROL, NUM_RANKS, SMOKE, Scale, Study, Work
from thinwire.repro.parts import announce, check_counts, chosen_parts, finish, make_parts
from thinwire.repro.progress import Screen
from thinwire.repro.statistics import need_scipy

_DIFFERS = (
    "a GPT of 2 layers on the words of Python's standard library stands for Transformer-XL and Transformer-LM: its "
    "embedding, tied to the output and scaled as PaLM's, is two thirds of all parameters; a residual network of 4 "
    "stages on small digits for ResNet-18 and ResNet-50; gradients are fp32, the GPT's quality is its loss on held-out "
    "text",
    "trainings last a few hundred steps on 2 ranks, and policies decide every 40 of them instead of once an "
    "epoch; there are no dense steps at the beginning, and bytes count from the first plan on",
    f"quantisation is min-max, not QSGD, as CGX's own; PowerSGD's reference is rank {methods.RANK} on the GPT, whose "
    "matrices are 128 wide, instead of 32",
    "ranks are processes that share this machine's cores, on emulated links: 100 Mbit/s stands for several nodes, "
    "1 Gbit/s for the bus of one",
    "the overhead is that of decisions as far apart as by default, one in 500 steps, from seconds measured here",
    "policies of tables 3.8 and 4.5 are trained from one seed; figure 3.8 has them all choose on the same gradients",
    "global top-k takes the threshold of the step before: it waits for no layer, as the thesis's has to",
    "Rethink-GS has a threshold tuned by hand for this network",
    "AdaComp, which the thesis says did not converge, is left out",
)
"""In what this is not the thesis's experiment: kept beside the figures."""
_JUDGED = (
    "quality: the loss or accuracy lost is at most 1 % of fp32's, at 95 %, in a training that a control damages; bytes "
    "are counted and hold where every seed shows it; throughput: what is claimed to be faster is so in so many of the "
    "rounds, in which all take turns, that chance would do it in 5 % of all cases at most; a high correlation is one "
    "of at least 0.7, a regression close to 1 has an R² above 0.9, coefficients alike are at most 10 % above their "
    "mean, a stable ratio varies by at most 10 %"
)


@dataclass(frozen=True)
class _Part:
    """Tables and figures that are made together; a step takes about ``step_s``."""

    title: str
    make: Callable[[Study], list[Finding]]
    work: Callable[[Scale], Work]
    step_s: float
    start_s: float


# Rough, for the time that is foretold: on two cores of a 2020s server.
_SMOKE_START_S, _SMOKE_STEP_S = 4.0, 0.01
_PARTS = {
    "quality": _Part("tables 4.1 to 4.3: L-GreCo and uniform", of_quality.quality, of_quality.work, 0.035, 10.0),
    "policies": _Part("tables 3.8, 4.4, 4.5: policies", of_policies.policies, of_policies.work, 0.035, 5.0),
    "speed": _Part("figures 4.3, 4.4: throughput", of_speed.speed, of_speed.work, 0.12, 45.0),
    "ranks": _Part("figure 4.2: ranks", of_ranks.figure_4_2, of_ranks.work, 0.045, 20.0),
    "buckets": _Part("figures 4.5b, B.1: buckets", of_buckets.buckets, of_buckets.work, 0.045, 20.0),
    "metric": _Part("figure B.6a: the loss as a metric", of_metric.metric, of_metric.work, 0.025, 2.0),
    "solver": _Part("sections 4.4, 4.5: the solver", of_solver.solver, of_solver.work, 0.025, 25.0),
}


def lgreco(
    *,
    parts: tuple[str, ...] = tuple(_PARTS),
    seeds: int = 3,
    rounds: int | None = None,
    rate: str | None = None,
    smoke: bool = False,
    out: Path = Path("repro-lgreco"),
    json: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None,
) -> int:
    """Repeat section 3.6 and chapter 4 (L-GreCo) of Markov's thesis on this machine, claim by claim.

    A small GPT of words, whose embedding is its largest layer, and a small residual network train with gradients that
    are compressed uniformly, and with policies that choose each layer's compression while training goes on. Figures
    and tables become SVGs, and each of the thesis's claims a row: what it says, what was found here, and whether it
    holds, also where it does not. Takes about a quarter of an hour on two cores.

    Examples:
      thinwire repro lgreco
      thinwire repro lgreco --parts quality --seeds 5
      thinwire repro lgreco --parts speed buckets --rate 50mbit --json lgreco.json
      thinwire repro lgreco --smoke

    Args:
        parts: which to make: quality (tables 4.1 to 4.3), policies (tables 3.8, 4.4 and 4.5), speed (figures 4.3 and
            4.4), ranks (figure 4.2), buckets (figures 4.5b and B.1), metric (section 4.6.4), solver (section 4.5).
        seeds: paired trainings of what quality is judged of; a verdict takes at least 2.
        rounds: turns of every way that is timed; a verdict takes at least 5.
        rate: of each link (100mbit, 1gbit ...), emulated, instead of both 100 Mbit/s and 1 Gbit/s.
        smoke: tiny networks and few steps, under a minute: the same path, no figures worth keeping.
        out: folder for the pictures and the figures.
        json: write the figures to this file instead of OUT/repro-lgreco.json.
    """
    console = Console(highlight=False)
    try:
        chosen = chosen_parts(parts, _PARTS)
        scale = _scale(smoke, seeds, rounds)
        if rate is not None:
            parse_rate(rate)
        need_scipy()
        plots.need_matplotlib()
        load(None)
        standard_library()
    except (ValueError, ImportError, RuntimeError) as error:
        Console(stderr=True, highlight=False).print(f"thinwire repro lgreco: {error}", style="bold red", markup=False)
        return 64
    out.mkdir(parents=True, exist_ok=True)
    phases = _phases(chosen, scale)
    emulated = announce(console, sum(seconds for _, _, seconds in phases.values()))
    study = Study(scale, out, Screen(console, phases), emulated, rate)
    findings, failures = make_parts(console, study, {part: _PARTS[part].make for part in chosen})
    about = {
        "trained": {"gpt": dataclasses.asdict(scale.gpt), "cnn": dataclasses.asdict(scale.cnn)},
        "timed": dataclasses.asdict(study.model.task),
        "gradient_bytes": study.model.gradient_bytes,
        "num_ranks_trained": NUM_RANKS,
        "worlds_timed": scale.worlds,
        "rates": study.rates,
        "rounds": scale.rounds,
        "steps_a_turn": scale.steps,
        "seeds": scale.seeds,
        "margin": scale.margin,
        "control": CONTROL,
        "smoke": smoke,
        "differs_from_the_thesis": _DIFFERS,
        "judged": _JUDGED,
    }
    title, path = "L-GreCo, section 3.6 and chapter 4 of the thesis, as found here", json or out / "repro-lgreco.json"
    return finish(console, findings, failures, about, command="thinwire repro lgreco", title=title, out=out, path=path)


def _phases(chosen: Sequence[str], scale: Scale) -> dict[str, tuple[str, int, float]]:
    """Title, steps and predicted seconds of each part, without what an earlier one has made."""
    done, found = Work(), {}
    for part in chosen:
        of, work = _PARTS[part], _PARTS[part].work(scale)
        steps = max(1, work.steps_after(scale, done))
        start_s, step_s = (_SMOKE_START_S, _SMOKE_STEP_S) if scale is SMOKE else (of.start_s, of.step_s)
        found[part] = (of.title, steps, start_s + steps * step_s)
        done |= work
    return found


def _scale(smoke: bool, seeds: int, rounds: int | None) -> Scale:
    check_counts(seeds, rounds)
    if smoke:
        return SMOKE
    scale = replace(Scale(), seeds=seeds)
    return scale if rounds is None else replace(scale, rounds=rounds)
