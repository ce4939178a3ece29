"""The thread beside the training's: what it does while a stage computes, and what its failures do."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
from torch import Tensor

from harness import on_ranks
from pipelines import BATCH, SINGLE, Pipe, check_sides, needs_pipelines, samples
from ranks import of_ranks
from thinwire.collectives import PeerFailedError
from thinwire.pipeline.boundary import BoundarySide
from thinwire.store import MemoryStore

pytestmark = needs_pipelines

FW3_BW6: dict[str, Any] = {"forward": "delta(maxabs(bits=3))", "backward": "maxabs(bits=6)"}
_LONG_S = 20.0


@pytest.mark.parametrize("name", SINGLE)
@on_ranks(2, timeout_s=60)
def test_a_stage_computes_while_its_messages_are_made_and_its_records_saved(rank: int, name: str) -> None:
    """No message of micro-batch 0 is made, and no record saved, before the stage computes micro-batch 1."""
    second = threading.Event()
    late = []
    pack, write = BoundarySide.pack, MemoryStore._write

    def slow_pack(side: BoundarySide, chunk: int, *rest: Any) -> None:
        if chunk == 0 and side.earlier and not second.wait(_LONG_S):
            late.append("message")
        pack(side, chunk, *rest)

    def slow_write(kept: MemoryStore, sample: int, record: Tensor) -> None:
        if not second.wait(_LONG_S):
            late.append("record")
        write(kept, sample, record)

    x, y = samples()
    pipe = Pipe(rank, 2, name, **FW3_BW6)
    (stage,) = pipe.stages
    forward = stage.forward_one_chunk

    def noticed(chunk: int, *rest: Any, **options: Any) -> Any:
        if chunk == 1:
            second.set()
        return forward(chunk, *rest, **options)

    stage.forward_one_chunk = noticed
    if rank == 0:
        BoundarySide.pack = slow_pack
    elif name == "gpipe":
        # Under 1F1B the last stage has sent a gradient, which is made after the record is saved, before it computes.
        MemoryStore._write = slow_write
    pipe.step(x[:BATCH], y[:BATCH], list(range(BATCH)))
    assert not late


@pytest.mark.parametrize("name", SINGLE)
@on_ranks(2, timeout_s=60)
def test_a_stage_computes_while_what_it_needs_next_is_decoded(rank: int, name: str) -> None:
    """Micro-batch 1 is decoded while the stage computes micro-batch 0."""
    second, late = threading.Event(), []
    unpack = BoundarySide.unpack

    def noticed(side: BoundarySide, chunk: int, *rest: Any) -> list[Tensor]:
        received = unpack(side, chunk, *rest)
        if chunk == 1:
            second.set()
        return received

    x, y = samples()
    pipe = Pipe(rank, 2, name, **FW3_BW6)
    pipe.step(x[:BATCH], y[:BATCH], list(range(BATCH)))  # the first one also computes to find shapes
    BoundarySide.unpack = noticed
    (stage,) = pipe.stages

    def wait(*_: Any) -> None:
        if not second.is_set() and not second.wait(_LONG_S):
            late.append("decoded")

    if rank == 0:  # gradients arrive
        stage.submod.inner.weight.register_hook(wait)
    else:
        stage.submod.register_forward_pre_hook(wait)
    pipe.step(x[:BATCH], y[:BATCH], list(range(BATCH)))
    assert not late


@on_ranks(2, timeout_s=60)
def test_a_record_that_cannot_be_saved_is_an_error_on_every_rank_and_training_can_go_on(rank: int) -> None:
    pipe = Pipe(rank, 2, **FW3_BW6)
    x, y = samples()
    pipe.epoch(0, x, y)
    write = MemoryStore._write
    if rank == 1:

        def fail(*_: Any) -> None:
            raise OSError("the disk is full")

        MemoryStore._write = fail
    with pytest.raises(OSError if rank == 1 else PeerFailedError, match="the disk is full" if rank == 1 else "rank 1"):
        pipe.epoch(1, x, y)
    MemoryStore._write = write
    pipe.schedule = pipe.new_schedule()
    # What one side could not keep is sent whole again.
    pipe.epoch(2, x, y)
    pipe.epoch(3, x, y)
    check_sides(of_ranks(pipe.digests()), [0])


@on_ranks(2, timeout_s=60)
def test_many_small_steps_keep_both_sides_alike_under_load(rank: int) -> None:
    sys.setswitchinterval(1e-6)
    pipe = Pipe(rank, 2, "interleaved", **FW3_BW6, precision=8, check_every=1)
    for epoch in range(12):
        pipe.epoch(epoch, *samples())
    check_sides(of_ranks(pipe.digests()), [0, 1, 2])
    assert not any(stage.stats.resets or stage.stats.corrupt for stage in pipe.stages)
