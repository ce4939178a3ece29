"""The command ``thinwire bench kernels``: speed of the CPU's kernels, compared to a plain copy in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from thinwire import kernels as core
from thinwire.compressors import FFT, CodecCall, Piece, Segments
from thinwire.compressors.gaussian import MAGNITUDES
from thinwire.kernels import Format, reference
from thinwire_tools.results import Results, figures_table

_ROTATED = 4
"""Number of buffers that take turns, so that none of them is found in a cache."""

_SMALL = 2048
"""Number of elements of a call that is all overhead."""

_REFERENCE = 2**18
"""Number of elements for the torch reference, which is too slow for the full size."""


_Row = tuple[str, Callable[[int], object]]
"""Name of an operation, and a function that runs it on the i-th of the buffers."""


@dataclass(frozen=True)
class Case:
    """One operation to time; ``run(i)`` works on the i-th of the rotated buffers."""

    name: str
    numel: int
    run: Callable[[int], object]
    more: dict[str, Any] = field(default_factory=dict)


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
        self.table = core.Table(
            torch.tensor([[0, numel, 0, 0, core.site_id("bench")]], dtype=torch.int64, device="cpu")
        )
        self.x = [torch.randn(numel, dtype=torch.float32, device="cpu") for _ in range(_ROTATED)]
        self.y = [torch.zeros(numel, dtype=torch.float32, device="cpu") for _ in range(_ROTATED)]
        self.bf16 = [x.bfloat16() for x in self.x]

    def messages(self, form: Format) -> list[Tensor]:
        made = [
            torch.zeros(core.bucketed_bytes(self.numel, form), dtype=torch.uint8, device="cpu") for _ in range(_ROTATED)
        ]
        for x, message in zip(self.x, made, strict=True):
            core.bucketed_encode(x, self.table, message, form, key=1)
        return made


def show_speeds(size_mb: float, threads: int | None, repeats: int) -> Results:
    """Time every case and print the tables. The arguments are the options of ``thinwire bench kernels``."""
    console = Console(highlight=False)
    with _threads(threads) as count:
        formats = [Format(4, 128), Format(4, 128, rounding="nearest"), Format(4, 1024), Format(8, 1024), Format(2, 64)]
        formats += [Format(4, 128, "maxabs"), Format(1, 1024, "sign"), Format(8, 1024, rounding="shift")]
        with console.status(f"{size_mb:g} MB, {count} threads: {repeats} turns ..."):
            cases = _cases(max(1, int(size_mb * 2**20 / 4)), formats)
            seconds = _measure(cases, repeats)
    about = {"cpu_level": core.cpu_level(), "threads": count, "size_mb": size_mb, "repeats": repeats}
    results = Results("thinwire bench kernels", about=about)
    table = figures_table("operation", ("GB/s", "x copy_", "µs"))
    copy = 4 * cases[0].numel / seconds["copy_"]
    for case in cases:
        rate, taken = 4 * case.numel / seconds[case.name], seconds[case.name]
        results.add(case.name, rate / 1e9, "GB/s", x_copy=rate / copy, seconds=taken, numel=case.numel, **case.more)
        table.add_row(case.name, f"{rate / 1e9:.2f}", f"{rate / copy:.2f}", f"{taken * 1e6:.1f}")
    console.print(f"CPU kernels at {core.cpu_level()}, {size_mb:g} MB of fp32, {count} threads")
    console.print(table)
    even = figures_table("format", ("bits an element", "break-even link"))
    numel = cases[0].numel
    for form in formats:
        taken = seconds[f"encode: {_name(form)}"] + seconds[f"decode and add: {_name(form)}"]
        bits = 8 * core.bucketed_bytes(numel, form) / numel
        gbit_per_s = (32 - bits) * numel / taken / 1e9
        results.add(f"break-even: {_name(form)}", gbit_per_s, "Gbit/s", bits_per_element=bits)
        even.add_row(_name(form), f"{bits:.2f}", f"{gbit_per_s:.1f} Gbit/s")
    console.print(even)
    return results


@contextmanager
def _threads(threads: int | None) -> Iterator[int]:
    """Sets torch's number of threads for a while, if one is given; yields the number in force."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def _measure(cases: list[Case], repeats: int) -> dict[str, float]:
    """Return the median seconds of each case, without the first turn, which touches memory for the first time."""
    taken: dict[str, list[float]] = {case.name: [] for case in cases}
    turn = 0
    for repeat in range(repeats + 1):
        for case in cases:
            turn += 1
            times = max(1, 2**17 // case.numel) if case.numel <= _SMALL else 1
            start = time.perf_counter()
            for _ in range(times):
                case.run(turn % _ROTATED)
            if repeat:
                taken[case.name].append((time.perf_counter() - start) / times)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def _cases(numel: int, formats: list[Format]) -> list[Case]:
    full, small = Buffers(numel), Buffers(_SMALL)
    main = formats[0]
    cases = [
        Case("copy_", numel, lambda i: full.y[i].copy_(full.x[i])),
        Case("add_", numel, lambda i: full.y[i].add_(full.x[i])),
    ]
    for form in formats:
        cases += _format_cases(full, form)
    for form in (main, Format(4, 128, "maxabs"), Format(1, 1024, "sign")):
        cases += _feedback(full, form)
    cases += _bf16(full, main) + _summing(full, main)
    cases += [Case(name, numel, run) for name, run in _other_cases(full.x, full.y)]
    cases.append(Case("copy_: one small call", _SMALL, lambda i: small.y[i].copy_(small.x[i])))
    cases += [_renamed(case, f"{case.name}: one small call") for case in _format_cases(small, main)]
    return cases + _torch_reference(main)


def _renamed(case: Case, name: str) -> Case:
    return Case(name, case.numel, case.run, case.more)


def _format_cases(at: Buffers, form: Format) -> list[Case]:
    sent, more = at.messages(form), {"bits": form.bits, "bucket": form.bucket, "nearest": form.rounding == "nearest"}

    def encode(i: int) -> None:
        core.bucketed_encode(at.x[i], at.table, sent[i], form, key=i)

    def decode(i: int) -> None:
        core.bucketed_decode(sent[i], at.table, at.y[i], form)

    def add(i: int) -> None:
        core.bucketed_decode(sent[i], at.table, at.y[i], form, add=True, scale=0.5)

    operations = {"encode": encode, "decode": decode, "decode and add": add}
    return [Case(f"{name}: {_name(form)}", at.numel, run, more) for name, run in operations.items()]


def _feedback(at: Buffers, form: Format) -> list[Case]:
    """Return cases of error feedback in one pass, and with torch's additions and subtractions around the kernels."""
    sent, now, later = at.messages(form), [0.1 * x for x in at.x], [torch.zeros_like(x) for x in at.x]

    def fused(i: int) -> None:
        core.bucketed_encode(at.x[i], at.table, sent[i], form, key=i, residual=core.Residual(now[i], later[i]))

    def in_parts(i: int) -> None:
        torch.add(at.x[i], now[i], out=later[i])
        core.bucketed_encode(later[i], at.table, sent[i], form, key=i)
        core.bucketed_decode(sent[i], at.table, at.y[i], form)
        later[i].sub_(at.y[i])

    return [
        Case(f"encode with error feedback: {_name(form)}", at.numel, fused),
        Case(f"encode with error feedback, in parts: {_name(form)}", at.numel, in_parts),
    ]


def _bf16(at: Buffers, form: Format) -> list[Case]:
    sent = at.messages(form)

    def encode(i: int) -> None:
        core.bucketed_encode(at.bf16[i], at.table, sent[i], form, key=i)

    def decode(i: int) -> None:
        core.bucketed_decode(sent[i], at.table, at.bf16[i], form)

    return [
        Case("encode bf16 values: " + _name(form), at.numel, encode),
        Case("decode to bf16 values: " + _name(form), at.numel, decode),
    ]


def _summing(at: Buffers, form: Format) -> list[Case]:
    """Return cases of the owner's stage, fused and in its three parts, and of the sum of three messages."""
    sent, out = at.messages(form), at.messages(form)

    def reduce(i: int) -> None:
        core.bucketed_reduce([sent[i]], at.x[i], at.table, out[i], at.y[i], form, scale=0.5, key=i)

    def in_parts(i: int) -> None:
        core.bucketed_sum([sent[i]], at.x[i], at.table, at.y[i], form, scale=0.5)
        core.bucketed_encode(at.y[i], at.table, out[i], form, key=i)
        core.bucketed_decode(out[i], at.table, at.y[i], form)

    def sum_of_three(i: int) -> None:
        core.bucketed_sum(sent[:3], at.x[i], at.table, at.y[i], form, scale=0.5)

    return [
        Case(f"reduce, fused: {_name(form)}", at.numel, reduce),
        Case(f"reduce, in parts: {_name(form)}", at.numel, in_parts),
        Case(f"sum of three messages: {_name(form)}", at.numel, sum_of_three),
        Case(f"checksum of the message: {_name(form)}", at.numel, lambda i: core.checksum(sent[i])),
    ]


def _torch_reference(form: Format) -> list[Case]:
    at = Buffers(_REFERENCE)
    sent = at.messages(form)

    def encode(i: int) -> None:
        reference.bucketed_encode(at.x[i], at.table, sent[i], form, key=i)

    def add(i: int) -> None:
        reference.bucketed_decode(sent[i], at.table, at.y[i], form, add=True)

    return [
        Case("torch reference, 1 MB, encode: " + _name(form), at.numel, encode),
        Case("torch reference, 1 MB, decode and add: " + _name(form), at.numel, add),
    ]


def _other_cases(x: list[Tensor], y: list[Tensor]) -> list[_Row]:
    """Return cases of floats, integers, levels, selection and indices, on fp32 tensors ``x`` and ``y`` in turns."""
    spans = core.Table(torch.tensor([[0, x[0].numel(), 0, 0, core.site_id("bench")]], dtype=torch.int64, device="cpu"))
    coded = _floats(x, y, spans) + _integers(x, y, spans) + _levels(x, y, spans) + _magnitudes(x, y, spans)
    return coded + _selection(x, y) + _spectra(x, y)


def _messages(x: list[Tensor], num_bytes: int) -> list[Tensor]:
    return [torch.zeros(num_bytes, dtype=torch.uint8, device="cpu") for _ in x]


def _floats(x: list[Tensor], y: list[Tensor], spans: core.Table) -> list[_Row]:
    numel = x[0].numel()
    sent = _messages(x, core.natural_bytes(numel))
    for values, message in zip(x, sent, strict=True):
        core.natural_encode(values, spans, message, key=1)
    rows: list[_Row] = [
        ("natural, encode", lambda i: core.natural_encode(x[i], spans, sent[i], key=i)),
        ("natural, decode", lambda i: core.natural_decode(sent[i], spans, y[i])),
    ]
    for bits, mantissa in ((8, 4), (10, 4)):
        rows += _rangefloat(x, y, spans, bits, mantissa)
    return rows


def _rangefloat(x: list[Tensor], y: list[Tensor], spans: core.Table, bits: int, mantissa: int) -> list[_Row]:
    params = torch.tensor([[4.0, float(mantissa)]], dtype=torch.float32, device="cpu")
    sent = _messages(x, core.rangefloat_bytes(x[0].numel(), bits))

    def encode(i: int, rounding: str = "nearest") -> None:
        core.rangefloat_encode(x[i], spans, sent[i], params, bits=bits, rounding=rounding, key=i)

    for i in range(len(x)):
        encode(i)
    return [
        (f"range float of {bits} bits, encode", encode),
        (f"range float of {bits} bits, encode, stochastic", lambda i: encode(i, "stochastic")),
        (f"range float of {bits} bits, decode", lambda i: core.rangefloat_decode(sent[i], spans, y[i], bits=bits)),
    ]


def _integers(x: list[Tensor], y: list[Tensor], spans: core.Table) -> list[_Row]:
    one = torch.tensor([10.0], dtype=torch.float32, device="cpu")
    out = [torch.zeros(v.numel(), dtype=torch.int8, device="cpu") for v in x]
    return [
        ("round to int8", lambda i: core.int_round(x[i], spans, one, out[i], clip=63, key=i)),
        ("round to int8, nearest", lambda i: core.int_round(x[i], spans, one, out[i], clip=63, nearest=True)),
        ("from int8", lambda i: core.int_decode(out[i], spans, y[i], one)),
    ]


def _levels(x: list[Tensor], y: list[Tensor], spans: core.Table) -> list[_Row]:
    bits, bucket = 4, 128
    levels = torch.linspace(0, 1, 16, dtype=torch.float32, device="cpu").view(1, -1)
    sent = _messages(x, core.levels_bytes(x[0].numel(), bits, bucket))
    for values, message in zip(x, sent, strict=True):
        core.levels_encode(values, spans, message, levels, bits=bits, bucket=bucket)
    return [
        ("levels: 4 bits/128, encode", lambda i: core.levels_encode(x[i], spans, sent[i], levels, bits=4, bucket=128)),
        ("levels: 4 bits/128, decode", lambda i: core.levels_decode(sent[i], spans, y[i], bits=4, bucket=128)),
    ]


def _magnitudes(x: list[Tensor], y: list[Tensor], spans: core.Table) -> list[_Row]:
    form: dict[str, Any] = {"bits": 2, "bucket": 128}
    magnitudes = torch.tensor(MAGNITUDES[2], dtype=torch.float32, device="cpu")
    sent = _messages(x, core.magnitudes_bytes(x[0].numel(), **form))
    for values, message in zip(x, sent, strict=True):
        core.magnitudes_encode(values, spans, message, magnitudes, **form)
    return [
        ("gaussian: 2 bits/128, encode", lambda i: core.magnitudes_encode(x[i], spans, sent[i], magnitudes, **form)),
        ("gaussian: 2 bits/128, decode", lambda i: core.magnitudes_decode(sent[i], spans, y[i], magnitudes, **form)),
    ]


def _selection(x: list[Tensor], y: list[Tensor]) -> list[_Row]:
    numel = x[0].numel()
    rows: list[_Row] = [("histogram of magnitudes", lambda i: core.abs_histogram(x[i], 0, numel))]
    for share, name in ((0.01, "1 %"), (0.001, "0.1 %")):
        rows += _topk(x, max(1, int(share * numel)), name)
    k = max(1, numel // 100)
    threshold = float(core.select_topk(x[0], 0, numel, k)[1].abs().min())
    rows.append(("above a threshold, 1 %", lambda i: core.select_threshold(x[i], 0, numel, threshold, 2 * k)))
    return rows + _indices(x, y, k)


def _topk(x: list[Tensor], k: int, name: str) -> list[_Row]:
    numel = x[0].numel()
    return [
        (f"top-k, exact, {name}", lambda i: core.select_topk(x[i], 0, numel, k, key=i)),
        (f"top-k, sampled, {name}", lambda i: core.select_topk(x[i], 0, numel, k, sampled=True, key=i)),
        (f"torch.topk, {name}", lambda i: x[i].abs().topk(k, sorted=False)),
    ]


def _indices(x: list[Tensor], y: list[Tensor], k: int) -> list[_Row]:
    numel = x[0].numel()
    indices, values, _ = core.select_topk(x[0], 0, numel, k)
    message = torch.zeros(core.index_bytes(numel, k), dtype=torch.uint8, device="cpu")
    core.pack_indices(indices, numel, k, message, 0)
    return [
        ("indices, pack, 1 %", lambda i: core.pack_indices(indices, numel, k, message, 0)),
        ("indices, unpack, 1 %", lambda i: core.unpack_indices(message, 0, numel, k)),
        ("sparse add, 1 %", lambda i: core.sparse_add(y[i], 0, numel, indices, values, 0.5)),
    ]


def _spectra(x: list[Tensor], y: list[Tensor]) -> list[_Row]:
    """Return cases of a whole compressor: a transform, the choice, indices and range floats."""
    numel, fft = x[0].numel(), FFT()
    call = CodecCall(Segments.build([Piece("bench", 0, numel, 0, 0, (numel,))]))
    sent = _messages(x, fft.payload_bytes(numel, torch.float32))
    for values, message in zip(x, sent, strict=True):
        fft.encode(values, message, call)
    return [
        ("fft, encode", lambda i: fft.encode(x[i], sent[i], call)),
        ("fft, decode", lambda i: fft.decode(sent[i], y[i], call)),
        ("fft, mean of four", lambda i: fft.mean(sent, y[i], call)),
    ]
