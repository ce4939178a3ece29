"""``thinwire repro fft``: the FFT paper's section 4, figure by figure, each beside what the paper claims."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from thinwire import lab
from thinwire.compressors import parse
from thinwire.lab.units import parse_rates
from thinwire.repro import plots
from thinwire.repro.crew import RankFailed
from thinwire.repro.fft import methods, of_cost, of_gradients, of_methods, of_scaling, of_theorems
from thinwire.repro.fft.images import load
from thinwire.repro.fft.runs import Runs
from thinwire.repro.fft.study import NUM_RANKS, Scale, Study
from thinwire.repro.fft.task import ImageTask
from thinwire.repro.findings import Finding, record, table
from thinwire.repro.progress import Screen
from thinwire.repro.statistics import need_scipy
from thinwire.wire import ParityError

_SMOKE_TASK = ImageTask(width=8, steps=12, batch=8, probe_every=6, probe_images=60)
_SMOKE = Scale(_SMOKE_TASK, 1, buffer_bytes=400_000, repeats=2, measure_every=3, scaling_steps=4, world_sizes=(1, 2))
_DIFFERS = (
    "a ResNet of three blocks with group norm on small images, instead of ResNet-32 and AlexNet",
    "layer by layer with biases and norms raw, FFT in blocks of 4096, instead of one vector of all gradients",
    "FFT's 10-bit floats span what is kept of each layer, without rounding to fp16 first; the paper's span -1 to 1",
    "fp32 goes by all-reduce; the paper sends everything, fp32 too, by all-gather",
    "ranks are processes that share this machine's cores, on an emulated link, instead of GPUs on InfiniBand",
)
"""In what this is not the paper's experiment: kept beside the figures."""
_JUDGED = (
    "accuracy: a claim holds if the mean over seeds is, at 95 %, within one point of SGD's, or beyond it where the "
    "paper's is; speed: if it is so at every seed; the paper's own amounts are not asked for"
)

# Rough, for the time that is foretold: on two cores of a 2020s server.
_STEP_S, _SLOW_STEP_S = 0.02, 0.04


@dataclass(frozen=True)
class _Figure:
    title: str
    make: Callable[[Study], list[Finding]]
    num_steps: Callable[[Scale], int]
    """Training steps that it takes, for the progress."""
    step_s: float = _STEP_S


_FIGURES = {
    "5": _Figure("5: FFT and top-k on a gradient", of_gradients.figure_5, lambda scale: scale.task.steps),
    "6": _Figure("6: cost of the bitmap", of_cost.figure_6, lambda scale: 0),
    "10": _Figure("10: least useful ratio", of_cost.figure_10, lambda scale: 0),
    "12": _Figure(
        "12: assumption 3.2",
        of_theorems.figure_12,
        lambda scale: scale.task.steps * len(of_theorems.alpha_thetas()),
    ),
    "13": _Figure("13: theorems", of_theorems.figure_13, lambda scale: scale.task.steps * scale.seeds * 4),
    "14": _Figure(
        "14, table 2: methods",
        of_methods.figure_14,
        lambda scale: scale.task.steps * scale.seeds * len(of_methods.all_methods()),
        _SLOW_STEP_S,
    ),
    "15": _Figure("15: what is received", of_gradients.figure_15, lambda scale: 0),
    "16": _Figure(
        "16: weak scaling",
        of_scaling.figure_16,
        lambda scale: scale.scaling_steps * of_scaling.num_runs(scale.world_sizes),
        2 * _SLOW_STEP_S,
    ),
}


def fft(
    *,
    figures: str = ",".join(_FIGURES),
    seeds: int = 3,
    rate: str = "200mbit",
    data: Path | None = None,
    steps: int | None = None,
    smoke: bool = False,
    out: Path = Path("repro-fft"),
    json: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None,
) -> int:
    """Repeat section 4 of "FFT-based Gradient Sparsification" (HPDC 2020) on this machine, claim by claim.

    A small residual network learns handwritten digits (or CIFAR-10) on ranks that a slow link joins. Each figure
    becomes an SVG, and each of the paper's claims a row: what it says, what was found here, and whether it holds, also
    where it does not. Takes about fifteen minutes on two cores with the digits.

    Examples:
      thinwire repro fft
      thinwire repro fft --figures 13,14 --seeds 5 --json fft.json
      thinwire repro fft --data cifar-10-batches-bin --steps 2000
      thinwire repro fft --smoke

    Args:
        figures: which of the paper's, with commas.
        seeds: paired runs of every method in figures 13 and 14; a verdict takes at least 2.
        rate: of each rank's link in figures 14 and 16 (100mbit, 1gbit ...), emulated.
        data: folder of CIFAR-10's binary version; without it scikit-learn's digits.
        steps: training steps of each run.
        smoke: a tiny network and few steps, under a minute: the same path, no figures worth keeping.
        out: folder for the pictures and the figures.
        json: write the figures to this file instead of OUT/repro-fft.json.
    """
    console = Console(highlight=False)
    try:
        chosen = _chosen(figures)
        scale = _scale(smoke, seeds, steps, data)
        parse_rates(rate, NUM_RANKS)
        need_scipy()
        plots.need_matplotlib()
        images = load(scale.task.data)
        for spec in methods.all_specs():
            parse(spec)
    except (ValueError, ImportError, OSError) as error:
        Console(stderr=True, highlight=False).print(f"thinwire repro fft: {error}", style="bold red", markup=False)
        return 64
    out.mkdir(parents=True, exist_ok=True)
    missing = lab.unavailable()
    if missing:
        console.print(f"No slow network can be made here, so times are not judged: {missing}", markup=False)
    findings, failures, link = _make(console, chosen, scale, out, None if missing else rate)
    about = {
        "task": dataclasses.asdict(scale.task),
        "images": {"name": images.name, "train": len(images.train), "held_out": len(images.held_out)},
        "parameters": sum(parameter.numel() for parameter in scale.task.build(0).parameters()),
        "seeds": scale.seeds,
        "num_ranks": NUM_RANKS,
        "link": link,
        "smoke": smoke,
        "differs_from_the_paper": _DIFFERS,
        "judged": _JUDGED,
        **({"failures": failures} if failures else {}),
    }
    console.print(table(findings, "FFT sparsification, section 4, as found here"))
    path = json or out / "repro-fft.json"
    record(findings, "thinwire repro fft", about).write(path)
    console.print(f"Pictures: {out}  Figures: {path}", soft_wrap=True, markup=False)
    return 1 if failures else 0


def _make(
    console: Console, chosen: list[str], scale: Scale, out: Path, rate: str | None
) -> tuple[list[Finding], dict[str, str], object]:
    """What was found, which figures failed and why, and the link. A failure costs its figure, not those before it."""
    phases = {}
    for name in chosen:
        steps = _FIGURES[name].num_steps(scale)
        phases[name] = (_FIGURES[name].title, max(1, steps), 3.0 + steps * _FIGURES[name].step_s)
    found: list[Finding] = []
    failures: dict[str, str] = {}
    link: object = None
    left = list(chosen)
    with Screen(console, phases) as screen:
        while left:
            # After a rank's failure the others are of no more use: what is left starts with new ones.
            name = left[0]
            try:
                with Runs(scale.task, NUM_RANKS, rate) as runs:
                    study = Study(scale, runs, out, screen, timed=rate is not None)
                    for name in list(left):
                        left.remove(name)
                        with study.figure(name):
                            rows = _FIGURES[name].make(study)
                        found += rows
                        link = runs.link if link is None or isinstance(link, str) else link
                        judged = [row.holds for row in rows if row.claim and row.holds is not None]
                        screen.note(name, f"{sum(judged)} of {len(judged)} claims hold" if judged else "none judged")
            except (RankFailed, ParityError) as failure:
                failures[name] = str(failure)
                left = [other for other in left if other != name]
                screen.fail(name, str(failure))
                if isinstance(failure, RankFailed):
                    console.print(failure.log, style="dim", markup=False)
    return found, failures, link


def _chosen(figures: str) -> list[str]:
    chosen = list(dict.fromkeys(name.strip() for name in figures.split(",") if name.strip()))
    unknown = [name for name in chosen if name not in _FIGURES]
    if unknown or not chosen:
        raise ValueError(f"--figures {figures!r}: choose among {', '.join(_FIGURES)}, with commas")
    return chosen


def _scale(smoke: bool, seeds: int, steps: int | None, data: Path | None) -> Scale:
    if seeds < 1:
        raise ValueError(f"--seeds {seeds}: at least 1")
    scale = _SMOKE if smoke else Scale(ImageTask(), seeds)
    task = replace(scale.task, data=None if data is None else str(data.resolve()))
    if steps is not None:
        if steps < 2:
            raise ValueError(f"--steps {steps}: at least 2")
        task = replace(task, steps=steps, probe_every=max(1, steps // 16))
    return replace(scale, task=task)
