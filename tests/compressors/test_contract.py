"""The contract is small: four methods make a compressor, and wrappers need not know what else one does."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire import parse
from thinwire.compressors import (
    CodecCall,
    Coded,
    Learned,
    Saturating,
    Scheduled,
    StepEnd,
    at_step,
    cold_start,
    find_mixin,
    for_world,
    learns_at,
    unwrap,
)
from thinwire.testing import LAWS


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


def test_what_only_some_do_is_found_inside_error_feedback() -> None:
    for spec, mixin in {
        "fft(theta=diminishing)": Scheduled,
        "levels(bits=4, min_numel=0)": Learned,
        "natural": Saturating,
        "globaltopk(density=0.1)": StepEnd,
    }.items():
        compressor = parse(f"ef({spec})")
        assert not isinstance(compressor, mixin)
        assert find_mixin(compressor, mixin) == unwrap(compressor)
        assert find_mixin(Halves(), mixin) is None


def test_changed_parameters_keep_error_feedback() -> None:
    fft = parse("ef(fft(theta=((0, 0.9), (100, 0.5))))")
    assert str(at_step(fft, 100, None)) == "ef(fft(theta=0.5, bits=10))"
    intsgd = parse("ef(intsgd(bits=8, rounding=determ))")
    assert str(for_world(intsgd, 4, 1000)) == "ef(intsgd(bits=8, rounding=determ, num_ranks=4, numel=1000))"
    first = cold_start(intsgd)
    assert first is not None
    assert str(first).startswith("ef(exact(")
    assert learns_at(parse("ef(rangefloat(bits=8))")) == learns_at(parse("rangefloat(bits=8)")) != ()


def test_without_a_mixin_the_compressor_stays_the_same() -> None:
    compressor = parse("ef(minmax(bits=2))")
    assert at_step(compressor, 5, 0.1) is compressor
    assert for_world(compressor, 4, 1000) is compressor
    assert cold_start(compressor) is None
    assert learns_at(compressor) == ()
