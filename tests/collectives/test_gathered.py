"""The all-gather: layers that stay whole, messages of bounded size, failures."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from harness import run_threads
from thinwire import MessageError, PeerFailedError, TransportError, parse
from thinwire.collectives import CollectiveCall, Layer, Layout, complete, gather_buffers, gather_mean
from thinwire.collectives.message import HEADER_BYTES, Messages
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


@pytest.mark.parametrize(
    ("spec", "num_ranks"),
    [(FIXED, 5), (BOUNDED, 2), ("fft(theta=0.8)", 2), ("terngrad", 3), (f"{BOUNDED} | minmax(bits=8)", 5)],
)
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


@pytest.mark.parametrize(("spec", "failing"), [(FIXED, 0), (BOUNDED, 2)])
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


def _lying(monkeypatch: pytest.MonkeyPatch, lie: Callable[[Messages, int], object], phase: int) -> None:
    """Rank 1 changes what it sends in one phase."""
    honest = Messages.send

    def send(self, of_phase, *, num_bytes=None):
        if of_phase == phase and self._transport.rank == 1:
            lie(self, of_phase)
        honest(self, of_phase, num_bytes=num_bytes)

    monkeypatch.setattr(Messages, "send", send)


def test_a_size_that_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank announces is compared with the room there is, and never obeyed beyond."""

    def run(transport):
        with pytest.raises((MessageError, TransportError)) as raised:
            gather(transport, BOUNDED)
        return str(raised.value)

    for size in (-64, 65, 1 << 30):
        told = torch.tensor([size], dtype=torch.int32).view(torch.uint8)
        with monkeypatch.context() as patch:
            _lying(patch, lambda e, phase, told=told: e.outgoing(phase)[HEADER_BYTES:][:4].copy_(told), 0)
            texts = run_threads(run, 2, timeout_s=1.0)  # rank 1 waits so long for what rank 0 does not send
        assert f"rank 1 announced a message of {size} bytes" in texts[0]


def test_counts_inside_a_bounded_message_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    _lying(monkeypatch, lambda e, phase: e.outgoing(phase)[HEADER_BYTES:][4:8].view(torch.int32).fill_(1_000_000), 1)

    def run(transport):
        try:
            gather(transport, BOUNDED)
        except MessageError as error:
            return str(error)
        return ""

    assert "1000000 elements in a payload with room for 1500" in run_threads(run, 2, timeout_s=10.0)[0]
