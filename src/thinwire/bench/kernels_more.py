"""Rows of ``thinwire bench kernels`` beyond the bucketed quantisers: floats, integers, levels, selection, indices."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from thinwire import kernels as core

Row = tuple[str, Callable[[int], object]]
"""What an operation is called, and how it is run on the i-th of the buffers."""


def cases(x: list[Tensor], y: list[Tensor]) -> list[Row]:
    """One row an operation. ``x`` and ``y``: fp32 tensors of one size, several of each, that take turns."""
    spans = core.Table(torch.tensor([[0, x[0].numel(), 0, 0, core.site_id("bench")]]))
    return _floats(x, y, spans) + _integers(x, y, spans) + _levels(x, y, spans) + _selection(x, y)


def _messages(x: list[Tensor], num_bytes: int) -> list[Tensor]:
    return [torch.zeros(num_bytes, dtype=torch.uint8) for _ in x]


def _floats(x: list[Tensor], y: list[Tensor], spans: core.Table) -> list[Row]:
    numel = x[0].numel()
    sent = _messages(x, core.natural_bytes(numel))
    for values, message in zip(x, sent, strict=True):
        core.natural_encode(values, spans, message, key=1)
    rows: list[Row] = [
        ("natural, encode", lambda i: core.natural_encode(x[i], spans, sent[i], key=i)),
        ("natural, decode", lambda i: core.natural_decode(sent[i], spans, y[i])),
    ]
    for bits, mantissa in ((8, 4), (10, 4)):
        rows += _rangefloat(x, y, spans, bits, mantissa)
    return rows


def _rangefloat(x: list[Tensor], y: list[Tensor], spans: core.Table, bits: int, mantissa: int) -> list[Row]:
    params = torch.tensor([[4.0, float(mantissa)]])
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


def _integers(x: list[Tensor], y: list[Tensor], spans: core.Table) -> list[Row]:
    one = torch.tensor([10.0])
    out = [torch.zeros(v.numel(), dtype=torch.int8) for v in x]
    return [
        ("round to int8", lambda i: core.int_round(x[i], spans, one, out[i], clip=63, key=i)),
        ("round to int8, nearest", lambda i: core.int_round(x[i], spans, one, out[i], clip=63, nearest=True)),
        ("from int8", lambda i: core.int_decode(out[i], spans, y[i], one)),
    ]


def _levels(x: list[Tensor], y: list[Tensor], spans: core.Table) -> list[Row]:
    bits, bucket = 4, 128
    levels = torch.linspace(0, 1, 16).view(1, -1)
    sent = _messages(x, core.levels_bytes(x[0].numel(), bits, bucket))
    for values, message in zip(x, sent, strict=True):
        core.levels_encode(values, spans, message, levels, bits=bits, bucket=bucket)
    return [
        ("levels: 4 bits/128, encode", lambda i: core.levels_encode(x[i], spans, sent[i], levels, bits=4, bucket=128)),
        ("levels: 4 bits/128, decode", lambda i: core.levels_decode(sent[i], spans, y[i], bits=4, bucket=128)),
    ]


def _selection(x: list[Tensor], y: list[Tensor]) -> list[Row]:
    numel = x[0].numel()
    rows: list[Row] = [("histogram of magnitudes", lambda i: core.abs_histogram(x[i], 0, numel))]
    for share, name in ((0.01, "1 %"), (0.001, "0.1 %")):
        rows += _topk(x, max(1, int(share * numel)), name)
    k = max(1, numel // 100)
    threshold = float(core.select_topk(x[0], 0, numel, k)[1].abs().min())
    rows.append(("above a threshold, 1 %", lambda i: core.select_threshold(x[i], 0, numel, threshold, 2 * k)))
    return rows + _indices(x, y, k)


def _topk(x: list[Tensor], k: int, name: str) -> list[Row]:
    numel = x[0].numel()
    return [
        (f"top-k, exact, {name}", lambda i: core.select_topk(x[i], 0, numel, k, key=i)),
        (f"top-k, sampled, {name}", lambda i: core.select_topk(x[i], 0, numel, k, sampled=True, key=i)),
        (f"torch.topk, {name}", lambda i: x[i].abs().topk(k, sorted=False)),
    ]


def _indices(x: list[Tensor], y: list[Tensor], k: int) -> list[Row]:
    numel = x[0].numel()
    indices, values, _ = core.select_topk(x[0], 0, numel, k)
    message = torch.zeros(core.index_bytes(numel, k), dtype=torch.uint8)
    core.pack_indices(indices, numel, k, message, 0)
    return [
        ("indices, pack, 1 %", lambda i: core.pack_indices(indices, numel, k, message, 0)),
        ("indices, unpack, 1 %", lambda i: core.unpack_indices(message, 0, numel, k)),
        ("sparse add, 1 %", lambda i: core.sparse_add(y[i], 0, numel, indices, values, 0.5)),
    ]
