"""``python -m experiments bench compressors``: error, bytes and speed of every compressor on real gradients."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from experiments.bench import claims, families
from experiments.bench.claims import Finding, Point
from experiments.bench.compressors_plot import draw
from experiments.bench.gradients import Gradients, TaskName, make_task, record
from experiments.bench.passes import Pass, Quality, measure_quality
from thinwire import kernels
from thinwire.compressors import FFT, Compressor, Key, parse
from thinwire_tools.exits import ends_command
from thinwire_tools.results import OutputFile, Results

_STEPS, _SMOKE_STEPS = (30, 36, 42), (12,)
_TURNS = 5
_COPY = "copy_"
_WIDE = 120


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
        sizes = self.mean("bytes_per_element"), self.mean("values_per_element")
        return Point(self.compressor, self.mean("relative_error"), *sizes)


def compressors(
    specs: tyro.conf.Positional[tuple[str, ...]] = (),
    *,
    task: TaskName = "gpt",
    turns: int = _TURNS,
    smoke: bool = False,
    json: OutputFile = None,
    plot: Annotated[Path | None, tyro.conf.arg(metavar="PATH.svg")] = None,
) -> int:
    """Measure compressors on the gradients of a real training: bytes, error, speed; and the FFT paper's claim.

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
        chosen = _parsed(specs or (families.SMOKE if smoke else families.default_specs()))
        training, steps = make_task(task, smoke=smoke), _SMOKE_STEPS if smoke else _STEPS
        with console.status(f"training for {steps[-1] + 1} steps ..."):
            gradients = record(training, steps)
        with console.status(f"{len(chosen)} compressors ...") as status:
            rows = measure(chosen, gradients, turns=1 if smoke else turns, tell=status.update)
        if plot:
            draw([row.point for row in rows], plot, f"Gradients of {task}, {gradients.numel / 1e6:.1f} M elements")
    _show(console, rows, gradients, task)
    points = [row.point for row in rows]
    equal, settings = claims.at_equal_bytes(points), claims.at_the_settings(points)
    lines = list(_claim_lines(equal, settings))
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)
    if json:
        about = {"task": task, "steps": [m.step for m in gradients.moments], "elements": gradients.numel}
        machine = {"threads": torch.get_num_threads(), "cpu_level": kernels.cpu_level(), "turns": turns}
        results = Results(
            "python -m experiments bench compressors", about={**about, **machine, "smoke": smoke, "claim": lines}
        )
        _record(results, rows, [*equal, *settings], len(equal))
        results.write(json)
    for path in (json, plot):
        if path:
            console.print(f"Written: {path}", soft_wrap=True, markup=False)
    return 0


def _parsed(specs: Sequence[str]) -> list[Compressor]:
    return list(dict.fromkeys(parse(spec) for spec in specs))


def measure(chosen: Sequence[Compressor], gradients: Gradients, *, turns: int, tell=None) -> list[Row]:
    """Errors and sizes of each, one after the other; then speeds, all in turn.

    Raises ``ValueError`` where a layer's values or shape do not suit a compressor.
    """
    subjects, qualities = [], []
    for compressor in chosen:
        if tell:
            tell(f"error of {escape(str(compressor))}")
        subjects.append(Pass(compressor, gradients.layers))
        qualities.append(measure_quality(subjects[-1], gradients))
    if tell:
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


def _show(console: Console, rows: Sequence[Row], gradients: Gradients, task: str) -> None:
    steps = ", ".join(str(moment.step) for moment in gradients.moments)
    console.print(
        f"Gradients of {task}, {gradients.numel / 1e6:.2f} M elements of {len(gradients.layers)} layers, "
        f"steps {steps}; {torch.get_num_threads()} threads, {kernels.cpu_level()}. Error: relative L2, of one message; "
        "encode and decode: speeds in multiples of copy_'s.",
        soft_wrap=True,
    )
    wide = console.width >= _WIDE
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("compressor", overflow="fold", min_width=16)
    for column in ("bytes/\nelement", "without\nindices", "error", "cosine", "encode", "decode"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("meets", no_wrap=True)
    if wide:
        table.add_column("unbiased")
        table.add_column("formula", overflow="fold")
    for row in rows:
        sizes = row.mean("bytes_per_element"), row.mean("values_per_element")
        cells = [
            escape(str(row.compressor)),
            f"{sizes[0]:.4f}",
            f"{sizes[1]:.4f}" if sizes[1] != sizes[0] else "",
            f"{row.mean('relative_error'):.4f}",
            f"{row.mean('cosine'):.4f}",
            _speed(row.copy_s / row.encode_s),
            _speed(row.copy_s / row.decode_s),
            families.meets(row.subject.compressor),
        ]
        more = ["yes" if row.compressor.traits.unbiased else "", escape(families.source(row.compressor))]
        table.add_row(*cells, *(more if wide else []))
    console.print(table)


def _speed(multiple: float) -> str:
    return f"{multiple:.2f}" if multiple >= 0.1 else f"{multiple:.3f}"


def _claim_lines(equal: Sequence[Finding], settings: Sequence[Finding]) -> list[str]:
    """What is found of the FFT paper's claim, in lines."""
    if not equal:
        return []
    setting = f"in blocks of {FFT().block} elements, 10 bits, theta between measured ones"
    lines = [f"FFT of as many bytes ({setting}) has less error?"]
    for against, counted, verdict in claims.verdicts(equal):
        lines.append(f"  {against}, indices and bitmaps {'counted' if counted else 'not counted'}: {verdict}")
    if settings:
        lines.append("At the paper's settings, each of bytes of its own:")
    for finding in settings:
        word = "holds" if finding.holds else "does not hold"
        shown = f"{finding.fft_error:.3f} of {finding.fft}, {finding.point.error:.3f} of {finding.point.compressor}"
        lines.append(f"  {finding.against}: {word}, {shown}")
    return lines


def _record(results: Results, rows: Sequence[Row], findings: Sequence[Finding], num_equal: int) -> None:
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
    for at, finding in enumerate(findings):
        if finding.ratio is None:
            continue
        where = ("counted" if finding.counted else "not counted") if at < num_equal else "settings"
        name = f"{finding.fft} / {finding.point.compressor}" if finding.fft else str(finding.point.compressor)
        results.add(f"fft_error_over/{where}/{name}", finding.ratio, "", **_facts(finding))


def _facts(finding: Finding) -> Mapping[str, object]:
    return {
        "against": finding.against,
        "holds": finding.holds,
        "fft_error": finding.fft_error,
        "error": finding.point.error,
        "bytes_per_element": finding.point.size(counted=finding.counted),
    }
