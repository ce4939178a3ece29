"""Pipelines that stop and go on: bit by bit as if they had not, from states, from disk, from a kill."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire
from harness import run_ranks
from pipelines import BATCH, SAMPLES, Pipe, check_sides, samples

FW3_BW6: dict[str, Any] = {"forward": "delta(maxabs(bits=3))", "backward": "maxabs(bits=6)", "check_every": 3}
STEPS = 12


def batches() -> list[torch.Tensor]:
    found = []
    for epoch in range(STEPS * BATCH // SAMPLES):
        found += torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch)).split(BATCH)
    return found


def save(pipe: Pipe, path: Path, step: int) -> None:
    state = {
        "step": step,
        "modules": [module.state_dict() for module in pipe.modules],
        "stages": [stage.state_dict() for stage in pipe.stages],
    }
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def load(pipe: Pipe, path: Path) -> int:
    state = torch.load(path, weights_only=True)
    for module, its in zip(pipe.modules, state["modules"], strict=True):
        module.load_state_dict(its)
    for stage, its in zip(pipe.stages, state["stages"], strict=True):
        stage.load_state_dict(its)
    return state["step"]


def killer(after: int) -> Callable[..., None]:
    """What kills this process when it is called once more than so often."""
    count = itertools.count()

    def kill(*args: Any) -> None:
        if next(count) == after:
            os.kill(os.getpid(), signal.SIGKILL)

    return kill


def run(
    rank: int,
    folder: Path,
    name: str,
    options: dict[str, Any],
    every: int,
    last: int = STEPS,
    resume: bool = False,
    die: int | None = None,
) -> Any:
    """Train to a step, with a checkpoint after each ``every``; from the last one with ``resume``. ``die``: in that
    step, between two micro-batches, this process is killed."""
    pipe = Pipe(rank, 2, name, **options)
    x, y = samples()
    path = folder / f"state{rank}"
    start = load(pipe, path) if resume else 0
    losses = []
    for step, ids in list(enumerate(batches()))[start:last]:
        if step == die:
            for module in pipe.modules:
                module.register_forward_hook(killer(2))
        losses.append(pipe.step(x[ids], y[ids], ids))
        if (step + 1) % every == 0:
            save(pipe, path, step + 1)
    stats = [stage.stats for stage in pipe.stages]
    counts = [(s.resets, s.corrupt, s.forward_sent_bytes) for s in stats]
    digests = pipe.digests()
    for stage in pipe.stages:
        stage.close_stores()
    return digests, losses, pipe.parameters(), counts


def place(kind: str, folder: Path, **more: Any) -> Any:
    if kind == "disk":
        return thinwire.store.Disk(folder / "store", num_samples=SAMPLES, **more)
    return thinwire.store.Memory() if kind == "memory" else thinwire.store.Centres(num=20, window=50)


@pytest.mark.parametrize(
    ("kind", "name", "precision"),
    [
        ("memory", "gpipe", 32),
        ("memory", "interleaved", 4),
        ("disk", "gpipe", 32),
        ("disk", "interleaved", 4),
        ("centres", "gpipe", 32),
        ("centres", "interleaved", 32),
    ],
)
def test_a_resumed_run_is_the_run_that_was_not_stopped(kind: str, name: str, precision: int, tmp_path: Path) -> None:
    options = {**FW3_BW6, "precision": precision}
    whole = run_ranks(run, 2, tmp_path, name, {**options, "store": place(kind, tmp_path / "whole")}, 100)
    options = {**options, "store": place(kind, tmp_path)}
    first = run_ranks(run, 2, tmp_path, name, options, 5, 5)
    rest = run_ranks(run, 2, tmp_path, name, options, 5, STEPS, True)
    check_sides([answer[0] for answer in rest], [0] if name == "gpipe" else [0, 1, 2])
    for mine, early, late in zip(whole, first, rest, strict=True):
        assert late[0] == mine[0]
        assert early[1] + late[1] == mine[1]
        assert all(torch.equal(p, q) for p, q in zip(late[2], mine[2], strict=True))
        assert all(count[:2] == (0, 0) for count in late[3])


@pytest.mark.parametrize("kind", ["memory", "disk"])
@pytest.mark.parametrize(("rank", "step"), [(0, 7), (1, 10)])
def test_a_run_killed_anywhere_goes_on_from_its_last_checkpoint(
    kind: str, rank: int, step: int, tmp_path: Path
) -> None:
    whole = run_ranks(run, 2, tmp_path, "1f1b", {**FW3_BW6, "store": place(kind, tmp_path / "whole")}, 100)
    options = {**FW3_BW6, "store": place(kind, tmp_path)}
    killed = run_ranks(run_and_die, 2, tmp_path, options, rank, step, may_die=True)
    assert killed[rank] is None
    rest = run_ranks(run, 2, tmp_path, "1f1b", options, 4, STEPS, True)
    check_sides([answer[0] for answer in rest], [0])
    for mine, late in zip(whole, rest, strict=True):
        assert late[0] == mine[0]
        assert late[1] == mine[1][-len(late[1]) :]
        assert len(late[1]) == STEPS - step // 4 * 4
        assert all(torch.equal(p, q) for p, q in zip(late[2], mine[2], strict=True))


def run_and_die(rank: int, folder: Path, options: dict[str, Any], victim: int, step: int) -> Any:
    return run(rank, folder, "1f1b", options, 4, die=step if rank == victim else None)


def test_a_store_on_disk_can_be_gone_on_with_without_a_state(tmp_path: Path) -> None:
    options = {**FW3_BW6, "store": place("disk", tmp_path)}
    first = run_ranks(run, 2, tmp_path, "gpipe", options, 100, 4)
    # A rank that is slower may hear of it from the other one, or find it gone.
    refused = run_ranks(run, 2, tmp_path, "gpipe", options, 100, 4, may_die=True)
    assert all(isinstance(answer, Exception) for answer in refused)
    assert any("of another run or model" in str(answer) for answer in refused)
    options = {**FW3_BW6, "store": place("disk", tmp_path, resume=True)}
    again = run_ranks(run, 2, tmp_path, "gpipe", options, 100, 4)
    check_sides([answer[0] for answer in again], [0])
    assert all(answer[3][0][:2] == (0, 0) for answer in again)
    assert again[0][3][0][2] < 0.6 * first[0][3][0][2], "its first visits are changes already"


def flip_a_bit(store: Any, sample: int) -> None:
    """Damage the record of a sample that is kept in memory."""
    state = store.state_dict()
    state["records"][store.samples.index(sample)][7] ^= 1
    store.load_state_dict(state)


def spoiled(rank: int, folder: Path, victim: int, what: str, kind: str) -> Any:
    """Damage one record on one side behind the stage's back, after an epoch, and go on."""
    pipe = Pipe(rank, 2, **{**FW3_BW6, "store": place(kind, folder), "check_every": 1})
    x, y = samples()
    pipe.epoch(0, x, y)
    ((name, store),) = pipe.stages[0].stores.items()
    store.flush()
    if rank == victim and what == "bytes":
        file = folder / "store" / f"rank{rank}-{name}" / "records.bin"
        slot = store._slots[5]
        with file.open("r+b") as records:
            records.seek(slot * store.form.record_bytes + 100)
            records.write(b"\xff\x00\xff")
    elif rank == victim and what == "value":
        flip_a_bit(store, 5)
    elif rank == victim:
        store.forget(5)
    losses = pipe.epoch(1, x, y)
    stats = pipe.stages[0].stats
    pipe.epoch(2, x, y)
    later = pipe.stages[0].stats
    return pipe.digests(), losses, (stats.resets, stats.corrupt), later.resets, later.kept_samples


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(("what", "kind"), [("bytes", "disk"), ("value", "memory"), ("lost", "disk")])
def test_a_record_that_differs_is_reset_on_both_sides_and_counted(
    victim: int, what: str, kind: str, tmp_path: Path
) -> None:
    answers = run_ranks(spoiled, 2, tmp_path, victim, what, kind)
    check_sides([answer[0] for answer in answers], [0])
    for rank, answer in enumerate(answers):
        corrupt = int(what == "bytes" and rank == victim)
        mine = 0 if what == "lost" and rank == victim else 1
        assert answer[2] == (mine, corrupt)
        assert answer[3] == mine, "it is in order afterwards"
        assert answer[4] == SAMPLES
    # The sample travelled whole, so training saw its activation and not a wrong one.
    unharmed = run_ranks(spoiled, 2, tmp_path / "other", 9, what, kind)
    assert answers[1][1][0] == pytest.approx(unharmed[1][1][0], rel=0.2)


def checked_rarely(rank: int) -> Any:
    pipe = Pipe(rank, 2, **{**FW3_BW6, "check_every": 4})
    x, y = samples()
    resets = []
    for step, ids in enumerate(batches()[:9]):
        if step == 5 and rank == 0:
            (store,) = pipe.stages[0].stores.values()
            flip_a_bit(store, int(batches()[8][0]))
        pipe.step(x[ids], y[ids], ids)
        resets.append(pipe.stages[0].stats.resets)
    return resets


def test_checksums_are_compared_every_so_many_steps() -> None:
    for resets in run_ranks(checked_rarely, 2):
        # What was spoiled before step 5 was used in step 6 or 7, unnoticed; steps 0, 4 and 8 compare.
        assert resets == [0] * 8 + [1]


def reads_ahead(rank: int, folder: Path) -> Any:
    pipe = Pipe(rank, 2, **{**FW3_BW6, "store": place("disk", folder)})
    x, y = samples()
    all_ids = batches()
    for step, ids in enumerate(all_ids):
        upcoming = all_ids[step + 1] if step + 1 < len(all_ids) else ()
        pipe.step(x[ids], y[ids], ids, **({"upcoming": upcoming} if pipe.first else {}))
    return pipe.digests(), pipe.parameters()


def test_reading_ahead_changes_nothing(tmp_path: Path) -> None:
    ahead = run_ranks(reads_ahead, 2, tmp_path)
    plain = run_ranks(run, 2, tmp_path, "gpipe", {**FW3_BW6, "store": thinwire.store.Memory()}, 100)
    for mine, theirs in zip(ahead, plain, strict=True):
        assert mine[0] == theirs[0]
        assert all(torch.equal(p, q) for p, q in zip(mine[1], theirs[2], strict=True))


def beside_another(rank: int, other: bool) -> Any:
    """Train; with ``other``, a second pipeline of the same process group trains in between, and loads an old state."""
    options = {"forward": "delta(maxabs(bits=3, rounding=stochastic))", "backward": "maxabs(bits=6)"}
    x, y = samples()
    pipe, second = Pipe(rank, 2, **options), Pipe(rank, 2, **{**options, "seed": 1})
    old = second.stages[0].state_dict()
    for epoch in range(3):
        pipe.epoch(epoch, x, y)
        if other:
            second.step(x[:BATCH], y[:BATCH], range(BATCH))
            second.stages[0].load_state_dict(old)
    steps = [int(one.stages[0].state_dict()["step"]) for one in (pipe, second)]
    return steps, pipe.digests(), pipe.parameters()


def test_pipelines_of_one_process_group_count_their_own_steps() -> None:
    alone, beside = (run_ranks(beside_another, 2, other) for other in (False, True))
    for (steps, digests, parameters), (others_steps, others_digests, others_parameters) in zip(
        alone, beside, strict=True
    ):
        assert steps == others_steps == [6, 0]
        assert digests == others_digests
        assert all(torch.equal(p, q) for p, q in zip(parameters, others_parameters, strict=True))
