"""Kill and resume: a process of a pipeline is killed at a step, and the training goes on from its last checkpoint; and
appendix I, what the networks complete."""

from __future__ import annotations

import dataclasses
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from experiments.framework.claims import Row
from experiments.framework.study import Study
from experiments.papers.aqsgd.methods import FP32, Method, aqsgd, direct
from experiments.papers.aqsgd.study import NUM_STAGES, AQSGDScale, AQSGDStudy
from experiments.papers.aqsgd.tasks import FineTuning
from experiments.papers.aqsgd.trainings import Asked, Trained, Trainings
from thinwire_tools.ranks import RankFailed

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
    planned = []
    while len(planned) < count:
        step = draws.randrange(max(every, -(-first // every) * every), steps)
        if step % every or every == 1:
            planned.append(Kill(len(planned) % num_ranks, step))
    return planned


def steps_of(task: FineTuning, planned: Sequence[Kill]) -> int:
    """Steps of a whole training, of those before each kill, and from each checkpoint on."""
    every = checkpoint_every(task)
    return task.steps + sum(kill.step + task.steps - kill.step // every * every for kill in planned)


def resume_steps(scale: AQSGDScale) -> int:
    """For each kind of store."""
    planned = kills(scale.small, scale.kills, NUM_STAGES)
    return len(_STORES) * steps_of(scale.small, planned) + scale.small.first_steps


def resumed(study: AQSGDStudy) -> list[Row]:
    """With messages in memory, which are in the checkpoint, and on disk, which it names."""
    return [_resumed(study, store) for store in _STORES]


def _resumed(study: AQSGDStudy, store: Literal["memory", "disk"]) -> Row:
    method = aqsgd(3, 6, store=store)
    task = study.scale.small
    planned = kills(task, study.scale.kills, NUM_STAGES)
    reporter = study.reporter(f"{method.title}, not stopped")
    whole = study.trainings().train(task, method, 0, reporter, Asked(held_out=False))
    runs = [killed(study, lambda: Trainings(NUM_STAGES, study.first()), task, method, kill, whole) for kill in planned]
    data = {
        "kills": [dataclasses.asdict(kill) for kill in planned],
        "checkpoint_every": checkpoint_every(task),
        "steps": task.steps,
        "starts": [run.start for run, _ in runs],
        "losses": whole.losses,
    }
    good = sum(run.alike and same for run, same in runs)
    return Row("resume", f"bit_identical/{store}", float(good), "", data)


def killed(
    study: Study[Any], start: Callable[[], Trainings], task: FineTuning, method: Method, kill: Kill, whole: Trained
) -> tuple[Trained, bool]:
    """What was trained after the kill, by ranks that ``start`` makes, and whether every loss before and after is that
    of the training that was not stopped."""
    every = checkpoint_every(task)
    before: list[float] = []

    def heard(_: int, loss: float) -> None:
        before.append(loss)
        study.advance(1, f"{method.title}, killed before step {kill.step + 1}")

    def heard_again(_: int, loss: float) -> None:
        study.advance(1, f"{method.title}, resumed: loss {loss:.2f}")

    with tempfile.TemporaryDirectory(prefix="thinwire-repro-") as folder:
        asked = Asked(held_out=False, save_every=every, dies=(kill.rank, kill.step))
        try:
            with start() as trainings:
                trainings.train(task, method, 0, heard, asked, Path(folder))
        except RankFailed as failure:
            if failure.rank != kill.rank:
                raise
        with start() as trainings:
            asked = Asked(held_out=False, save_every=every, resume=True)
            rest = trainings.train(task, method, 0, heard_again, asked, Path(folder))
    same = tuple(before) == whole.losses[: len(before)] and rest.losses == whole.losses[rest.start :]
    return rest, same and rest.start > 0


# --- appendix I: greedy completions of the same prompts, of networks that were fine-tuned by different methods

COMPLETED = (FP32, aqsgd(4, 8), direct(4, 8))
"""As in the appendix."""


def completions_steps(scale: AQSGDScale) -> int:
    return scale.steps("small", COMPLETED)


def completions(study: AQSGDStudy) -> list[Row]:
    """How much of them is FP32's by seed, and those of the first seed."""
    asked, trainings, task = Asked(held_out=False, completions=True), study.trainings(), study.scale.small
    by_seed = [
        {method.name: trainings.train(task, method, seed, study.reporter(method.title), asked) for method in COMPLETED}
        for seed in study.seeds
    ]
    trained = by_seed[0]
    base = trained[FP32.name]
    start = base.prompted
    data = {
        "prompts": [text(row[:start]) for row in base.text],
        "gold": [text(row[start:]) for row in base.text],
        "completions": {m.title: [text(row[start:]) for row in trained[m.name].completions] for m in COMPLETED},
        "common": {name: [common(runs[FP32.name], runs[name]) for runs in by_seed] for name in trained},
    }
    return [Row("appendix I", "completions", fmean(data["common"][COMPLETED[1].name]), "", data)]


def common(base: Trained, other: Trained) -> float:
    """The share of a completion up to where it first differs, in the mean."""
    equal = [
        _common(one[base.prompted :], two[base.prompted :])
        for one, two in zip(base.completions, other.completions, strict=True)
    ]
    return sum(equal) / len(equal)


def _common(one: Sequence[int], two: Sequence[int]) -> float:
    differs = [a != b for a, b in zip(one, two, strict=True)]
    return (differs.index(True) if True in differs else len(one)) / len(one)


def text(content: bytes) -> str:
    """What bytes say, where they say something that can be shown."""
    return content.decode("utf-8", errors="replace")
