"""``thinwire repro fullstack``: every byte between machines compressed, beside what the AQ-SGD paper says of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from thinwire.repro import plots
from thinwire.repro.aqsgd.tasks import FineTuning
from thinwire.repro.data import standard_library
from thinwire.repro.fft.images import load
from thinwire.repro.findings import Finding
from thinwire.repro.fullstack import of_adam, of_clusters, of_figure5, of_resume, of_split, of_tensors
from thinwire.repro.fullstack.study import NUM_STAGES, SMOKE, Scale, Study
from thinwire.repro.parts import announce, check_counts, chosen_parts, finish, make_parts
from thinwire.repro.progress import Screen
from thinwire.repro.statistics import need_scipy

_DIFFERS = (
    "byte-level GPTs of 0.2 and 0.8 million parameters, first trained on one half of the source of Python's standard "
    "library, are fine-tuned on samples of the other half, where the paper has GPT2-1.5B on WikiText2 and arXiv",
    "2 stages in 2 replicas: four processes that share this machine's two cores, on emulated links, over gloo",
    "links are slower than the paper's by the factor that is printed, which makes the activations' wire to compute the "
    "paper's, by values a second; a stage's gradient has about as many values as its activations of a step",
    "gradients travel in min-max quantisation, 4 bits in buckets of 128; QuantizedAdam's first steps are exact: an "
    "epoch of five where loss is compared, an eighth of the steps where time is",
    "max-abs quantisation of activations with a scale for every 128 values, rounded stochastically; 5 epochs, from the "
    "same first training for all seeds",
    "split learning: scikit-learn's digits, 8 x 8 pixels, unless CIFAR-10 is given; ResNet34's blocks with 8 to 64 "
    "channels and group normalisation, since a client's few classes would be a batch's moments; crops move an image by "
    "an eighth of it, and its message at the second cut, of fewer positions, by as many of them as are nearest; "
    "clients hand on momenta with the weights; 32 rounds",
    "cluster centres: 256 for all positions' vectors, which both sides move towards what arrives; the paper has no "
    "experiment",
    "tensor parallelism: the sums behind attention and behind the MLP, over 2 ranks, in one process; their gradients "
    "are not compressed; the paper has no experiment",
)
"""In what this is not the paper's experiment: kept beside the figures."""
_JUDGED = (
    "quality: the loss of the last epoch is at most 1 % above FP32's, at 95 %, paired by seed, in trainings that "
    "DirectQ fw2 bw4 damages; throughput: what is claimed to be faster is so in so many of the rounds, in which all "
    "ways take turns, that chance would do it in 5 % of all cases at most; time to the same loss over a slow link is "
    "one training each"
)


@dataclass(frozen=True)
class _Part:
    """Figures that are made together: ``steps``, each of which takes about ``step_s``, and the first trainings of
    ``starts``, which parts share."""

    title: str
    make: Callable[[Study], list[Finding]]
    steps: Callable[[Scale], int]
    starts: Callable[[Scale], Sequence[FineTuning]]
    step_s: float
    start_s: float


# Seconds are rough, for the time that is foretold: on two cores of a 2020s server.
_SMOKE_START_S, _SMOKE_STEP_S = 2.0, 0.05
_FIRST_STEP_S = 0.05
_PARTS = {
    "5": _Part(
        "figure 5: loss, throughput, time",
        of_figure5.figure_5,
        of_figure5.figure_5_steps,
        lambda scale: (scale.small, scale.to_loss),
        0.25,
        30.0,
    ),
    "adam": _Part(
        "QuantizedAdam and others", of_adam.adam, of_adam.adam_steps, lambda scale: (scale.replicated,), 0.06, 10.0
    ),
    "split": _Part("figure 10: split learning", of_split.splitting, of_split.split_steps, lambda _: (), 1.2, 10.0),
    "cluster": _Part(
        "appendix G: cluster centres",
        of_clusters.online,
        of_clusters.clusters_steps,
        lambda scale: (scale.online,),
        0.04,
        5.0,
    ),
    "tensor": _Part(
        "appendix F: tensor parallelism",
        of_tensors.sums,
        of_tensors.tensors_steps,
        lambda scale: (scale.sums,),
        0.06,
        5.0,
    ),
    "resume": _Part(
        "kill and resume", of_resume.resumed, of_resume.resume_steps, lambda scale: (scale.small,), 0.15, 40.0
    ),
}


def fullstack(
    *,
    parts: tuple[str, ...] = tuple(_PARTS),
    seeds: int = 3,
    rounds: int | None = None,
    cifar: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None,
    smoke: bool = False,
    out: Path = Path("repro-fullstack"),
    json: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None,
) -> int:
    """Repeat what the AQ-SGD paper does beyond activations of a pipeline, claim by claim.

    A pipeline in replicas whose activations, their gradients and the optimizer's momenta are all compressed (figure 5),
    which is killed and goes on. Figures become SVGs, and each claim a row: what it says, what was found here, and
    whether it holds, also where it does not. Takes about 20 minutes on two cores.

    Examples:
      thinwire repro fullstack
      thinwire repro fullstack --parts 5 --rounds 10
      thinwire repro fullstack --parts resume --json resume.json
      thinwire repro fullstack --smoke

    Args:
        parts: which to make: 5 (figure 5), adam (QuantizedAdam against Adam, bf16 and PowerSGD), split (figure 10:
            split learning), cluster (appendix G: one epoch, centres instead of messages), tensor (appendix F: sums of
            tensor parallelism), resume (kill and go on).
        seeds: paired trainings of what quality is judged of; a verdict takes at least 2.
        rounds: turns of every way that is timed; a verdict takes at least 5.
        cifar: folder with the binary version of CIFAR-10 for split learning; scikit-learn's digits without.
        smoke: tiny networks and few steps, under a minute: the same path, no figures worth keeping.
        out: folder for the pictures and the figures.
        json: write the figures to this file instead of OUT/repro-fullstack.json.
    """
    console = Console(highlight=False)
    try:
        chosen = chosen_parts(parts, _PARTS)
        scale = _scale(smoke, seeds, rounds, cifar)
        if "split" in chosen:
            load(scale.split.cifar)
        need_scipy()
        plots.need_matplotlib()
        standard_library()
    except (ValueError, ImportError, OSError, RuntimeError) as error:
        told = f"thinwire repro fullstack: {error}"
        Console(stderr=True, highlight=False).print(told, style="bold red", markup=False)
        return 64
    out.mkdir(parents=True, exist_ok=True)
    phases = _phases(chosen, scale)
    emulated = announce(console, sum(seconds for _, _, seconds in phases.values()))
    study = Study(scale, out, Screen(console, phases), emulated)
    findings, failures = make_parts(console, study, {part: _PARTS[part].make for part in chosen})
    about = {
        **dataclasses.asdict(scale),
        "num_stages": NUM_STAGES,
        "control": of_figure5.CONTROL.title,
        "smoke": smoke,
        "differs_from_the_paper": _DIFFERS,
        "judged": _JUDGED,
    }
    title, path = "The full stack, as found here", json or out / "repro-fullstack.json"
    command = "thinwire repro fullstack"
    return finish(console, findings, failures, about, command=command, title=title, out=out, path=path)


def _phases(chosen: Sequence[str], scale: Scale) -> dict[str, tuple[str, int, float]]:
    """Title, steps and predicted seconds of each part, without the first trainings that an earlier one has made."""
    done: set[FineTuning] = set()
    found = {}
    for part in chosen:
        of = _PARTS[part]
        new = {task.first for task in of.starts(scale)} - done
        done |= new
        steps, firsts = of.steps(scale), sum(task.first_steps for task in new)
        if scale.small is SMOKE.small:
            seconds = _SMOKE_START_S + (steps + firsts) * _SMOKE_STEP_S
        else:
            seconds = of.start_s + steps * of.step_s + firsts * _FIRST_STEP_S
        found[part] = (of.title, steps + firsts, seconds)
    return found


def _scale(smoke: bool, seeds: int, rounds: int | None, cifar: Path | None) -> Scale:
    check_counts(seeds, rounds)
    scale = SMOKE if smoke else replace(Scale(), seeds=seeds)
    if cifar is not None:
        scale = replace(scale, split=replace(scale.split, cifar=str(cifar.absolute())))
    return scale if smoke or rounds is None else replace(scale, rounds=rounds)
