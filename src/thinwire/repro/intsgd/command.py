"""``thinwire repro intsgd``: the IntSGD paper's experiments, part by part, each beside what the paper claims."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from thinwire import lab
from thinwire.compressors import parse
from thinwire.lab.units import parse_rate
from thinwire.repro import plots
from thinwire.repro.data import standard_library
from thinwire.repro.fft.images import load
from thinwire.repro.findings import Finding
from thinwire.repro.intsgd import convex, datasets, of_convex, of_sensitivity, of_training
from thinwire.repro.intsgd.logistic import BATCH_SHARE, NUM_WORKERS, REGULARISATION
from thinwire.repro.intsgd.study import FULL, SMOKE, TASKS, Scale, Study, steps_of_b, steps_of_c, with_images
from thinwire.repro.intsgd.ways import RANDOM, TRAINED, WAYS, sensitive
from thinwire.repro.parts import chosen_parts, finish, make_parts
from thinwire.repro.progress import Screen
from thinwire.repro.statistics import need_scipy

_DIFFERS = (
    f"(a) the {NUM_WORKERS} workers are an axis of arrays in one process and compute, in fp64, what each would compute "
    "alone; integers are neither clipped nor limited in size",
    "(a) a5a, mushrooms, w8a and real-sim are made with the shapes of the LibSVM sets; they are not these sets, which "
    f"--libsvm reads; lambda is {REGULARISATION:g}/m, learning rates are {convex.RATES[False]:g}/L and, of L-SVRG, "
    f"{convex.RATES[True]:g}/L; mini-batches are {BATCH_SHARE:.0%} of a worker's data, drawn with replacement",
    "(a) 20 seeds, but 3 on real-sim's shape; f* is gradient descent's, brought to its end by L-BFGS",
    f"(b) {FULL.num_ranks} ranks are processes that share this machine's cores, on emulated links, instead of 16 GPUs "
    "on InfiniBand: an all-gather of 8 bits sends half of what fp32's all-reduce does, not twice as much; what is "
    "timed is larger than what is trained",
    "(b) a ResNet of three blocks with group norm on small images, 20 epochs, instead of ResNet18 on CIFAR-10, 300",
    "(b) a 3-layer LSTM of 96 units on the words of Python's standard library, 360 steps with momentum and gradients "
    "clipped to 0.5, instead of 650 units on Wikitext-2 for 90 epochs; the hidden state is not carried on",
    "(b) all methods have the learning rate that suits SGD; IntSGD's scales are by layer, from the aggregated gradient",
    "(c) one seed",
)
"""In what this is not the paper's experiment: kept beside the figures."""
_JUDGED = (
    "(a): a claim holds if it does on every data set at every seed; linear is an R² of at least 0.99 of a line through "
    "the gap's logarithm, and like full precision at most 1.5 times its steps; (b) quality, at 95 % and in the mean of "
    "pairs of runs from one seed: to end at SGD's is to be worse by no more than SGD's own seeds spread (half a point "
    "or 0.01 nats at least), to fall short is to be worse at all; times: it is so in so many of the rounds, in which "
    "all take turns, that chance would do it in 5 % of all cases at most; (c): no choice is worse than the default by "
    "more than a point, or 2 % of the loss"
)

# Rough, for the time that is foretold: on two quiet cores of a 2020s server.
_JOBS_S = {"breast_cancer": 6.0, "digits": 35.0, "a5a": 60.0, "mushrooms": 75.0, "w8a": 170.0, "real-sim": 130.0}
_FILE_S, _STEP_S, _TURN_STEP_S, _START_S = 60.0, 0.018, 0.35, 15.0


@dataclass(frozen=True)
class _Part:
    title: str
    make: Callable[[Study], list[Finding]]


_PARTS = {
    "a": _Part("a: logistic regression", of_convex.part_a),
    "b": _Part("b: networks", of_training.part_b),
    "c": _Part("c: beta and eps", of_sensitivity.part_c),
}


def intsgd(
    *,
    parts: tuple[str, ...] = tuple(_PARTS),
    seeds: int = 3,
    rate: str = "200mbit",
    libsvm: tuple[Path, ...] = (),
    data: Path | None = None,
    smoke: bool = False,
    out: Path = Path("repro-intsgd"),
    json: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None,
) -> int:
    """Repeat the experiments of "IntSGD: Adaptive Floatless Compression of Stochastic Gradients" (ICLR 2022) here.

    Part a minimises logistic regression over twelve workers whose data differ, by IntGD, IntDIANA, VR-IntDIANA and
    their twins in full precision: figure 6. Part b trains a small ResNet and an LSTM on four ranks with every method of
    tables 2 and 3, and times them over slow links: figures 1 to 4. Part c changes beta and eps: figure 5. Each of the
    paper's claims becomes a row: what it says, what was found here, and whether it holds, also where it does not.

    Examples:
      thinwire repro intsgd
      thinwire repro intsgd --parts a --libsvm a5a.txt w8a.bz2
      thinwire repro intsgd --parts b c --seeds 5 --data cifar-10-batches-bin
      thinwire repro intsgd --smoke

    Args:
        parts: which of a, b and c.
        seeds: paired trainings of every method in part b; a verdict takes at least 2.
        rate: of each link in part b (100mbit, 1gbit ...), emulated.
        libsvm: files in LibSVM's format, plain, gzip or bzip2, that part a takes besides its own data.
        data: folder of CIFAR-10's binary version for parts b and c; without it scikit-learn's digits.
        smoke: tiny problems and few steps, under a minute: the same path, no figures worth keeping.
        out: folder for the pictures and the figures.
        json: write the figures to this file instead of OUT/repro-intsgd.json.
    """
    console = Console(highlight=False)
    try:
        # In their order: part c compares with what part b has trained.
        chosen = sorted(chosen_parts(parts, _PARTS), key=list(_PARTS).index)
        scale = _scale(smoke, seeds, data)
        parse_rate(rate)
        need_scipy()
        plots.need_matplotlib()
        sources = convex.sources(libsvm, smoke) if "a" in chosen else []
        for path in libsvm:
            datasets.libsvm(path)
        images = load(None if data is None else str(data.resolve()))
        standard_library()
        for spec in _all_specs(scale):
            parse(spec)
    except (ValueError, ImportError, OSError, RuntimeError) as error:
        Console(stderr=True, highlight=False).print(f"thinwire repro intsgd: {error}", style="bold red", markup=False)
        return 64
    out.mkdir(parents=True, exist_ok=True)
    missing = lab.unavailable() if "b" in chosen else None
    if missing:
        console.print(f"No slow network can be made here, so times are not judged: {missing}", markup=False)
    phases = {part: _phase(part, scale, sources, smoke) for part in chosen}
    minutes = sum(seconds for _, _, seconds in phases.values()) / 60
    console.print(f"Takes about {max(1, round(minutes))} minutes on two quiet cores.")
    emulated = None if missing or "b" not in chosen else rate
    study = Study(out, Screen(console, phases), sources, smoke=smoke, scale=scale, rate=emulated)
    findings, failures = make_parts(console, study, {part: _PARTS[part].make for part in chosen})
    about = {
        "link": study.link,
        "datasets": study.datasets,
        "rate": emulated,
        "images": images.name,
        "num_ranks": scale.num_ranks,
        "seeds": scale.seeds,
        "tasks": {task: dataclasses.asdict(scale.trained[task]) for task in TASKS},
        "timed": {task: dataclasses.asdict(scale.timed[task]) for task in TASKS},
        "smoke": smoke,
        "differs_from_the_paper": _DIFFERS,
        "judged": _JUDGED,
    }
    title, path = "IntSGD's experiments, as found here", json or out / "repro-intsgd.json"
    return finish(console, findings, failures, about, command="thinwire repro intsgd", title=title, out=out, path=path)


def _phase(part: str, scale: Scale, sources: Sequence[convex.Source], smoke: bool) -> tuple[str, int, float]:
    """Title, steps and expected seconds of a part."""
    title = _PARTS[part].title
    if part == "a":
        seconds = sum(_JOBS_S.get(s.name, _FILE_S) if s.path is None else _FILE_S for s in sources) / 2
        return title, convex.num_jobs(sources), 10.0 if smoke else seconds
    if part == "b":
        steps = steps_of_b(scale, TRAINED)
        turns = len(TASKS) * len(WAYS) * (1 + scale.rounds) * scale.turn_steps
        return title, steps, _START_S + (steps - turns) * _STEP_S + (turns * _TURN_STEP_S if not smoke else 0)
    steps = steps_of_c(scale)
    return title, steps, _START_S + steps * _STEP_S


def _all_specs(scale: Scale) -> list[str]:
    specs = [way.spec_for(task) for way in WAYS for task in TASKS]
    specs += [sensitive(beta, 1e-8) for beta in scale.betas] + [sensitive(0.9, eps) for eps in scale.epss]
    return [spec for spec in specs if spec is not None] + [RANDOM.spec]


def _scale(smoke: bool, seeds: int, data: Path | None) -> Scale:
    if seeds < 1:
        raise ValueError(f"--seeds {seeds}: at least 1")
    scale = SMOKE if smoke else replace(FULL, seeds=seeds)
    return with_images(scale, None if data is None else str(data.resolve()))
