"""Every compressor, held to every law. A new compressor joins by being listed."""

from __future__ import annotations

import pytest
import torch

from thinwire import parse
from thinwire.compressors import Coded, Piece, Segments
from thinwire.kernels import derive_key
from thinwire.testing import LAWS

SPECS = [
    "raw()",
    *(f"minmax(bits={bits}, bucket=128)" for bits in range(1, 9)),
    "minmax(bits=4, bucket=128, rounding=nearest)",
    "minmax(bits=1, bucket=64, rounding=nearest)",
    "minmax(bits=4, bucket=100)",
    "minmax(bits=8, bucket=1024)",
    "minmax(bits=3, bucket=1)",
    "cast(bf16)",
    "cast(fp16)",
    "randk(density=0.1)",
    "randk(density=1.0)",
    "ef(minmax(bits=2, bucket=128))",
    "ef(minmax(bits=1, bucket=64, rounding=nearest))",
    "ef(randk(density=0.05))",
    "ef(cast(bf16))",
]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("spec", SPECS)
def test_law(spec: str, law) -> None:
    law(parse(spec))


class Halved(Coded):
    """A compressor that breaks several laws."""

    spec_name = "halved"
    unbiased = True
    grain = 64

    def payload_bytes(self, numel, dtype):
        return numel * 4

    def encode(self, x, segments, message, *, key, state=None):
        for p in segments.pieces:
            part = torch.nan_to_num(x[p.start : p.start + p.numel].float()) / 2 + torch.rand(1) * 0
            message[p.payload : p.payload + 4 * p.numel].view(torch.float32).copy_(part)

    def decode(self, message, segments, y, *, add=False, scale=1.0):
        for p in segments.pieces:
            v = message[p.payload : p.payload + 4 * p.numel].view(torch.float32) * scale
            y[p.start : p.start + p.numel] = y[p.start : p.start + p.numel] + v if add else v


@pytest.mark.parametrize(
    "name", ["non_finite_is_not_laundered", "unbiased_if_it_says_so", "draws_are_counter_based", "odd_tensors_work"]
)
def test_laws_catch_a_compressor_that_breaks_them(name: str) -> None:
    law = next(law for law in LAWS if law.__name__ == name)
    with pytest.raises(AssertionError):
        law(Halved())


def test_many_segments_are_one_call_and_equal_to_single_ones() -> None:
    compressor = parse("minmax(bits=5, bucket=128)")
    assert isinstance(compressor, Coded)
    x = torch.randn(5000)
    pieces, at = [], 64
    for name, start, numel in (("a", 0, 1000), ("b", 1500, 129), ("c", 2000, 3000)):
        pieces.append(Piece(name, start, numel, 0, at))
        at += compressor.payload_bytes(numel, x.dtype)
    message = torch.zeros(at, dtype=torch.uint8)
    compressor.encode(x, Segments.build(pieces), message, key=derive_key(1))
    for piece in pieces:
        alone = torch.zeros(compressor.payload_bytes(piece.numel, x.dtype), dtype=torch.uint8)
        part = x[piece.start : piece.start + piece.numel].clone()
        compressor.encode(part, Segments.build([Piece(piece.name, 0, piece.numel, 0, 0)]), alone, key=derive_key(1))
        assert torch.equal(message[piece.payload : piece.payload + alone.numel()], alone)
