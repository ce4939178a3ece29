"""Compressors of stage boundaries by the rates of their links."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st

from harness import on_ranks, run_ranks
from pipelines import BATCH, Pipe, check_sides, needs_pipelines, samples
from ranks import of_ranks
from thinwire.pipeline.links import LinkChoices
from thinwire.policies import ByLink, choose_by_link
from thinwire_tools import lab

pytestmark = needs_pipelines

SIZES = (200.0, 300.0, 400.0, 800.0)
OPTIONS = {"forward": "delta(maxabs(bits=3))", "backward": "maxabs(bits=6)"}


@given(st.lists(st.tuples(st.floats(1.0, 1e9), st.permutations(SIZES)), min_size=1, max_size=6), st.floats(0.0, 10.0))
def test_nothing_chosen_makes_a_pipeline_slower_and_nothing_more_would_fit(links: Any, compute_s: float) -> None:
    rates, sizes = [rate for rate, _ in links], [of for _, of in links]
    chosen = choose_by_link(sizes, rates, compute_s)
    best = max(compute_s, *(min(of) / rate for of, rate in zip(sizes, rates, strict=True)))
    for choice, of, rate in zip(chosen, sizes, rates, strict=True):
        assert of[choice] / rate <= best
        assert all(size <= of[choice] or size / rate > best for size in of)
    assert choose_by_link([], [], compute_s) == ()


def test_choices_are_sent_as_tensors_and_what_cannot_be_is_refused() -> None:
    counts = {"forward": 5, "backward": 3}
    made = LinkChoices(7, {0: {"forward": 4, "backward": 0}, 2: {"forward": 1}})
    x = made.to_tensor(3)
    assert LinkChoices.from_tensor(x, 3, counts) == made
    assert LinkChoices.from_tensor(LinkChoices().to_tensor(3), 3, counts) == LinkChoices()
    with pytest.raises(ValueError, match="not the state of this pipeline"):
        LinkChoices.from_tensor(x, 2, counts)
    with pytest.raises(ValueError, match="chose forward compressor 4 of 3: resume with the same"):
        LinkChoices.from_tensor(x, 3, {"forward": 3, "backward": 3})


def trained(rank: int, name: str) -> None:
    """Train; go on from a state in the middle."""
    num_ranks = dist.get_world_size()
    pipe, again = (Pipe(rank, num_ranks, name, **OPTIONS, adapt=ByLink(after=3)) for _ in range(2))
    x, y = samples()
    pipe.epoch(0, x, y)
    assert not any(stage.links for stage in pipe.stages)  # the first epoch has two steps
    pipe.epoch(1, x, y)
    states = copy.deepcopy(
        [(stage.state_dict(), m.state_dict()) for stage, m in zip(pipe.stages, pipe.modules, strict=True)]
    )
    losses = pipe.epoch(2, x, y)
    for stage, module, (state, weights) in zip(again.stages, again.modules, states, strict=True):
        stage.load_state_dict(state)
        module.load_state_dict(weights)
    assert again.epoch(2, x, y) == losses
    assert again.digests() == pipe.digests()
    rows = [[{d: of._asdict() for d, of in row.items()} for row in stage.links] for stage in pipe.stages]
    chosen = [stage.state_dict()["choices"].tolist() for stage in (*pipe.stages, *again.stages)]
    first_rows, first_chosen = of_ranks((rows[0], chosen[0]))[0]
    assert all(of == first_rows for of in rows)
    assert all(of == first_chosen for of in chosen)
    for row in rows[0]:
        assert set(row) == {"forward", "backward"}
        assert row["forward"]["compressor"].startswith(("delta(gaussian(", "delta(maxabs("))
        assert all(of["rate"] > 0 and of["compute_s"] > 0 and of["message_bytes"] > 64 for of in row.values())
    check_sides(of_ranks(pipe.digests()), range(num_ranks - 1 if name == "gpipe" else 2 * num_ranks - 1))


@pytest.mark.parametrize(("name", "num_ranks"), [("gpipe", 3), ("interleaved", 2)])
def test_ranks_choose_alike_after_some_steps_and_a_resumed_run_has_the_same(name: str, num_ranks: int) -> None:
    run_ranks(trained, num_ranks, name)


def chooses_again(rank: int) -> list[int]:
    pipe = Pipe(rank, 2, **OPTIONS, adapt=ByLink(after=1, every=2))
    x, y = samples()
    chosen_in = []
    for _ in range(6):
        pipe.step(x[:BATCH], y[:BATCH], range(BATCH))
        chosen_in.append(int(pipe.stages[0].state_dict()["choices"][0, 0]))
    return chosen_in


def test_links_are_measured_again() -> None:
    assert run_ranks(chooses_again, 2) == [[-1, 1, 1, 3, 3, 5]] * 2


@on_ranks(2)
def test_a_message_of_the_user_in_the_pipelines_group_is_left_alone(rank: int) -> None:
    """A message is under way in the pipeline's group while links are measured, and arrives as it is."""
    pipe = Pipe(rank, 2, **OPTIONS, adapt=ByLink(after=1))
    x, y = samples()
    pipe.step(x[:BATCH], y[:BATCH], range(BATCH))
    note = torch.full((64,), 5.0 * (rank == 0))
    tag = 1024  # of the first message of a transport: those of its small all-reduces come before
    sending = dist.isend(note, 1, tag=tag) if rank == 0 else None
    pipe.step(x[:BATCH], y[:BATCH], range(BATCH))
    if sending is None:
        dist.recv(note, 0, tag=tag)
    else:
        sending.wait()
    assert note.tolist() == [5.0] * 64
    assert pipe.stages[0].links


def over_uneven_links(rank: int) -> list[dict[str, tuple[str, float]]]:
    pipe = Pipe(rank, 3, **OPTIONS, adapt=ByLink(after=2))
    # Messages of some kilobytes, so that the slow link is what a step waits for.
    x, y = (t.repeat(1, 40, 1) for t in samples())
    for _ in range(4):
        pipe.step(x[:BATCH], y[:BATCH], range(BATCH), length=x.shape[1])
    return [{d: (of.compressor, of.rate) for d, of in row.items()} for row in pipe.stages[0].links]


SCRIPT = """
import json, sys
sys.path[:0] = [{tests!r}, {support!r}]
import torch.distributed as dist
from test_pipeline_links import over_uneven_links
dist.init_process_group("gloo")
found = over_uneven_links(dist.get_rank())
if dist.get_rank() == 0:
    with open({path!r}, "w") as file:
        json.dump(found, file)
"""


@pytest.mark.network
@pytest.mark.skipif(lab.unavailable() is not None, reason=str(lab.unavailable()))
def test_a_slow_link_gets_fewer_bits_than_a_fast_one(tmp_path: Path) -> None:
    script, path = tmp_path / "uneven.py", tmp_path / "found.json"
    folder = Path(__file__).parent
    script.write_text(SCRIPT.format(support=str(folder.parent / "support"), tests=str(folder), path=str(path)))
    command = [sys.executable, "-m", "thinwire", "lab", "--ranks", "3", "--rate", "200mbit,200mbit,2mbit"]
    subprocess.run([*command, "--", sys.executable, str(script)], check=True, timeout=90)
    fast, slow = json.loads(path.read_text())
    assert slow["forward"][1] == pytest.approx(2e6 / 8, rel=0.3)
    assert fast["forward"][1] > 20 * slow["forward"][1]
    for direction in ("forward", "backward"):
        choices = getattr(ByLink(), direction)
        assert (slow[direction][0], fast[direction][0]) == (str(choices[0]), str(choices[-1]))
