"""The all-gather: layers that stay whole, messages of bounded size, failures."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from harness import run_threads
from thinwire import MessageError, TransportError, parse
from thinwire.collectives import CollectiveCall, Layer, Layout, complete, gather_buffers, gather_mean, parse_algorithm
from thinwire.collectives.exchange import Exchange
from thinwire.collectives.message import HEADER_BYTES, PeerFailedError
from thinwire.compressors import Coded

FIXED = "topk(density=0.1)"
BOUNDED = "threshold(lam=1.0, capacity=0.5)"
SIZES = (3000, 0, 70_000, 1)


def layout_of(spec: str, num_ranks: int) -> Layout:
    compressor = parse(spec)
    assert isinstance(compressor, Coded)
    layers, start = [], 5  # a gap that nobody may touch
    for i, numel in enumerate(SIZES):
        layers.append(Layer(f"layer{i}", start, (numel,), compressor))
        start += numel
    return Layout.build(layers, num_ranks, torch.float32)


def values_of(rank: int) -> torch.Tensor:
    return torch.randn(sum(SIZES) + 5, generator=torch.Generator().manual_seed(rank))


def gather(transport, spec: str, steps: int = 1):
    layout = layout_of(spec, transport.world_size)
    buffers = gather_buffers(layout, transport)
    found = []
    for step in range(steps):
        x = values_of(transport.rank)
        complete(gather_mean(x, layout, transport, buffers, CollectiveCall(seed=0, step=step)))
        found.append(x)
    return found, transport.sent_bytes, layout.sent_bytes(transport.rank)


@pytest.mark.parametrize("spec", [FIXED, BOUNDED, "fft(theta=0.8)", "terngrad", f"{BOUNDED} | minmax(bits=8)"])
@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_all_ranks_end_with_the_same_bytes_and_the_mean_of_what_was_sent(spec: str, num_ranks: int) -> None:
    answers = run_threads(lambda t: gather(t, spec, 2), num_ranks)
    for found, sent, formula in answers:
        assert all(torch.equal(a, b) for x, y in zip(found, answers[0][0], strict=True) for a, b in [(x[5:], y[5:])])
        assert sent == 2 * formula if "threshold" not in spec else 0.3 * formula < sent < 2 * formula
    for rank, (found, _, _) in enumerate(answers):
        assert torch.equal(found[0][:5], values_of(rank)[:5])
    if "terngrad" not in spec and "minmax" not in spec:  # those draw by rank and step
        compressor, start = parse(spec), 5
        for numel in SIZES:
            parts = [compressor.roundtrip(values_of(r)[start : start + numel]) for r in range(num_ranks)]
            mean = torch.stack(parts).mean(0)
            assert torch.allclose(answers[0][0][0][start : start + numel], mean, atol=1e-5)
            start += numel


@pytest.mark.parametrize("spec", [FIXED, BOUNDED])
def test_not_a_number_reaches_every_rank(spec: str) -> None:
    def run(transport):
        layout = layout_of(spec, transport.world_size)
        x = values_of(transport.rank)
        if transport.rank == 1:
            x[100] = math.nan
        complete(gather_mean(x, layout, transport, gather_buffers(layout, transport), CollectiveCall(seed=0, step=0)))
        return x

    for x in run_threads(run, 3):
        assert bool(torch.isnan(x[5 : 5 + SIZES[0]]).all())
        assert bool(torch.isfinite(x[5 + SIZES[0] :]).all())


@pytest.mark.parametrize("spec", [FIXED, BOUNDED])
@pytest.mark.parametrize("failing", [0, 2])
def test_all_ranks_hear_of_a_failure_and_the_next_step_works(spec: str, failing: int) -> None:
    def run(transport):
        layout = layout_of(spec, transport.world_size)
        buffers = gather_buffers(layout, transport)
        bad = values_of(transport.rank).to(torch.float64 if transport.rank == failing else torch.float32)
        error: Exception | None = None
        try:
            complete(gather_mean(bad, layout, transport, buffers, CollectiveCall(seed=0, step=0)))
        except (TypeError, ValueError, PeerFailedError) as raised:
            error = raised
        x = values_of(transport.rank)
        complete(gather_mean(x, layout, transport, buffers, CollectiveCall(seed=0, step=1)))
        return type(error), x

    answers = run_threads(run, 3)
    for rank, (kind, x) in enumerate(answers):
        assert kind is TypeError if rank == failing else kind is PeerFailedError
        assert torch.equal(x[5:], answers[0][1][5:])


@pytest.mark.parametrize("size", [-64, 0, 63, 65, 1 << 30])
def test_a_size_that_cannot_be_is_refused(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank announces is compared with the room there is, and never obeyed beyond."""
    send = Exchange.send

    def lie(self, phase, *, num_bytes=None):
        if phase == 0 and self._transport.rank == 1:
            told = bytearray(struct.pack("<i", size))
            self.outgoing(0)[HEADER_BYTES : HEADER_BYTES + 4] = torch.frombuffer(told, dtype=torch.uint8)
        send(self, phase, num_bytes=num_bytes)

    monkeypatch.setattr(Exchange, "send", lie)

    def run(transport):
        with pytest.raises((MessageError, TransportError)) as raised:
            gather(transport, BOUNDED)
        return str(raised.value)

    texts = run_threads(run, 2, timeout_s=1.5)  # rank 1 waits so long for what rank 0 does not send
    assert f"rank 1 announced a message of {size} bytes" in texts[0]


def test_counts_inside_a_bounded_message_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    send = Exchange.send

    def lie(self, phase, *, num_bytes=None):
        if phase == 1 and self._transport.rank == 1:
            self.outgoing(1)[HEADER_BYTES + 4 : HEADER_BYTES + 8].view(torch.int32).fill_(1_000_000)
        send(self, phase, num_bytes=num_bytes)

    monkeypatch.setattr(Exchange, "send", lie)

    def run(transport):
        try:
            gather(transport, BOUNDED)
        except MessageError as error:
            return str(error)
        return ""

    assert "1000000 elements in a payload with room for 1500" in run_threads(run, 2, timeout_s=10.0)[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_raw_layers_are_gathered_in_their_own_dtype(dtype: torch.dtype) -> None:
    compressor = parse("raw")
    assert isinstance(compressor, Coded)
    layers = [Layer("a", 0, (1000,), compressor), Layer("b", 1000, (77,), compressor)]
    layout = Layout.build(layers, 3, dtype, parse_algorithm("allgather"))

    def run(transport):
        x = values_of(transport.rank)[:1077].to(dtype)
        complete(gather_mean(x, layout, transport, gather_buffers(layout, transport), CollectiveCall(seed=0, step=0)))
        return x

    expected = sum(values_of(rank)[:1077].to(dtype).float() for rank in range(3)) * (1 / 3)
    for x in run_threads(run, 3):
        assert torch.equal(x, torch.as_tensor(expected).to(dtype))
