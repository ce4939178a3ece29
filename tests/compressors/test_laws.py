"""Every compressor, held to every law. A new compressor joins by being listed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from thinwire import parse
from thinwire.compressors import CodecCall, Coded, Compressor, Traits
from thinwire.testing import LAWS

SPECS = [
    "raw()",
    *(f"minmax(bits={bits}, bucket=128)" for bits in range(1, 9)),
    *("minmax(bits=4, bucket=128, rounding=nearest)", "minmax(bits=1, bucket=64, rounding=nearest)"),
    *("minmax(bits=4, bucket=100)", "minmax(bits=8, bucket=1024)", "minmax(bits=3, bucket=1)", "cast(bf16)"),
    *("cast(fp16)", "randk(density=0.1)", "randk(density=1.0)", "ef(minmax(bits=2, bucket=128))"),
    *("ef(minmax(bits=1, bucket=64, rounding=nearest))", "ef(randk(density=0.05))", "ef(cast(bf16))"),
    *("qsgd(bits=4, bucket=128)", "qsgd(bits=2, bucket=64)", "qsgd(bits=4, bucket=100, norm=linf)"),
    "qsgd(bits=4, bucket=layer, levels=64)",
    *(f"maxabs(bits={bits})" for bits in range(2, 9)),
    *("maxabs(bits=4, scale=layer)", "maxabs(bits=4, rounding=nearest)", "maxabs(bits=3, midrise=True)"),
    *("maxabs(bits=1, midrise=True, rounding=nearest)", "terngrad", "terngrad(clip=2.5)", "terngrad(bucket=256)"),
    *("natural", "onebit(bucket=512)", "onebit(bucket=layer)", "sign", "sign(majority=True)", "sign(bucket=128)"),
    *("ef(onebit)", "ef(sign(majority=True))", "ef(sign)", "lattice(bits=8, bucket=1024)"),
    *("lattice(bits=3, bucket=64)", "levels(bits=4, bucket=1024, min_numel=0)"),
    *("levels(bits=6, bucket=128, learn_at=(0,), min_numel=0)", "rangefloat(bits=10)"),
    *("rangefloat(bits=8, mantissa=3, range=1e31)", "rangefloat(bits=8, rounding=stochastic)"),
    *("rangefloat(bits=6, rounding=truncate)", "gaussian(bits=2)", "gaussian(bits=3)"),
    *("gaussian(bits=4, bucket=100)", "ef(gaussian(bits=2, bucket=64))", "truncate(gamma=4)", "truncate(gamma=1)"),
    *("topk(density=0.1)", "topk(density=0.1, select=sampled)", "topk(density=1.0)"),
    *("threshold(lam=1.0, capacity=0.5)", "threshold(lam=0.5, capacity=0.1)", "globaltopk(density=0.05)"),
    *("chunktopk(k=64, chunk=4096)", "chunktopk(k=3, chunk=100, average=senders)"),
    *("ef(chunktopk(k=8, chunk=64), decay=0.95)", "ef(powersgd(rank=2), decay=0.9)"),
    *("topk(density=0.1) | minmax(bits=8)", "threshold(lam=1.0, capacity=0.5) | natural", "fft(theta=0.85)"),
    *("fft(theta=0.5, bits=32, block=whole)", "fft(theta=0.9, bits=8, block=100, cast=True)", "powersgd(rank=4)"),
    *("ef(topk(density=0.1))", "ef(topk(density=0.1) | minmax(bits=8))", "ef(threshold(lam=1.0))"),
    *("ef(globaltopk(density=0.05))", "ef(fft(theta=0.85))", "ef(powersgd(rank=2))", "ef(natural)"),
    *("ef(levels(bits=2, min_numel=0))", "intsgd(bits=2)", "intsgd(bits=4)", "intsgd(bits=8)", "intsgd(bits=32)"),
    *("intsgd(bits=8, rounding=determ)", "intsgd(bits=8, block=global, beta=0.5, eps=1e-06)"),
    *("ef(intsgd(bits=8, rounding=determ))", "intsgd(bits=8, scale=params)", "intdiana(bits=2)"),
    *("intdiana(bits=4, rounding=determ, block=global)", "intdiana(bits=8, beta=0.9)", "heuristic_intsgd(bits=8)"),
    *("heuristic_intsgd(bits=32)", "heuristic_intsgd(bits=8, rounding=random)", "ef(heuristic_intsgd(bits=8))"),
    *("dgc(topk(density=0.05))", "delta(maxabs(bits=3))", "delta(topk(density=0.2) | maxabs(bits=8))"),
    *("direct(maxabs(bits=3))", "dgc(topk(density=0.05) | minmax(bits=8), momentum=0.5)"),
]


ALIKE = {
    *(f"minmax(bits={bits}, bucket=128)" for bits in (2, 3, 5, 6, 7)),
    *("minmax(bits=8, bucket=1024)", "minmax(bits=3, bucket=1)", "randk(density=1.0)"),
    *(f"maxabs(bits={bits})" for bits in (3, 4, 5, 6, 7)),
    *("qsgd(bits=2, bucket=64)", "terngrad(bucket=256)", "sign(bucket=128)", "ef(sign)", "lattice(bits=3, bucket=64)"),
    *("rangefloat(bits=10)", "gaussian(bits=3)", "truncate(gamma=1)", "threshold(lam=0.5, capacity=0.1)"),
    *("topk(density=1.0)", "chunktopk(k=64, chunk=4096)", "ef(natural)", "ef(topk(density=0.1))"),
    *("ef(cast(bf16))", "ef(fft(theta=0.85))", "intsgd(bits=4)", "intsgd(bits=8, rounding=determ)"),
    *("intdiana(bits=8, beta=0.9)", "heuristic_intsgd(bits=32)", "delta(topk(density=0.2) | maxabs(bits=8))"),
    *("ef(globaltopk(density=0.05))", "ef(powersgd(rank=2), decay=0.9)", "ef(heuristic_intsgd(bits=8))"),
    *("direct(maxabs(bits=3))", "dgc(topk(density=0.05))"),
}
"""Specs whose messages are frozen, but which differ from another one by a number, or by parts that others have."""

FAMILIES = [
    *("raw()", "minmax(bits=4, bucket=128, rounding=nearest)", "cast(bf16)", "randk(density=0.1)"),
    *("ef(minmax(bits=2, bucket=128))", "qsgd(bits=4, bucket=128)", "maxabs(bits=4)", "terngrad", "natural"),
    *("onebit(bucket=512)", "sign(majority=True)", "lattice(bits=8, bucket=1024)"),
    *("levels(bits=6, bucket=128, learn_at=(0,), min_numel=0)", "rangefloat(bits=8, rounding=stochastic)"),
    *("gaussian(bits=2)", "truncate(gamma=4)", "topk(density=0.1) | minmax(bits=8)"),
    *("threshold(lam=1.0, capacity=0.5)", "globaltopk(density=0.05)", "ef(chunktopk(k=8, chunk=64), decay=0.95)"),
    *("fft(theta=0.85)", "ef(powersgd(rank=2))", "intsgd(bits=2)", "ef(intsgd(bits=8, rounding=determ))"),
    *("intdiana(bits=4, rounding=determ, block=global)", "heuristic_intsgd(bits=8)"),
    "dgc(topk(density=0.05) | minmax(bits=8), momentum=0.5)",
]
"""One of every kind of arithmetic that serves gradients, for what is tried with whole worlds of ranks."""


def broken_laws(compressor: Compressor) -> list[str]:
    """All laws are tried, whichever fail."""
    found = []
    for law in LAWS:
        try:
            law(compressor)
        except Exception as error:  # noqa: BLE001 - reported with the law's name
            found.append(f"{law.__name__}: {error!r}")
    return found


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec not in ALIKE])
def test_laws(spec: str) -> None:
    broken = broken_laws(parse(spec))
    assert not broken, "\n".join(broken)


class Halved(Coded):
    """A compressor that breaks several laws."""

    spec_name = "halved"
    traits = Traits(unbiased=True)
    grain = 64

    def payload_bytes(self, numel, dtype):
        return numel * 4

    def encode(self, x, message, call):
        for p in call.pieces:
            part = torch.nan_to_num(x[p.start : p.start + p.numel].float()) / 2 + torch.rand(1) * 0
            message[p.payload : p.payload + 4 * p.numel].view(torch.float32).copy_(part)

    def decode(self, message, y, call, *, add=False):
        for p in call.pieces:
            v = message[p.payload : p.payload + 4 * p.numel].view(torch.float32) * call.scale
            y[p.start : p.start + p.numel] = y[p.start : p.start + p.numel] + v if add else v


def test_laws_catch_a_compressor_that_breaks_them() -> None:
    broken = {text.partition(":")[0] for text in broken_laws(Halved())}
    assert broken >= {
        *("non_finite_is_not_laundered", "unbiased_if_it_says_so"),
        *("draws_are_counter_based", "odd_tensors_work"),
    }


@dataclass(frozen=True)
class Halves(Coded):
    """Values in bf16, in the four methods that a coded compressor needs."""

    spec_name = "halves"

    @property
    def grain(self) -> int:
        return 128

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return -(-numel // 32) * 64

    def encode(self, x: Tensor, message: Tensor, call: CodecCall) -> None:
        for piece in call.pieces:
            payload = message[piece.payload : piece.payload + self.payload_bytes(piece.numel, x.dtype)]
            payload.zero_().view(torch.bfloat16)[: piece.numel] = x[piece.elements]

    def decode(self, message: Tensor, y: Tensor, call: CodecCall, *, add: bool = False) -> None:
        for piece in call.pieces:
            end = piece.payload + self.payload_bytes(piece.numel, y.dtype)
            if end > message.numel():
                raise ValueError(f"message of {message.numel()} bytes is too short")
            values = message[piece.payload : end].view(torch.bfloat16)[: piece.numel].float() * call.scale
            y[piece.elements] = y[piece.elements] + values if add else values


def test_four_methods_make_a_compressor() -> None:
    for law in LAWS:
        if law.__name__ != "spec_gives_it_back":  # it is not registered
            law(Halves())
