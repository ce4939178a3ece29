"""Scatter-reduce-all-gather and its layout, over threads."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings, strategies as st

from harness import run_threads
from thinwire import MessageError, PeerFailedError, TransportError, parse
from thinwire.collectives import (
    CollectiveCall,
    Layer,
    Layout,
    LoopbackTransport,
    all_gather,
    all_reduce,
    complete,
    part_layout,
    reduce_scatter,
    sent_bytes,
)
from thinwire.collectives.message import HEADER_BYTES, seal, verify
from thinwire.compressors import Coded, MinMax, Raw


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


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_ranks_end_with_the_same_bytes_and_the_mean(num_ranks: int, dtype: torch.dtype) -> None:
    layout = Layout.build(MIXED, num_ranks, dtype)
    inputs = [gradient(rank, layout.numel, dtype) for rank in range(num_ranks)]
    results = run_threads(lambda t: reduce_on(t, layout, inputs[t.rank].clone()), num_ranks)
    for other in results[1:]:
        assert torch.equal(other.view(torch.uint8), results[0].view(torch.uint8))
    mean = torch.stack([x.float() for x in inputs]).mean(0)
    for layer in MIXED:
        part = slice(layer.start, layer.start + layer.numel)
        off = (results[0][part].float() - mean[part]).abs()
        if isinstance(layer.compressor, Raw):
            assert float(off.max() if layer.numel else 0) <= (1e-6 if dtype == torch.float32 else 1e-2)
        elif layer.numel:
            # Two codings, each off by less than one level of a range that no bucket exceeds.
            assert isinstance(layer.compressor, MinMax)
            level = (max(float(x.max() - x.min()) for x in inputs)) / (2**layer.compressor.bits - 1)
            assert float(off.max()) < 2.05 * level


def test_the_mean_is_unbiased_over_steps() -> None:
    layout = Layout.build(layers_of((2048, "minmax(bits=2)")), 3, torch.float32)
    inputs = [gradient(rank, 2048) for rank in range(3)]

    def run(transport):
        total = torch.zeros(2048, dtype=torch.float64)
        for step in range(300):
            total += reduce_on(transport, layout, inputs[transport.rank].clone(), step=step)
        return total / 300

    averaged = run_threads(run, 3)[0]
    off = averaged - torch.stack(inputs).double().mean(0)
    assert abs(float(off.mean())) < 0.002
    assert float(off.abs().max()) < 0.35
    single = run_threads(lambda t: reduce_on(t, layout, inputs[t.rank].clone()), 3)[0]
    assert float(off.norm()) < 0.15 * float((single - torch.stack(inputs).mean(0)).norm())


def test_bytes_at_the_transport_are_the_formula() -> None:
    for num_ranks in (2, 4):
        layout = Layout.build(MIXED, num_ranks, torch.float32)

        def run(transport, layout=layout):
            reduce_on(transport, layout, gradient(transport.rank, layout.numel))
            return transport.sent_bytes, transport.received_bytes

        counted = run_threads(run, num_ranks)
        assert [sent for sent, _ in counted] == [layout.sent_bytes(rank) for rank in range(num_ranks)]
        assert sum(sent for sent, _ in counted) == sum(received for _, received in counted)


def test_one_large_layer_costs_its_formula() -> None:
    """4 bits and 64/128 bits of scales an element, to the byte, but for the frames."""
    numel = 1 << 20
    layout = Layout.build(layers_of((numel, "minmax")), 2, torch.float32)
    assert layout.sent_bytes(0) == layout.sent_bytes(1) == numel * 4.5 / 8 + 2 * HEADER_BYTES


@settings(max_examples=60, deadline=None)
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


def test_chunks_are_balanced() -> None:
    layout = Layout.build(layers_of((200_000, "minmax"), (150_000, "minmax(bits=8)"), (3000, "raw")), 4, torch.float32)
    sizes = [chunk.message_bytes for chunk in layout.chunks]
    assert max(sizes) < 1.1 * min(sizes)


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

    def test_what_was_sealed_is_accepted(self) -> None:
        verify(self.sealed(), **self.expected)

    @pytest.mark.parametrize(
        ("span", "errors"),
        [(range(36), (MessageError, PeerFailedError)), (range(HEADER_BYTES, HEADER_BYTES + 256), MessageError)],
        ids=["header", "payload"],
    )
    def test_every_flipped_bit_is_found(self, span: range, errors: type[Exception]) -> None:
        message = self.sealed()
        for at in span:
            for bit in range(8):
                damaged = message.clone()
                damaged[at] ^= 1 << bit
                with pytest.raises(errors, match="damaged" if at >= HEADER_BYTES else None):
                    verify(damaged, **self.expected)

    @pytest.mark.parametrize("size", [0, 1, 63])
    def test_short_messages_raise(self, size: int) -> None:
        with pytest.raises(MessageError):
            verify(self.sealed()[:size], **self.expected)

    def test_random_bytes_raise(self) -> None:
        for seed in range(50):
            generator = torch.Generator().manual_seed(seed)
            with pytest.raises(MessageError):
                verify(torch.randint(0, 256, (320,), dtype=torch.uint8, generator=generator), **self.expected)

    @pytest.mark.parametrize("other", [{"source": 2}, {"phase": 1}, {"step": 8}, {"digest": 1}])
    def test_a_message_of_something_else_raises(self, other: dict[str, int]) -> None:
        with pytest.raises(MessageError, match="out of step"):
            verify(self.sealed(), **{**self.expected, **other})


def test_a_silent_rank_is_a_transport_error() -> None:
    layout = Layout.build(layers_of((4096, "minmax"), (100, "raw")), 3, torch.float32)

    def run(transport: LoopbackTransport):
        if transport.rank == 2:
            return None
        with pytest.raises(TransportError, match="rank 2"):
            reduce_on(transport, layout, gradient(transport.rank, layout.numel))
        return True

    assert run_threads(run, 3, timeout_s=4.0)[:2] == [True, True]


class TestParts:
    """Reduce-scatter and all-gather of buffers that have a part for each rank."""

    def part(self, dtype: torch.dtype, num_ranks: int) -> Layout:
        return part_layout(MIXED, num_ranks, dtype)

    @pytest.mark.parametrize("num_ranks", [2, 3, 4])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_each_rank_gets_the_sum_of_its_part(self, num_ranks: int, dtype: torch.dtype) -> None:
        layout = self.part(dtype, num_ranks)
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

    @pytest.mark.parametrize("num_ranks", [2, 3])
    def test_all_ranks_hold_what_each_part_decodes_to(self, num_ranks: int) -> None:
        layout = self.part(torch.float32, num_ranks)
        whole = gradient(0, layout.numel).view(num_ranks, -1)

        def run(transport):
            x = torch.zeros(num_ranks, layout.part_numel)
            x[transport.rank] = whole[transport.rank]
            buffers = transport.open(layout.reduction_traffic(up=False))
            complete(all_gather(x.view(-1), layout, transport, buffers, CollectiveCall(seed=0, step=0)))
            return x

        results = run_threads(run, num_ranks)
        for result in results:
            assert torch.equal(result, results[0])
        assert torch.equal(results[0][:, 5000:5071], whole[:, 5000:5071])
        assert 0 < float((results[0] - whole).abs().max()) < 1.01 * float(whole.max() - whole.min()) / 3

    def test_a_long_part_is_sent_in_slices(self) -> None:
        layers = layers_of((3 << 20, "minmax"))
        layout = part_layout(layers, 2, torch.float32)
        assert len(layout.chunks) == len(layout.local) == 6
        assert [chunk.owner for chunk in layout.chunks] == [0, 0, 0, 1, 1, 1]

    def test_parts_draw_apart(self) -> None:
        layout = part_layout(layers_of((4096, "minmax(bits=2)")), 3, torch.float32)

        def run(transport):
            x = gradient(0, 4096).repeat(3) if transport.rank == 0 else torch.zeros(3 * 4096)
            out, buffers = torch.empty(4096), transport.open(layout.reduction_traffic(down=False))
            complete(reduce_scatter(x, layout, transport, buffers, CollectiveCall(seed=0, step=0, scale=1.0), out=out))
            return out

        exact, first, second = run_threads(run, 3)
        assert torch.equal(exact, gradient(0, 4096))
        assert not torch.equal(first, second)
