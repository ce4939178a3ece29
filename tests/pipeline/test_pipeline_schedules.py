"""The lists of `thinwire_tools.planner` are what PyTorch's schedules do."""

from __future__ import annotations

from typing import Any

import pytest

from harness import run_ranks
from pipelines import BATCH, CHUNKS, Pipe, samples
from thinwire_tools.planner import Schedule, ScheduleName

CALLS = {"forward_one_chunk": "forward", "backward_one_chunk": "backward", "backward_weight_one_chunk": "weights"}


def called(rank: int, num_ranks: int, name: str) -> list[tuple[str, int, int]]:
    """What a rank's stages are asked to compute in a step, in order."""
    pipe = Pipe(rank, num_ranks, name, compress=lambda stage: stage)
    found: list[tuple[str, int, int]] = []
    for stage in pipe.stages:
        for call, kind in CALLS.items():
            run = getattr(stage, call)

            def noted(
                chunk: int, *args: Any, _run: Any = run, _what: Any = (kind, stage.stage_index), **kw: Any
            ) -> Any:
                found.append((*_what, chunk))
                return _run(chunk, *args, **kw)

            setattr(stage, call, noted)
    x, y = samples()
    pipe.step(x[:BATCH], y[:BATCH], None)
    return found


@pytest.mark.parametrize(
    ("name", "listed"),
    [("gpipe", "gpipe"), ("1f1b", "1f1b"), ("interleaved", "interleaved"), ("zero bubble", "zero-bubble")],
)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_compute_in_the_order_that_is_simulated(name: str, listed: ScheduleName, num_ranks: int) -> None:
    answers = run_ranks(called, num_ranks, num_ranks, name)
    schedule = Schedule.build(listed, num_ranks, CHUNKS, 2 if name in ("interleaved", "zero bubble") else 1)
    assert answers == [list(tasks) for tasks in schedule.ranks]
