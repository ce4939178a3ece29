"""The command ``thinwire bench kernels``: speed of the CPU's kernels, compared to a plain copy in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from rich.console import Console
from torch import Tensor

from thinwire import kernels as core
from thinwire.compressors import (
    FFT,
    CodecCall,
    Coded,
    Gaussian,
    Key,
    Levels,
    Natural,
    Piece,
    RangeFloat,
    Segments,
    first_state,
)
from thinwire.kernels import Format, reference
from thinwire_tools.results import Results, figures_table

ROTATED = 4
"""Number of buffers that take turns, so that none of them is found in a cache."""

_SMALL = 2048
"""Number of elements of a call that is all overhead."""

_REFERENCE = 2**18
"""Number of elements for the torch reference, which is too slow for the full size."""

_FORMATS = (
    *(Format(4, 128), Format(4, 128, rounding="nearest"), Format(4, 1024), Format(8, 1024), Format(2, 64)),
    *(Format(4, 128, "maxabs"), Format(1, 1024, "sign"), Format(8, 1024, rounding="shift")),
)
_CODED: Mapping[str, Coded] = {
    "natural": Natural(),
    "range float of 8 bits": RangeFloat(8, 4, 4.0),
    "range float of 10 bits": RangeFloat(10, 4, 4.0),
    "range float of 10 bits, stochastic": RangeFloat(10, 4, 4.0, "stochastic"),
    "levels: 4 bits/128": Levels(4, 128, min_numel=0),
    "gaussian: 2 bits/128": Gaussian(2, 128),
    "fft": FFT(),
}

Run = Callable[[int], object]
"""A function that runs an operation on the i-th of the rotated buffers."""


def _name(form: Format) -> str:
    """Return the name of a format in the table; min-max and stochastic rounding, the defaults, are left out."""
    scheme = "" if form.scheme == "minmax" else f"{form.scheme} "
    bits = "1 bit" if form.bits == 1 else f"{form.bits} bits"
    rounding = "" if form.rounding == "stochastic" else f", {form.rounding}"
    return f"{scheme}{bits}/{form.bucket}{rounding}"


class Buffers:
    """Values, results and messages of one size, several of each."""

    def __init__(self, numel: int) -> None:
        self.numel = numel
        row = [0, numel, 0, 0, core.site_id("bench")]
        self.table = core.Table(torch.tensor([row], dtype=torch.int64, device="cpu"))
        self.x = [torch.randn(numel, dtype=torch.float32, device="cpu") for _ in range(ROTATED)]
        self.y = [torch.zeros(numel, dtype=torch.float32, device="cpu") for _ in range(ROTATED)]

    def messages(self, form: Format) -> list[Tensor]:
        size = core.bucketed_bytes(self.numel, form)
        made = [torch.zeros(size, dtype=torch.uint8, device="cpu") for _ in range(ROTATED)]
        for x, message in zip(self.x, made, strict=True):
            core.bucketed_encode(x, self.table, message, form, key=1)
        return made


def show_speeds(size_mb: float, threads: int | None, repeats: int) -> Results:
    """Time every operation and print the tables. The arguments are the options of ``thinwire bench kernels``."""
    console, before = Console(highlight=False), torch.get_num_threads()
    count, numel = threads or before, max(1, int(size_mb * 2**20 / 4))
    torch.set_num_threads(count)
    try:
        with console.status(f"{size_mb:g} MB, {count} threads: {repeats} turns ..."):
            cases = _cases(numel)
            seconds = _measure(cases, repeats)
    finally:
        torch.set_num_threads(before)
    about = {"cpu_level": core.cpu_level(), "threads": count, "size_mb": size_mb, "repeats": repeats}
    results = Results("thinwire bench kernels", about=about)
    table = figures_table("operation", ("GB/s", "x copy_", "µs"))
    copy = 4 * numel / seconds["copy_"]
    for name, (elements, _) in cases.items():
        rate, taken = 4 * elements / seconds[name], seconds[name]
        results.add(name, rate / 1e9, "GB/s", x_copy=rate / copy, seconds=taken, numel=elements)
        table.add_row(name, f"{rate / 1e9:.2f}", f"{rate / copy:.2f}", f"{taken * 1e6:.1f}")
    console.print(f"CPU kernels at {core.cpu_level()}, {size_mb:g} MB of fp32, {count} threads")
    console.print(table)
    even = figures_table("format", ("bits an element", "break-even link"))
    for form in _FORMATS:
        taken = seconds[f"encode: {_name(form)}"] + seconds[f"decode and add: {_name(form)}"]
        bits = 8 * core.bucketed_bytes(numel, form) / numel
        gbit_per_s = (32 - bits) * numel / taken / 1e9
        results.add(f"break-even: {_name(form)}", gbit_per_s, "Gbit/s", bits_per_element=bits)
        even.add_row(_name(form), f"{bits:.2f}", f"{gbit_per_s:.1f} Gbit/s")
    console.print(even)
    return results


def _measure(cases: Mapping[str, tuple[int, Run]], repeats: int) -> dict[str, float]:
    """Return the median seconds of each case, without the first turn, which touches memory for the first time."""
    taken: dict[str, list[float]] = {name: [] for name in cases}
    turn = 0
    for repeat in range(repeats + 1):
        for name, (numel, run) in cases.items():
            turn += 1
            times = max(1, 2**17 // numel) if numel <= _SMALL else 1
            start = time.perf_counter()
            for _ in range(times):
                run(turn % ROTATED)
            if repeat:
                taken[name].append((time.perf_counter() - start) / times)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def _cases(numel: int) -> dict[str, tuple[int, Run]]:
    """Return the operations by name, each with its number of elements."""
    full, small, part, main = Buffers(numel), Buffers(_SMALL), Buffers(_REFERENCE), _FORMATS[0]
    runs: dict[str, Run] = {"copy_": lambda i: full.y[i].copy_(full.x[i]), "add_": lambda i: full.y[i].add_(full.x[i])}
    for form in _FORMATS:
        runs |= _bucketed(full, form)
    for form in (main, Format(4, 128, "maxabs"), Format(1, 1024, "sign")):
        runs |= _feedback(full, form)
    runs |= _bf16(full, main) | _summing(full, main) | _integers(full)
    for name, compressor in _CODED.items():
        coded, _ = codec_runs(compressor, full.x, full.y, [("bench", 0, numel)])
        runs |= {f"{name}, {what}": coded[what] for what in ("encode", "decode")}
    runs |= _selection(full)
    cases = {name: (numel, run) for name, run in runs.items()}
    calls: dict[str, Run] = {"copy_": lambda i: small.y[i].copy_(small.x[i]), **_bucketed(small, main)}
    cases |= {f"{name}: one small call": (_SMALL, run) for name, run in calls.items()}
    sent, name = part.messages(main), _name(main)
    torch_runs: dict[str, Run] = {
        f"encode: {name}": lambda i: reference.bucketed_encode(part.x[i], part.table, sent[i], main, key=i),
        f"decode: {name}": lambda i: reference.bucketed_decode(sent[i], part.table, part.y[i], main),
    }
    return cases | {f"torch reference, 1 MB, {what}": (_REFERENCE, run) for what, run in torch_runs.items()}


def _bucketed(at: Buffers, form: Format) -> dict[str, Run]:
    sent, name = at.messages(form), _name(form)
    return {
        f"encode: {name}": lambda i: core.bucketed_encode(at.x[i], at.table, sent[i], form, key=i),
        f"decode: {name}": lambda i: core.bucketed_decode(sent[i], at.table, at.y[i], form),
        f"decode and add: {name}": lambda i: core.bucketed_decode(
            sent[i], at.table, at.y[i], form, add=True, scale=0.5
        ),
    }


def _feedback(at: Buffers, form: Format) -> dict[str, Run]:
    """Return error feedback in one pass, and with torch's additions and subtractions around the kernels."""
    sent, now, later = at.messages(form), [0.1 * x for x in at.x], [torch.zeros_like(x) for x in at.x]

    def fused(i: int) -> None:
        core.bucketed_encode(at.x[i], at.table, sent[i], form, key=i, residual=core.Residual(now[i], later[i]))

    def in_parts(i: int) -> None:
        torch.add(at.x[i], now[i], out=later[i])
        core.bucketed_encode(later[i], at.table, sent[i], form, key=i)
        core.bucketed_decode(sent[i], at.table, at.y[i], form)
        later[i].sub_(at.y[i])

    name = _name(form)
    return {f"encode with error feedback: {name}": fused, f"encode with error feedback, in parts: {name}": in_parts}


def _bf16(at: Buffers, form: Format) -> dict[str, Run]:
    sent, values, name = at.messages(form), [x.bfloat16() for x in at.x], _name(form)
    return {
        f"encode bf16 values: {name}": lambda i: core.bucketed_encode(values[i], at.table, sent[i], form, key=i),
        f"decode to bf16 values: {name}": lambda i: core.bucketed_decode(sent[i], at.table, values[i], form),
    }


def _summing(at: Buffers, form: Format) -> dict[str, Run]:
    """Return the owner's stage, fused and in its three parts, the sum of three messages, and a checksum."""
    sent, out, name = at.messages(form), at.messages(form), _name(form)

    def reduce(i: int) -> None:
        core.bucketed_reduce([sent[i]], at.x[i], at.table, out[i], at.y[i], form, scale=0.5, key=i)

    def in_parts(i: int) -> None:
        core.bucketed_sum([sent[i]], at.x[i], at.table, at.y[i], form, scale=0.5)
        core.bucketed_encode(at.y[i], at.table, out[i], form, key=i)
        core.bucketed_decode(out[i], at.table, at.y[i], form)

    return {
        f"reduce, fused: {name}": reduce,
        f"reduce, in parts: {name}": in_parts,
        f"sum of three messages: {name}": lambda i: core.bucketed_sum(
            sent[:3], at.x[i], at.table, at.y[i], form, scale=0.5
        ),
        f"checksum of the message: {name}": lambda i: core.checksum(sent[i]),
    }


def _integers(at: Buffers) -> dict[str, Run]:
    one, out = torch.tensor([10.0], dtype=torch.float32, device="cpu"), [x.to(torch.int8) for x in at.x]
    return {
        "round to int8": lambda i: core.int_round(at.x[i], at.table, one, out[i], clip=63, key=i),
        "round to int8, nearest": lambda i: core.int_round(at.x[i], at.table, one, out[i], clip=63, nearest=True),
        "from int8": lambda i: core.int_decode(out[i], at.table, at.y[i], one),
    }


def _selection(at: Buffers) -> dict[str, Run]:
    numel, x = at.numel, at.x
    runs: dict[str, Run] = {"histogram of magnitudes": lambda i: core.abs_histogram(x[i], 0, numel)}
    for name, k in (("0.1 %", max(1, numel // 1000)), ("1 %", max(1, numel // 100))):
        runs[f"top-k, exact, {name}"] = lambda i, k=k: core.select_topk(x[i], 0, numel, k, key=i)
        runs[f"top-k, sampled, {name}"] = lambda i, k=k: core.select_topk(x[i], 0, numel, k, sampled=True, key=i)
        runs[f"torch.topk, {name}"] = lambda i, k=k: x[i].abs().topk(k, sorted=False)
    indices, values, _ = core.select_topk(x[0], 0, numel, k)
    threshold = float(values.abs().min())
    message = torch.zeros(core.index_bytes(numel, k), dtype=torch.uint8, device="cpu")
    return runs | {
        "above a threshold, 1 %": lambda i: core.select_threshold(x[i], 0, numel, threshold, 2 * k),
        "indices, pack, 1 %": lambda i: core.pack_indices(indices, numel, k, message, 0),
        "indices, unpack, 1 %": lambda i: core.unpack_indices(message, 0, numel, k),
        "sparse add, 1 %": lambda i: core.sparse_add(at.y[i], 0, numel, indices, values, 0.5),
    }


def codec_runs(
    compressor: Coded, x: Sequence[Tensor], y: Sequence[Tensor], layers: Sequence[tuple[str, int, int]]
) -> tuple[dict[str, Run], int]:
    """Return the operations of a compressor on flat tensors with these ``layers`` (name, start and size), and the bytes
    of their message."""
    pieces, at = [], 0
    for name, start, size in layers:
        pieces.append(Piece(name, start, size, 0, at, (size,)))
        at += compressor.payload_bytes(size, torch.float32)
    segments = Segments.build(pieces)
    sent = list(torch.zeros(len(x), at, dtype=torch.uint8, device=x[0].device))  # end to end, as received ones are
    calls = [
        CodecCall(segments, Key.derive(i), state=first_state(compressor, each, segments)) for i, each in enumerate(x)
    ]
    for i, call in enumerate(calls):
        compressor.encode(x[i], sent[i], call)
    return {
        "encode": lambda i: compressor.encode(x[i], sent[i], calls[i]),
        "decode": lambda i: compressor.decode(sent[i], y[i], calls[i]),
        "decode, add": lambda i: compressor.decode(sent[i], y[i], calls[i], add=True),
        "reduce": lambda i: compressor.reduce(sent[1:], x[i], sent[0], y[i], calls[i]._replace(scale=0.25)),
    }, at
