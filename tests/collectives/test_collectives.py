"""Scatter-reduce-all-gather and its layout, over threads."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings, strategies as st

from harness import run_threads
from thinwire import MessageError, PeerFailedError, parse
from thinwire.collectives import (
    CollectiveCall,
    Layer,
    Layout,
    all_reduce,
    complete,
    part_layout,
    reduce_scatter,
    sent_bytes,
)
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


def reduce_on(transport, layout, x, *, step=0, seed=0):
    buffers = transport.open(layout.reduction_traffic())
    complete(all_reduce(x, layout, transport, buffers, CollectiveCall(seed=seed, step=step)))
    return x


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


def test_not_a_number_reaches_every_rank() -> None:
    layout = Layout.build(layers_of((4096, "minmax"), (10, "raw")), 2, torch.float32)

    def run(transport):
        x = gradient(transport.rank, layout.numel)
        if transport.rank == 1:
            x[5] = float("nan")
            x[4100] = float("inf")
        return reduce_on(transport, layout, x)

    for y in run_threads(run, 2):
        assert bool(y[:128].isnan().all())
        assert bool(y[128:4096].isfinite().all())
        assert not bool(y[4100].isfinite())


class TestHostileMessages:
    frame: ClassVar[dict[str, int]] = {"source": 1, "phase": 0, "step": 7, "digest": 0x1234}
    expected: ClassVar[dict[str, int]] = {"peer": 1, **frame}

    def sealed(self) -> torch.Tensor:
        message = torch.randint(0, 256, (HEADER_BYTES + 256,), dtype=torch.uint8)
        seal(message, **self.frame)
        return message

    def test_every_flipped_bit_is_found(self) -> None:
        message = self.sealed()
        verify(message, **self.expected)
        for at in (*range(36), *range(HEADER_BYTES, HEADER_BYTES + 256)):
            for bit in range(8):
                damaged = message.clone()
                damaged[at] ^= 1 << bit
                payload = at >= HEADER_BYTES
                errors = MessageError if payload else (MessageError, PeerFailedError)
                with pytest.raises(errors, match="damaged" if payload else None):
                    verify(damaged, **self.expected)

    def test_what_is_no_such_message_raises(self) -> None:
        for size in (0, 1, 63):
            with pytest.raises(MessageError):
                verify(self.sealed()[:size], **self.expected)
        for seed in range(50):
            generator = torch.Generator().manual_seed(seed)
            with pytest.raises(MessageError):
                verify(torch.randint(0, 256, (320,), dtype=torch.uint8, generator=generator), **self.expected)
        for other in ({"source": 2}, {"phase": 1}, {"step": 8}, {"digest": 1}):
            with pytest.raises(MessageError, match="out of step"):
                verify(self.sealed(), **{**self.expected, **other})


@pytest.mark.parametrize(("num_ranks", "dtype"), [(2, torch.bfloat16), (3, torch.float32)])
def test_each_rank_gets_the_sum_of_its_part(num_ranks: int, dtype: torch.dtype) -> None:
    layout = part_layout(MIXED, num_ranks, dtype)
    inputs = [gradient(rank, layout.numel, dtype) for rank in range(num_ranks)]

    def run(transport):
        x, out = inputs[transport.rank].clone(), torch.empty(layout.part_numel, dtype=dtype)
        buffers = transport.open(layout.reduction_traffic(up=True, down=False))
        complete(reduce_scatter(x, layout, transport, buffers, CollectiveCall(seed=0, step=0, scale=1.0), out=out))
        assert torch.equal(x, inputs[transport.rank])
        assert transport.sent_bytes == sent_bytes(layout.reduction_traffic(down=False), transport.rank)
        return out

    exact = torch.stack([x.float() for x in inputs]).sum(0).view(num_ranks, -1)
    for rank, out in enumerate(run_threads(run, num_ranks)):
        off = (out.float() - exact[rank]).abs()
        assert off[5000:5071].max() <= (1e-6 if dtype == torch.float32 else 4e-2)
        level = max(float(x.max() - x.min()) for x in inputs) / 15
        assert 0 < float(off[:5000].max()) < (num_ranks - 1) * level + (0.0 if dtype == torch.float32 else 0.1)
