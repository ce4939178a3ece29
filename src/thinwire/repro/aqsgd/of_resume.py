"""Kill and resume: a process of a pipeline is killed at a step, and the training goes on from its last checkpoint."""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from thinwire.repro.aqsgd.rank import Asked
from thinwire.repro.aqsgd.study import NUM_STAGES, Scale, Study, Work
from thinwire.repro.aqsgd.trainings import Trained, Trainings
from thinwire.repro.aqsgd.ways import aqsgd
from thinwire.repro.crew import RankFailed
from thinwire.repro.findings import Finding

_STORES: tuple[Literal["memory", "disk"], ...] = ("memory", "disk")


@dataclass(frozen=True)
class Kill:
    """Of rank ``rank``, before step ``step`` (from 0)."""

    rank: int
    step: int


def checkpoint_every(scale: Scale) -> int:
    """Steps between checkpoints: no whole epoch."""
    return max(1, scale.small.steps // 7)


def kills(scale: Scale) -> list[Kill]:
    """Somewhere between the first checkpoint and the end, not right behind a checkpoint."""
    draws, every, steps = random.Random(0), checkpoint_every(scale), scale.small.steps
    found = []
    while len(found) < scale.kills:
        step = draws.randrange(every, steps)
        if step % every or every == 1:
            found.append(Kill(len(found) % NUM_STAGES, step))
    return found


def resume_work(scale: Scale) -> Work:
    """Whole trainings, what was trained before each kill, and from each checkpoint on."""
    every, steps = checkpoint_every(scale), scale.small.steps
    parts = sum(kill.step + steps - kill.step // every * every for kill in kills(scale))
    return Work(steps=len(_STORES) * (steps + parts), own=frozenset({scale.small}))


def resumed(study: Study) -> list[Finding]:
    """With messages in memory, which are in the checkpoint, and on disk, which it names."""
    return [_resumed(study, store) for store in _STORES]


def _resumed(study: Study, store: Literal["memory", "disk"]) -> Finding:
    way = aqsgd(3, 6, store=store)
    task, every = study.scale.small, checkpoint_every(study.scale)
    whole = study.trainings().train(task, way, 0, study.shower(f"{way.title}, not stopped"), Asked(held_out=False))
    told = [_killed(study, store, kill, whole) for kill in kills(study.scale)]
    good = sum(run.alike and same for run, same in told)
    at = [f"rank {kill.rank} before step {kill.step + 1}" for kill in kills(study.scale)]
    return Finding(
        "resume",
        f"bit_identical/{store}",
        float(good),
        "",
        f"a pipeline that is killed goes on from its checkpoint bit by bit, messages in {store}"
        if store == "memory"
        else "a pipeline that is killed goes on from its checkpoint bit by bit, messages on disk",
        f"{good} of {len(told)} times the same losses to the last bit and the same messages on both sides; killed: "
        f"{', '.join(at)}; a checkpoint every {every} of {task.steps} steps",
        good == len(told),
        {"starts": [run.start for run, _ in told], "losses": whole.losses},
    )


def _killed(study: Study, store: Literal["memory", "disk"], kill: Kill, whole: Trained) -> tuple[Trained, bool]:
    """What was trained after the kill, and whether every loss before and after is that of the training that was not
    stopped."""
    task, way = study.scale.small, aqsgd(3, 6, store=store)
    every = checkpoint_every(study.scale)
    before: list[float] = []
    title = f"{way.title}, killed before step {kill.step + 1}"

    def heard(_: int, loss: float) -> None:
        before.append(loss)
        study.advance(1, title)

    with tempfile.TemporaryDirectory(prefix="thinwire-aqsgd-") as folder:
        asked = Asked(held_out=False, save_every=every, dies=(kill.rank, kill.step))
        try:
            with Trainings(NUM_STAGES, study.first()) as trainings:
                trainings.train(task, way, 0, heard, asked, Path(folder))
        except RankFailed as failure:
            if failure.rank != kill.rank:
                raise
        with Trainings(NUM_STAGES, study.first()) as trainings:
            asked = Asked(held_out=False, save_every=every, resume=True)
            rest = trainings.train(task, way, 0, study.shower(f"{way.title}, resumed"), asked, Path(folder))
    same = tuple(before) == whole.losses[: len(before)] and rest.losses == whole.losses[rest.start :]
    return rest, same and rest.start > 0
