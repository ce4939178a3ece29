"""``python -m experiments policies record``: the gradients of a few trainings, once, for every policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.papers.lgreco.gradients import NUM_RANKS, along
from experiments.papers.lgreco.tasks import PICTURES, PICTURES_SMOKE
from experiments.policies.recording import BadRecording, Recording, Training, layers_of
from experiments.tasks.words import WORDS, WORDS_SMOKE
from thinwire_tools.exits import ends_command

TITLES = {"gpt": "GPT of words", "cnn": "small ResNet"}
TASKS: Mapping[str, Any] = {"gpt": WORDS, "cnn": PICTURES}
SMOKE_TASKS: Mapping[str, Any] = {"gpt": WORDS_SMOKE, "cnn": PICTURES_SMOKE}


@dataclass(frozen=True)
class Extent:
    """How much is recorded: trainings a task, snapshots of each, and the steps whose gradients a snapshot sums."""

    seeds: int = 5
    snapshots: int = 7
    window: int = 20


SMOKE = Extent(seeds=1, snapshots=2, window=2)


def record(
    *,
    out: Path = Path("build/gradients"),
    seeds: int = Extent.seeds,
    snapshots: int = Extent.snapshots,
    window: int = Extent.window,
    smoke: bool = False,
) -> int:
    """Record the gradients of uncompressed trainings of a GPT and of a residual network.

    Each snapshot is the sum of one rank's gradients over WINDOW steps, which is what a policy decides on. Takes about
    two minutes and 150 MB of disk.

    Examples:
      python -m experiments policies record --out build/gradients
      python -m experiments policies record --out build/gradients --seeds 2 --snapshots 14

    Args:
        out: folder for the recording; what it recorded before is replaced.
        seeds: trainings of each task.
        snapshots: of each training, evenly spread; the last one ends with it.
        window: steps whose gradients a snapshot sums.
        smoke: tiny networks and few steps, seconds.
    """
    console = Console(highlight=False)
    extent, tasks = (SMOKE, SMOKE_TASKS) if smoke else (Extent(seeds, snapshots, window), TASKS)
    with ends_command():
        recording = recorded(tasks, extent, out)
    count = sum(len(training.steps) for training in recording.trainings)
    console.print(
        f"{count} snapshots of {len(recording.trainings)} trainings: {recording.num_bytes / 1e6:.0f} MB in {out}",
        soft_wrap=True,
        markup=False,
    )
    return 0


def recorded(
    tasks: Mapping[str, Any], extent: Extent, folder: Path, on_step: Callable[[], None] = lambda: None
) -> Recording:
    """Train every task from every seed, uncompressed, and write its snapshots to ``folder``.

    Raises:
        ValueError: the snapshots do not fit into the training.
    """
    if extent.seeds < 1 or extent.snapshots < 1 or extent.window < 1:
        raise ValueError(f"{extent.seeds} seeds, {extent.snapshots} snapshots of {extent.window} steps: at least one")
    trainings = []
    for name, task in tasks.items():
        if extent.snapshots * extent.window > task.steps:
            raise ValueError(
                f"{extent.snapshots} snapshots of {extent.window} steps do not fit into {task.steps} steps of {name}"
            )
        for seed in range(extent.seeds):
            taken = along(task, count=extent.snapshots, window=extent.window, on_step=on_step, seed=seed)
            training = Training(
                task=name,
                title=TITLES[name],
                seed=seed,
                steps=tuple(snapshot.step for snapshot in taken),
                learning_rates=tuple(snapshot.learning_rate for snapshot in taken),
                window=extent.window,
                num_ranks=NUM_RANKS,
                bucket_cap_mb=task.bucket_cap_mb,
                layers=layers_of(taken[0].gradients),
            )
            trainings.append((training, taken))
    return Recording.write(folder, trainings)


def recorded_once(
    tasks: Mapping[str, Any], extent: Extent, folder: Path, on_step: Callable[[], None] = lambda: None
) -> Recording:
    """The recording in ``folder`` if it is of such trainings, else a new one there."""
    try:
        recording = Recording.open(folder)
    except (OSError, BadRecording):
        return recorded(tasks, extent, folder, on_step)
    wanted = {
        (name, seed, task.steps, extent.snapshots) for name, task in tasks.items() for seed in range(extent.seeds)
    }
    there = {(one.task, one.seed, one.steps[-1], len(one.steps)) for one in recording.trainings}
    same_window = all(one.window == extent.window for one in recording.trainings)
    return recording if wanted == there and same_window else recorded(tasks, extent, folder, on_step)


def num_steps(tasks: Mapping[str, Any], extent: Extent) -> int:
    """Training steps that a recording takes."""
    return extent.seeds * sum(task.steps for task in tasks.values())
