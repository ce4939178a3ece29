"""Kill and resume: a process of a pipeline is killed at a step, and the training goes on from its last checkpoint."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from thinwire.repro.aqsgd.rank import Asked
from thinwire.repro.aqsgd.study import NUM_STAGES, Scale, Study, Work
from thinwire.repro.aqsgd.tasks import FineTuning
from thinwire.repro.aqsgd.trainings import Trained, Trainings
from thinwire.repro.aqsgd.ways import Way, aqsgd
from thinwire.repro.crew import RankFailed
from thinwire.repro.findings import Finding
from thinwire.repro.parts import Parted

_STORES: tuple[Literal["memory", "disk"], ...] = ("memory", "disk")


@dataclass(frozen=True)
class Kill:
    """Of rank ``rank``, before step ``step`` (from 0)."""

    rank: int
    step: int


def checkpoint_every(task: FineTuning) -> int:
    """Steps between checkpoints: no whole epoch."""
    return max(1, task.steps // 7)


def kills(task: FineTuning, count: int, num_ranks: int, first: int = 0) -> list[Kill]:
    """Somewhere between the first checkpoint behind step ``first`` and the end, not right behind a checkpoint."""
    draws, every, steps = random.Random(0), checkpoint_every(task), task.steps
    found = []
    while len(found) < count:
        step = draws.randrange(max(every, -(-first // every) * every), steps)
        if step % every or every == 1:
            found.append(Kill(len(found) % num_ranks, step))
    return found


def steps_of(task: FineTuning, found: Sequence[Kill]) -> int:
    """Steps of a whole training, of those before each kill, and from each checkpoint on."""
    every = checkpoint_every(task)
    return task.steps + sum(kill.step + task.steps - kill.step // every * every for kill in found)


def resume_work(scale: Scale) -> Work:
    """For each kind of store."""
    found = kills(scale.small, scale.kills, NUM_STAGES)
    return Work(steps=len(_STORES) * steps_of(scale.small, found), own=frozenset({scale.small}))


def resumed(study: Study) -> list[Finding]:
    """With messages in memory, which are in the checkpoint, and on disk, which it names."""
    return [_resumed(study, store) for store in _STORES]


def _resumed(study: Study, store: Literal["memory", "disk"]) -> Finding:
    way = aqsgd(3, 6, store=store)
    task, every = study.scale.small, checkpoint_every(study.scale.small)
    found = kills(task, study.scale.kills, NUM_STAGES)
    whole = study.trainings().train(task, way, 0, study.shower(f"{way.title}, not stopped"), Asked(held_out=False))
    told = [killed(study, lambda: Trainings(NUM_STAGES, study.first()), task, way, kill, whole) for kill in found]
    good = sum(run.alike and same for run, same in told)
    at = [f"rank {kill.rank} before step {kill.step + 1}" for kill in found]
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


def killed(
    study: Parted, start: Callable[[], Trainings], task: FineTuning, way: Way, kill: Kill, whole: Trained
) -> tuple[Trained, bool]:
    """What was trained after the kill, by ranks that ``start`` makes, and whether every loss before and after is that
    of the training that was not stopped."""
    every = checkpoint_every(task)
    before: list[float] = []

    def heard(_: int, loss: float) -> None:
        before.append(loss)
        study.advance(1, f"{way.title}, killed before step {kill.step + 1}")

    def heard_again(_: int, loss: float) -> None:
        study.advance(1, f"{way.title}, resumed: loss {loss:.2f}")

    with tempfile.TemporaryDirectory(prefix="thinwire-repro-") as folder:
        asked = Asked(held_out=False, save_every=every, dies=(kill.rank, kill.step))
        try:
            with start() as trainings:
                trainings.train(task, way, 0, heard, asked, Path(folder))
        except RankFailed as failure:
            if failure.rank != kill.rank:
                raise
        with start() as trainings:
            asked = Asked(held_out=False, save_every=every, resume=True)
            rest = trainings.train(task, way, 0, heard_again, asked, Path(folder))
    same = tuple(before) == whole.losses[: len(before)] and rest.losses == whole.losses[rest.start :]
    return rest, same and rest.start > 0
