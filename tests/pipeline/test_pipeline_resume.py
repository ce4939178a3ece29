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
import torch.distributed as dist

import thinwire
from harness import on_ranks, run_ranks
from pipelines import BATCH, SAMPLES, Pipe, check_sides, needs_pipelines, samples
from ranks import alike, of_ranks

pytestmark = needs_pipelines

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
    pipe = Pipe(rank, 2, name, group=dist.new_group(), **options)
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
        stage.close()
    return digests, losses, pipe.parameters(), counts


def place(kind: str, folder: Path, **more: Any) -> Any:
    if kind == "disk":
        return thinwire.store.Disk(folder / "store", num_samples=SAMPLES, **more)
    return thinwire.store.Memory() if kind == "memory" else thinwire.store.Centers(num=20, window=50)


@on_ranks(2)
def test_a_resumed_run_is_the_run_that_was_not_stopped(rank: int, tmp_path: Path) -> None:
    for kind, name, precision in (("memory", "interleaved", 4), ("disk", "gpipe", 32), ("centers", "interleaved", 32)):
        mine = tmp_path / f"{kind} {name}"
        mine.mkdir(exist_ok=True)
        options = {**FW3_BW6, "precision": precision}
        whole = run(rank, mine, name, {**options, "store": place(kind, mine / "whole")}, 100)
        options["store"] = place(kind, mine)
        early = run(rank, mine, name, options, 5, 5)
        late = run(rank, mine, name, options, 5, STEPS, True)
        check_sides(of_ranks(late[0]), [0] if name == "gpipe" else [0, 1, 2])
        assert late[0] == whole[0]
        assert early[1] + late[1] == whole[1]
        assert alike(late[2], whole[2])
        assert all(count[:2] == (0, 0) for count in late[3])


@pytest.mark.parametrize(("kind", "rank", "step"), [("memory", 0, 7), ("disk", 1, 10)])
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
        assert alike(late[2], mine[2])


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


def spoiled(rank: int, folder: Path, victim: int | None, what: str, kind: str) -> list[float]:
    """Damage one record on one side behind the stage's back, after an epoch, and go on; the losses."""
    pipe = Pipe(rank, 2, **{**FW3_BW6, "store": place(kind, folder), "check_every": 1})
    x, y = samples()
    pipe.epoch(0, x, y)
    ((name, store),) = pipe.stages[0].stores.items()
    if isinstance(store, thinwire.store.DiskStore):
        store.flush()
    if rank == victim and what == "bytes":
        slot = store._slots[5]
        with (folder / "store" / f"rank{rank}-{name}" / "records.bin").open("r+b") as records:
            records.seek(slot * store.form.record_bytes + 100)
            records.write(b"\xff\x00\xff")
    elif rank == victim and what == "value":
        flip_a_bit(store, 5)
    elif rank == victim:
        store.forget(5)
    losses = pipe.epoch(1, x, y)
    resets = 0 if victim is None or (what == "lost" and rank == victim) else 1
    assert pipe.stages[0].stats.resets == resets
    assert pipe.stages[0].stats.corrupt == (what == "bytes" and rank == victim)
    pipe.epoch(2, x, y)
    assert pipe.stages[0].stats.resets == resets, "it is in order afterwards"
    assert pipe.stages[0].stats.kept_samples == SAMPLES
    check_sides(of_ranks(pipe.digests()), [0])
    pipe.stages[0].close()
    return losses


@on_ranks(2)
def test_a_record_that_differs_is_reset_on_both_sides_and_counted(rank: int, tmp_path: Path) -> None:
    for what, kind in (("bytes", "disk"), ("value", "memory"), ("lost", "disk")):
        unharmed, *others = (spoiled(rank, tmp_path / f"{what} {v}", v, what, kind) for v in (None, 0, 1))
        # The sample traveled whole, so training saw its activation and not a wrong one.
        assert all(losses[:1] == pytest.approx(unharmed[:1], rel=0.2) for losses in others)


@on_ranks(2)
def test_checksums_are_compared_every_so_many_steps(rank: int) -> None:
    pipe = Pipe(rank, 2, **{**FW3_BW6, "check_every": 4})
    x, y = samples()
    resets = []
    for step, ids in enumerate(batches()[:9]):
        if step == 5 and rank == 0:
            (store,) = pipe.stages[0].stores.values()
            flip_a_bit(store, int(batches()[8][0]))
        pipe.step(x[ids], y[ids], ids)
        resets.append(pipe.stages[0].stats.resets)
    # What was spoiled before step 5 was used in step 6 or 7, unnoticed; steps 0, 4 and 8 compare.
    assert resets == [0] * 8 + [1]


@on_ranks(2)
def test_reading_ahead_changes_nothing(rank: int, tmp_path: Path) -> None:
    pipe = Pipe(rank, 2, **{**FW3_BW6, "store": place("disk", tmp_path)}, group=dist.new_group())
    x, y = samples()
    all_ids = batches()
    for step, ids in enumerate(all_ids):
        upcoming = all_ids[step + 1] if step + 1 < len(all_ids) else ()
        pipe.step(x[ids], y[ids], ids, **({"upcoming": upcoming} if pipe.first else {}))
    plain = run(rank, tmp_path, "gpipe", FW3_BW6, 100)
    assert pipe.digests() == plain[0]
    assert alike(pipe.parameters(), plain[2])


@on_ranks(2)
def test_pipelines_of_one_process_group_count_their_own_steps(rank: int) -> None:
    options = {"forward": "delta(maxabs(bits=3, rounding=stochastic))", "backward": "maxabs(bits=6)"}
    x, y = samples()

    def train(*, beside: bool) -> tuple[Any, Any]:
        pipe, second = Pipe(rank, 2, **options), Pipe(rank, 2, **{**options, "seed": 1})
        old = second.stages[0].state_dict()
        for epoch in range(3):
            pipe.epoch(epoch, x, y)
            if beside:
                second.step(x[:BATCH], y[:BATCH], range(BATCH))
                second.stages[0].load_state_dict(old)
        assert [int(one.stages[0].state_dict()["step"]) for one in (pipe, second)] == [6, 0]
        return pipe.digests(), pipe.parameters()

    digests, parameters = train(beside=False)
    others_digests, others_parameters = train(beside=True)
    assert digests == others_digests
    assert alike(parameters, others_parameters)
