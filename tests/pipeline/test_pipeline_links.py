"""Compressors of stage boundaries by the rates of their links."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st

import thinwire
from harness import run_ranks
from pipelines import BATCH, Pipe, check_sides, samples
from thinwire.pipeline.links import LinkChoices
from thinwire.policies import choose_by_link
from thinwire_tools import lab

SIZES = (200.0, 300.0, 400.0, 800.0)


def test_the_slowest_link_gets_the_fewest_bytes_and_others_what_takes_no_longer() -> None:
    # At 100 B/s 200 bytes take 2 s; in 2 s 150 B/s carry 300, 1000 B/s all there is.
    assert choose_by_link([SIZES] * 3, [100.0, 150.0, 1000.0], compute_s=0.5) == (0, 1, 3)
    # Where a stage computes for 4 s, 400 bytes cost no time on the slow link either.
    assert choose_by_link([SIZES] * 3, [100.0, 150.0, 1000.0], compute_s=4.0) == (2, 2, 3)
    assert choose_by_link([SIZES[::-1]], [100.0], compute_s=3.0) == (2,)
    assert choose_by_link([], [], compute_s=1.0) == ()


@given(st.lists(st.tuples(st.floats(1.0, 1e9), st.permutations(SIZES)), min_size=1, max_size=6), st.floats(0.0, 10.0))
def test_nothing_chosen_makes_a_pipeline_slower_and_nothing_more_would_fit(links: Any, compute_s: float) -> None:
    rates, sizes = [rate for rate, _ in links], [of for _, of in links]
    chosen = choose_by_link(sizes, rates, compute_s)
    best = max(compute_s, *(min(of) / rate for of, rate in zip(sizes, rates, strict=True)))
    for choice, of, rate in zip(chosen, sizes, rates, strict=True):
        assert of[choice] / rate <= best
        assert all(size <= of[choice] or size / rate > best for size in of)


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


def trained(rank: int, name: str, every: int | None) -> Any:
    """Train; go on from a state in the middle; what was chosen, what is kept, the losses of both halves."""
    num_ranks = dist.get_world_size()
    adapt = thinwire.policies.ByLink(after=3, every=every)
    options = {"forward": "delta(maxabs(bits=3))", "backward": "maxabs(bits=6)", "adapt": adapt}
    pipe = Pipe(rank, num_ranks, name, **options)
    x, y = samples()
    pipe.epoch(0, x, y)
    before = [stage.links for stage in pipe.stages]
    pipe.epoch(1, x, y)
    states = [stage.state_dict() for stage in pipe.stages]
    weights = [module.state_dict() for module in pipe.modules]
    weights = [{name: value.clone() for name, value in of.items()} for of in weights]
    losses = pipe.epoch(2, x, y)
    again = Pipe(rank, num_ranks, name, **options)
    for stage, state, module, own in zip(again.stages, states, again.modules, weights, strict=True):
        stage.load_state_dict(state)
        module.load_state_dict(own)
    resumed = again.epoch(2, x, y)
    rows = [[{d: of._asdict() for d, of in row.items()} for row in stage.links] for stage in pipe.stages]
    chosen = [stage.state_dict()["choices"].tolist() for stage in (*pipe.stages, *again.stages)]
    return before, rows, chosen, pipe.digests(), again.digests(), losses, resumed


@pytest.mark.parametrize(("name", "num_ranks"), [("gpipe", 3), ("interleaved", 2)])
def test_ranks_choose_alike_after_some_steps_and_a_resumed_run_has_the_same(name: str, num_ranks: int) -> None:
    answers = run_ranks(trained, num_ranks, name, None)
    for before, rows, chosen, digests, again, losses, resumed in answers:
        assert not any(before)  # the first epoch has two steps
        assert all(of == answers[0][1][0] for of in rows)
        assert all(of == answers[0][2][0] for of in chosen)
        for row in rows[0]:
            assert set(row) == {"forward", "backward"}
            assert row["forward"]["compressor"].startswith(("delta(gaussian(", "delta(maxabs("))
            assert all(of["rate"] > 0 and of["compute_s"] > 0 and of["message_bytes"] > 64 for of in row.values())
        assert digests == again
        assert losses == resumed
    boundaries = range(num_ranks - 1 if name == "gpipe" else 2 * num_ranks - 1)
    check_sides([answer[3] for answer in answers], boundaries)


def chooses_again(rank: int) -> list[int]:
    adapt = thinwire.policies.ByLink(after=1, every=2)
    pipe = Pipe(rank, 2, forward="delta(maxabs(bits=3))", backward="maxabs(bits=6)", adapt=adapt)
    x, y = samples()
    chosen_in = []
    for _ in range(6):
        pipe.step(x[:BATCH], y[:BATCH], range(BATCH))
        chosen_in.append(int(pipe.stages[0].state_dict()["choices"][0, 0]))
    return chosen_in


def test_links_are_measured_again() -> None:
    assert run_ranks(chooses_again, 2) == [[-1, 1, 1, 3, 3, 5]] * 2


def measures_beside_a_message(rank: int) -> tuple[list[float], bool]:
    """What arrives of a message that is under way in the pipeline's group while links are measured."""
    adapt = thinwire.policies.ByLink(after=1)
    pipe = Pipe(rank, 2, forward="delta(maxabs(bits=3))", backward="maxabs(bits=6)", adapt=adapt)
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
    return note.tolist(), bool(pipe.stages[0].links)


def test_a_message_of_the_user_in_the_pipelines_group_is_left_alone() -> None:
    answers = run_ranks(measures_beside_a_message, 2)
    assert answers == [([5.0] * 64, True)] * 2


def over_uneven_links(rank: int) -> list[dict[str, tuple[str, float]]]:
    adapt = thinwire.policies.ByLink(after=2)
    pipe = Pipe(rank, 3, forward="delta(maxabs(bits=4))", backward="maxabs(bits=6)", adapt=adapt)
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
    script.write_text(
        SCRIPT.format(
            support=str(Path(__file__).parents[1] / "support"), tests=str(Path(__file__).parent), path=str(path)
        )
    )
    command = [sys.executable, "-m", "thinwire", "lab", "--ranks", "3", "--rate", "200mbit,200mbit,2mbit"]
    subprocess.run([*command, "--", sys.executable, str(script)], check=True, timeout=90)
    fast, slow = json.loads(path.read_text())
    assert slow["forward"][1] == pytest.approx(2e6 / 8, rel=0.3)
    assert fast["forward"][1] > 20 * slow["forward"][1]
    forward, backward = thinwire.policies.ByLink().forward, thinwire.policies.ByLink().backward
    assert slow["forward"][0] == str(forward[0])
    assert slow["backward"][0] == str(backward[0])
    assert fast["forward"][0] == str(forward[-1])
    assert fast["backward"][0] == str(backward[-1])
