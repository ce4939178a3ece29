"""``thinwire repro aqsgd``: the AQ-SGD paper's experiments, each beside what the paper says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from thinwire.repro import plots
from thinwire.repro.aqsgd import (
    of_breakdown,
    of_completions,
    of_curves,
    of_links,
    of_more,
    of_resume,
    of_throughput,
    of_time,
)
from thinwire.repro.aqsgd.study import (
    MORE_STAGES,
    MOST_STAGES,
    NUM_STAGES,
    SMOKE,
    Scale,
    Study,
    TaskName,
    Work,
    union,
)
from thinwire.repro.aqsgd.tasks import FineTuning
from thinwire.repro.data import standard_library
from thinwire.repro.findings import Finding
from thinwire.repro.parts import announce, check_counts, chosen_parts, finish, make_parts
from thinwire.repro.progress import Screen
from thinwire.repro.statistics import need_scipy

_DIFFERS = (
    "byte-level GPTs of 0.2 and 0.8 million parameters, first trained on one half of the source of Python's standard "
    "library, are fine-tuned on samples of the other half, where the paper has GPT2-1.5B and DeBERTa-1.5B on "
    "WikiText2, arXiv, QNLI and CoLA; classification tells samples from samples whose bytes are "
    "shuffled, and differences of its loss are shares of a coin toss's, ln 2",
    "2 stages unless 4 or 8 are named, where the paper has 8 machines; they are processes that share this machine's "
    "two cores, on emulated links, over gloo",
    "links are slower than the paper's by the factor that is printed: a micro-batch of so much smaller a network "
    "computes for less time and has smaller activations, and the factor makes wire to compute the paper's, by values a "
    "second; the backward pass takes twice the forward pass here, three times there",
    "micro-batches of 4 samples, 4 to a step (of 2 samples, 16 to a step, where steps are timed); the paper has "
    "micro-batches of 1 or 8 samples",
    "the first epoch is not left out: without a warm-up epoch only first activations travel whole (algorithm 1); "
    "figure 4 has the warm-up epoch of appendix D",
    "max-abs quantisation with a scale for every 128 values and stochastic rounding, which is unbiased as theorem 3.1 "
    "asks; two bits are the paper's wording, four intervals and their midpoints, rounded to the nearest",
    "the first and the last stage each have a copy of the embedding, which GPT2 shares",
    "steps are timed, and figure 4 starts, from weights that have had little training or none",
    "5 epochs instead of 10, from the same first training for all seeds; each task has the learning rate, of two or "
    "three tried, at which FP32 loses least on what is held out, and all ways have that",
    "fp16 has a fixed loss scale; bf16, which CPUs compute in faster, is beside it (appendix H.4)",
    "bits by link is no experiment of the paper's",
)
"""In what this is not the paper's experiment: kept beside the figures."""
_JUDGED = (
    "quality: the loss of the last epoch, in which each sample is visited once, is at most 1 % above FP32's, at 95 %, "
    "paired by seed, in trainings that DirectQ at 2 bits damages; throughput: what is claimed to be faster is so in so "
    "many of the rounds, in which all ways take turns, that chance would do it in 5 % of all cases at most; figure 4 "
    "is one training each"
)


@dataclass(frozen=True)
class _Part:
    """Tables and figures that are made together; a step of its own takes about ``step_s``, beside trainings."""

    title: str
    make: Callable[[Study], list[Finding]]
    work: Callable[[Scale], Work]
    step_s: float = 0.0
    start_s: float = 5.0


# Rough, for the time that is foretold: on two cores of a 2020s server.
_TRAINING_STEP_S: dict[tuple[TaskName, int], float] = {
    ("small", NUM_STAGES): 0.06,
    ("scratch", NUM_STAGES): 0.06,
    ("bf16", NUM_STAGES): 0.08,
    ("large", NUM_STAGES): 0.1,
    ("small", MORE_STAGES): 0.1,
    ("fp16", NUM_STAGES): 0.1,
    ("labels", NUM_STAGES): 0.06,
    ("deep", MOST_STAGES): 0.3,
}
_FIRST_STEP_S, _FIRST_STEP_S_PER_PARAMETER = 0.01, 1.2e-7
_SMOKE_START_S, _SMOKE_STEP_S = 3.0, 0.03
_PARTS = {
    "1": _Part("figure 1: activations and changes", of_curves.figure_1, of_curves.change_work),
    "3": _Part("figures 3, 7 to 9: loss by step", of_curves.figure_3, of_curves.curves_work),
    "t3": _Part("table 3: compute and wire", of_breakdown.table_3, of_breakdown.breakdown_work, 0.3),
    "2": _Part("table 2: throughput", of_throughput.table_2, of_throughput.throughput_work, 1.0, 25.0),
    "4": _Part("figure 4: time to the same loss", of_time.figure_4, of_time.time_work, 1.3),
    "labels": _Part("figure 3 (a, b): classification", of_more.labels, of_more.labels_work),
    "8": _Part("figure 9: eight stages", of_more.stages, of_more.stages_work),
    "fp16": _Part("figure 8: fp16", of_more.fp16, of_more.fp16_work),
    "links": _Part("bits by link", of_links.links, of_links.links_work, 0.4, 10.0),
    "resume": _Part("kill and resume", of_resume.resumed, of_resume.resume_work, 0.06, 40.0),
    "completions": _Part("appendix I: completions", of_completions.completions, of_completions.completions_work, 0.06),
}


def aqsgd(
    *,
    parts: tuple[str, ...] = tuple(_PARTS),
    seeds: int = 3,
    rounds: int | None = None,
    smoke: bool = False,
    out: Path = Path("repro-aqsgd"),
    json: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None,
) -> int:
    """Repeat the experiments of the AQ-SGD paper on this machine, claim by claim.

    Small GPTs are fine-tuned in pipelines of 2 to 8 stages whose activations and gradients travel as they are,
    quantised (DirectQ), or as what changed since a sample's last visit (AQ-SGD), and their steps are timed over slow
    links. Figures and tables become SVGs, and each of the paper's claims a row: what it says, what was found here, and
    whether it holds, also where it does not. Takes about 40 minutes on two cores.

    Examples:
      thinwire repro aqsgd
      thinwire repro aqsgd --parts 3 --seeds 5
      thinwire repro aqsgd --parts t3 2 --rounds 10 --json aqsgd.json
      thinwire repro aqsgd --smoke

    Args:
        parts: which to make: 1 (activations and their changes, zero-shot), 3 (loss by step, with figures 7 to 9), t3
            (table 3: compute and wire), 2 (table 2: throughput), 4 (figure 4: time to the same loss), labels (figure 3
            a and b: classification), 8 (eight stages), fp16, links (bits by each link's rate), resume (kill and go
            on), completions (appendix I).
        seeds: paired trainings of what quality is judged of; a verdict takes at least 2.
        rounds: turns of every way that is timed; a verdict takes at least 5.
        smoke: tiny networks and few steps, under a minute: the same path, no figures worth keeping.
        out: folder for the pictures and the figures.
        json: write the figures to this file instead of OUT/repro-aqsgd.json.
    """
    console = Console(highlight=False)
    try:
        chosen = chosen_parts(parts, _PARTS)
        scale = _scale(smoke, seeds, rounds)
        need_scipy()
        plots.need_matplotlib()
        standard_library()
    except (ValueError, ImportError, RuntimeError) as error:
        Console(stderr=True, highlight=False).print(f"thinwire repro aqsgd: {error}", style="bold red", markup=False)
        return 64
    out.mkdir(parents=True, exist_ok=True)
    phases = _phases(chosen, scale)
    emulated = announce(console, sum(seconds for _, _, seconds in phases.values()))
    study = Study(scale, out, Screen(console, phases), emulated)
    findings, failures = make_parts(console, study, {part: _PARTS[part].make for part in chosen})
    tasks = {"small": scale.small, "scratch": scale.scratch, "large": scale.large}
    tasks |= {"labels": scale.labels, "deep": scale.deep}
    tasks |= {"timed": scale.timed, "to_loss": scale.to_loss}
    about = {
        "tasks": {name: {**dataclasses.asdict(task), "epochs": task.epochs} for name, task in tasks.items()},
        "num_stages": [NUM_STAGES, MORE_STAGES, MOST_STAGES],
        "rates": scale.rates,
        "rounds": scale.rounds,
        "seeds": scale.seeds,
        "margin": scale.margin,
        "control": of_curves.CONTROL.forward,
        "smoke": smoke,
        "differs_from_the_paper": _DIFFERS,
        "judged": _JUDGED,
    }
    title, path = "AQ-SGD, as found here", json or out / "repro-aqsgd.json"
    return finish(console, findings, failures, about, command="thinwire repro aqsgd", title=title, out=out, path=path)


def _phases(chosen: Sequence[str], scale: Scale) -> dict[str, tuple[str, int, float]]:
    """Title, steps and predicted seconds of each part, without what an earlier one has trained."""
    done = Work()
    found = {}
    for part in chosen:
        of, work = _PARTS[part], _PARTS[part].work(scale)
        steps = max(1, work.steps_after(scale, done))
        if scale is SMOKE:
            seconds = _SMOKE_START_S + steps * _SMOKE_STEP_S
        else:
            new = work.trainings - done.trainings
            trained_s = sum(scale.task(name).steps * _TRAINING_STEP_S[name, n] for name, n, *_ in new)
            first_s = sum(map(_first_s, work.firsts(scale) - done.firsts(scale)))
            seconds = of.start_s + trained_s + first_s + work.steps * of.step_s
        found[part] = (of.title, steps, seconds)
        done = union((done, work))
    return found


def _first_s(task: FineTuning) -> float:
    """Of training the weights that others start from."""
    parameters = sum(parameter.numel() for parameter in task.build(0).parameters())
    return task.first_steps * (_FIRST_STEP_S + _FIRST_STEP_S_PER_PARAMETER * parameters)


def _scale(smoke: bool, seeds: int, rounds: int | None) -> Scale:
    check_counts(seeds, rounds)
    if smoke:
        return SMOKE
    scale = replace(Scale(), seeds=seeds)
    return scale if rounds is None else replace(scale, rounds=rounds)
