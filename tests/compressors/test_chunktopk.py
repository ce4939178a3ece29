"""The largest elements of each chunk: which they are, what arrives of them, and what they cost."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings, strategies as st

from thinwire.compressors import ChunkTopK, CodecCall, Coded, Piece, Segments
from thinwire.testing.laws import encode_one


def _normal(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def test_a_value_is_the_mean_of_those_of_its_chunk_on_its_side_of_their_mean() -> None:
    x = torch.zeros(8)
    x[[1, 2, 5, 6]] = torch.tensor([1.0, -3.0, 8.0, -12.0])  # their magnitudes' mean is 6
    y = ChunkTopK(k=4, chunk=8).roundtrip(x)
    assert y.tolist() == [0, 2, -2, 0, 0, 10, -10, 0]


def test_of_equal_magnitudes_the_first_are_sent() -> None:
    y = ChunkTopK(k=3, chunk=8).roundtrip(torch.tensor([1.0, -1.0] * 8))
    assert y.nonzero().view(-1).tolist() == [0, 1, 2, 8, 9, 10]


@given(
    k=st.integers(1, 4096),
    chunk=st.sampled_from([1, 7, 4096, 65536]),
    numel=st.integers(1, 20_000),
    order=st.sampled_from(["none", "falling", "rising"]),
)
@settings(max_examples=30)
@example(4096, 4096, 70_001, "falling")
@example(100, 65536, 70_001, "rising")
@example(1, 1, 7, "none")
def test_every_choice_of_elements_arrives(k: int, chunk: int, numel: int, order: str) -> None:
    """Also where all of a layer's largest elements are at one of its ends, which makes the longest unary parts."""
    k = min(k, chunk)
    x = _normal(numel) if order == "none" else torch.arange(1.0, numel + 1)
    x = x.flip(0) if order == "falling" else x
    expected = torch.cat([c.abs() >= c.abs().topk(math.ceil(k * len(c) / chunk)).values[-1] for c in x.split(chunk)])
    assert torch.equal(ChunkTopK(k=k, chunk=chunk).roundtrip(x) != 0, expected)


def test_ten_and_a_half_bits_a_value() -> None:
    """2 bits and 8 for an index, and two bf16 magnitudes for 64 of them. SparseLoCo's packed format has 14."""
    numel = 1 << 20
    assert 8 * ChunkTopK().wire_bytes((numel,)) / (numel / 64) == pytest.approx(10.5, rel=1e-3)


def test_averaged_over_senders_each_element_counts_those_that_sent_it() -> None:
    compressor = ChunkTopK(k=1, chunk=4, average="senders")
    values = torch.tensor([[4.0, 0, 0, 0], [2.0, 0, 0, 0], [0, 2.0, 0, 0]])  # norms 4, 2, 2: the median is 2
    assert _mean(compressor, values).tolist() == [2, 2, 0, 0]
    plain = _mean(ChunkTopK(k=1, chunk=4), values)
    assert torch.allclose(plain, torch.tensor([2, 2 / 3, 0, 0]))


def _mean(compressor: Coded, values: torch.Tensor) -> torch.Tensor:
    messages = [encode_one(compressor, row)[0] for row in values]
    segments = Segments.build([Piece("layer", 0, values.shape[1], 0, 0)])
    mean = torch.empty(values.shape[1])
    compressor.mean(messages, mean, CodecCall(segments, scale=1 / len(values)))
    return mean
