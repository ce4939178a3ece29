"""``python -m experiments bench compressors``: error, bytes and speed of every compressor on real gradients."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro
from rich.console import Console
from rich.markup import escape

from experiments.bench import families
from experiments.bench.families import Point, draw
from experiments.bench.passes import Gradients, Pass, Quality, TaskName, make_task, measure_quality, record
from experiments.framework.pages import show
from thinwire import kernels
from thinwire.compressors import Compressor, Key, parse
from thinwire_tools.exits import ends_command
from thinwire_tools.results import OutputFile, Results

_STEPS, _SMOKE_STEPS = (30, 36, 42), (12,)
_TURNS = 5


@dataclass(frozen=True)
class Row:
    """What was found of one compressor. Speeds are multiples of that of ``copy_`` on as many values."""

    compressor: Compressor
    subject: Pass
    quality: Sequence[Quality]
    encode_s: float
    decode_s: float
    copy_s: float

    def mean(self, name: str) -> float:
        """Over the recorded steps, of an attribute of `Quality`."""
        return statistics.fmean(getattr(quality, name) for quality in self.quality)

    @property
    def point(self) -> Point:
        return Point(self.compressor, self.mean("relative_error"), self.mean("bytes_per_element"))


def compressors(
    specs: tyro.conf.Positional[tuple[str, ...]] = (),
    *,
    task: TaskName = "gpt",
    turns: int = _TURNS,
    smoke: bool = False,
    json: OutputFile = None,
    plot: Annotated[Path | None, tyro.conf.arg(metavar="PATH.svg")] = None,
) -> int:
    """Measure compressors on the gradients of a real training: bytes, error, speed.

    Errors are those of one message, without error feedback; bytes count headers, scales, indices and bitmaps. Encoding
    and decoding take turns with torch's copy_, so a noisy machine is noisy for all alike; figures are medians.

    Examples:
      python -m experiments bench compressors
      python -m experiments bench compressors "topk(density=0.01)" "fft(theta=0.98)" --plot error.svg
      python -m experiments bench compressors --task digits --json out.json

    Args:
        specs: of compressors; by default several of every family.
        task: whose gradients: those of the demo's GPT, or of the CNN on digits of `python -m experiments fft`.
        turns: measurements of each speed.
        smoke: a tiny model, few compressors and one turn, in seconds: the same path, no figures worth keeping.
        json: write the figures to this file.
        plot: draw error against bytes per element.
    """
    console = Console(highlight=False)
    with ends_command(ValueError, TypeError, ImportError):
        if turns < 1:
            raise ValueError(f"--turns {turns}: at least 1")
        chosen = list(dict.fromkeys(map(parse, specs or (families.SMOKE if smoke else families.default_specs()))))
        training, steps = make_task(task, smoke=smoke), _SMOKE_STEPS if smoke else _STEPS
        with console.status(f"training for {steps[-1] + 1} steps ..."):
            gradients = record(training, steps)
        with console.status(f"{len(chosen)} compressors ...") as status:
            rows = measure(chosen, gradients, turns=1 if smoke else turns, tell=status.update)
        if plot:
            draw([row.point for row in rows], plot, f"Gradients of {task}, {gradients.numel / 1e6:.1f} M elements")
    about = {"task": task, "steps": [m.step for m in gradients.moments], "elements": gradients.numel}
    machine = {"threads": torch.get_num_threads(), "cpu_level": kernels.cpu_level(), "turns": turns}
    results = Results("python -m experiments bench compressors", about={**about, **machine, "smoke": smoke})
    _record(results, rows)
    show("measured", results, json)
    return 0


def measure(
    chosen: Sequence[Compressor], gradients: Gradients, *, turns: int, tell: Callable[[str], None]
) -> list[Row]:
    """Errors and sizes of each, one after the other; then speeds, all in turn.

    Raises ``ValueError`` where a layer's values or shape do not suit a compressor.
    """
    subjects, qualities = [], []
    for compressor in chosen:
        tell(f"error of {escape(str(compressor))}")
        subjects.append(Pass(compressor, gradients.layers))
        qualities.append(measure_quality(subjects[-1], gradients))
    tell(f"speeds: {turns} turns")
    seconds = _times(subjects, gradients, turns)
    measured = zip(chosen, subjects, qualities, seconds[1:], strict=True)
    copy_s = seconds[0][0]
    return [Row(c, s, q, encode, decode, copy_s) for c, s, q, (encode, decode) in measured]


def _times(subjects: Sequence[Pass], gradients: Gradients, turns: int) -> list[tuple[float, float]]:
    """Median seconds of encoding and decoding: first ``copy_``'s, twice, then each subject's."""
    x, y = gradients.moments[-1].now, torch.zeros(gradients.numel)
    taken: list[list[tuple[float, float]]] = [[] for _ in range(len(subjects) + 1)]
    for turn in range(turns + 1):
        for at, subject in enumerate([None, *subjects]):
            started, key = time.perf_counter(), Key.derive(turn)
            if subject is None:
                y.copy_(x)
                middle = end = time.perf_counter()
                end = middle + (middle - started)
            else:
                subject.encode(x, y, key)
                middle = time.perf_counter()
                subject.decode(y, key)
                end = time.perf_counter()
            # The first turn touches memory for the first time.
            if turn:
                taken[at].append((middle - started, end - middle))
    return [(statistics.median(e for e, _ in mine), statistics.median(d for _, d in mine)) for mine in taken]


def _record(results: Results, rows: Sequence[Row]) -> None:
    results.add("copy_", rows[0].copy_s, "s")
    for row in rows:
        spec = str(row.compressor)
        facts = {
            "family": families.family(row.compressor),
            "meets": families.meets(row.subject.compressor),
            "unbiased": row.compressor.traits.unbiased,
            "feedback": row.subject.feedback,
            "source": families.source(row.compressor),
            "by_step": [quality.relative_error for quality in row.quality],
        }
        results.add(f"relative_error/{spec}", row.mean("relative_error"), "", **facts)
        results.add(f"cosine/{spec}", row.mean("cosine"), "")
        without = {"without_indices": row.mean("values_per_element")}
        results.add(f"bytes_per_element/{spec}", row.mean("bytes_per_element"), "B", **without)
        for name, seconds in (("encode", row.encode_s), ("decode", row.decode_s)):
            results.add(f"{name}_x_copy/{spec}", row.copy_s / seconds, "x", seconds=seconds)
