"""The mantissa of FFT's range-based floats: searched once in many messages where state is kept, else for each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from harness import run_threads
from thinwire import Plan, Wire, parse
from thinwire.collectives import LoopbackTransport
from thinwire.compressors import FFT, CodecCall, Piece, Segments, fft as module, first_state
from thinwire.compressors.floats import best_mantissa
from thinwire.runtime import BucketEngine

SHAPES = {"w": (64, 48)}
SPEC = "fft(theta=0.8)"


@contextmanager
def _counting() -> Iterator[list[None]]:
    """An item for each search. Unlike a mock's counter, a list misses none where threads search at the same time."""
    searches: list[None] = []

    def counted(*args: Any) -> int:
        searches.append(None)
        return best_mantissa(*args)

    with mock.patch.object(module, "best_mantissa", counted):
        yield searches


def _gradient(step: int, rank: int = 0) -> Tensor:
    return torch.randn(64 * 48, generator=torch.Generator().manual_seed(100 * step + rank))


def test_a_wire_searches_for_a_mantissa_once_in_fifty_steps() -> None:
    def run(transport: LoopbackTransport) -> None:
        wire = Wire(BucketEngine(Plan.build(SHAPES, f"ef({SPEC})"), SHAPES, transport))
        for step in range(60):
            wire.engine.begin_step()
            wire.engine.reduce(_gradient(step, transport.rank), tuple(SHAPES.items())).wait()
        wire.detach()

    with _counting() as searched:
        run_threads(run, 2)
    assert len(searched) == 2 * 2


def test_a_kept_mantissa_errs_as_a_searched_one_and_its_messages_need_no_state() -> None:
    """One that was chosen from what is not finite is not kept."""
    fft, segments = parse(SPEC), Segments.build([Piece("w", 0, 64 * 48, 0, 0)])
    assert isinstance(fft, FFT)
    state, size = first_state(fft, _gradient(0), segments), fft.payload_bytes(64 * 48, torch.float32)
    assert state is not None
    message = torch.zeros(size, dtype=torch.uint8)
    with _counting() as searched:
        fft.encode(torch.full((64 * 48,), torch.inf), message, CodecCall(segments, state=state))
        fft.encode(_gradient(1), message, CodecCall(segments, state=state.swapped()))
    assert len(searched) == 2
    state = first_state(fft, _gradient(0), segments)
    for step in range(12):
        assert state is not None
        x = _gradient(step) * 10.0 ** (-step)
        kept, searched = (torch.zeros(size, dtype=torch.uint8) for _ in range(2))
        fft.encode(x, kept, CodecCall(segments, state=state))
        fft.encode(x, searched, CodecCall(segments))
        assert step or torch.equal(kept, searched)
        errors = []
        for message in (kept, searched):
            received = torch.empty(64 * 48)
            fft.decode(message, received, CodecCall(segments))
            errors.append(float((received - x).norm() / x.norm()))
        assert errors[0] <= 1.001 * errors[1]
        state = state.swapped()
