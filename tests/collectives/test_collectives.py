"""Scatter-reduce-all-gather and its layout, over threads."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings, strategies as st

from thinwire import MessageError, PeerFailedError, parse
from thinwire.collectives import Layer, Layout, contiguous_values, overwrite
from thinwire.collectives.message import HEADER_BYTES, seal, verify
from thinwire.compressors import Coded


def layers_of(*pairs: tuple[int, str]) -> list[Layer]:
    layers, start = [], 0
    for i, (numel, spec) in enumerate(pairs):
        compressor = parse(spec)
        assert isinstance(compressor, Coded)
        layers.append(Layer(f"layer{i}", start, (numel,), compressor))
        start += numel
    return layers


MIXED = layers_of(
    (5000, "minmax(bits=4)"), (70, "raw"), (1, "raw"), (3000, "minmax(bits=2, bucket=64)"), (0, "raw"), (999, "minmax")
)


def gradient(rank: int, numel: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 + rank)).to(dtype)


@settings(max_examples=30)
@given(
    sizes=st.lists(
        st.tuples(st.integers(0, 6000), st.sampled_from(["raw", "minmax", "minmax(bits=3, bucket=100)"])), max_size=8
    ),
    num_ranks=st.integers(2, 9),
)
def test_every_element_has_one_owner(sizes, num_ranks) -> None:
    layers = layers_of(*sizes)
    layout = Layout.build(layers, num_ranks, torch.float32)
    owned = torch.zeros(layout.numel, dtype=torch.int64)
    for chunk in layout.chunks:
        for compressor, segments in chunk.groups:
            for piece in segments.pieces:
                layer = next(layer for layer in layers if layer.name == piece.name)
                assert piece.start - piece.index0 == layer.start
                assert compressor.grain is not None
                assert piece.index0 % compressor.grain == 0
                owned[piece.start : piece.start + piece.numel] += 1
                assert piece.payload + compressor.payload_bytes(piece.numel, torch.float32) <= chunk.message_bytes
    assert bool((owned == 1).all())


def test_every_flipped_bit_is_found_and_every_message_that_is_out_of_step() -> None:
    message, frame = torch.arange(HEADER_BYTES + 256).to(torch.uint8), {"phase": 0, "step": 7, "digest": 0x1234}
    seal(message, source=1, **frame)
    expected = {"peer": 1, "source": 1, **frame}
    verify(message, **expected)
    for at, bit in product((*range(36), *range(HEADER_BYTES, HEADER_BYTES + 256)), range(8)):
        damaged, is_payload = message.clone(), at >= HEADER_BYTES
        damaged[at] ^= 1 << bit
        errors = MessageError if is_payload else (MessageError, PeerFailedError)
        with pytest.raises(errors, match="damaged" if is_payload else None):
            verify(damaged, **expected)
    for other in ({"source": 2}, {"phase": 1}, {"step": 8}, {"digest": 1}):
        with pytest.raises(MessageError, match="out of step"):
            verify(message, **expected | other)


def test_what_is_written_to_a_contiguous_piece_is_written_to_the_tensor() -> None:
    whole = torch.arange(24.0).view(4, 6)
    for tensor in (whole.clone(), whole.clone().t(), whole.clone()[:, 1:3], torch.complex(whole, -whole).t()):
        before = tensor.clone()
        with contiguous_values(tensor) as values:
            assert values.is_contiguous()
            assert torch.equal(values, torch.view_as_real(before) if before.is_complex() else before)
            values.mul_(2)
        assert torch.equal(tensor, 2 * before)


def test_an_expanded_tensor_is_overwritten_by_what_each_element_is_first() -> None:
    row = torch.arange(3.0)
    with contiguous_values(row.expand(2, 5, 3)) as values:
        assert values.shape == (2, 5, 3)
        values.add_(1.0)
    assert torch.equal(row, torch.tensor([1.0, 2.0, 3.0]))
    overwrite(row.view(3, 1).expand(3, 0), torch.empty(3, 0))
    overwrite(row[0].expand(4), torch.full((4,), 7.0))
    assert torch.equal(row, torch.tensor([7.0, 2.0, 3.0]))
