"""Recorded gradients on disk: a folder with ``recording.json`` and one NumPy array a training.

``recording.json`` names the format and its version, and lists the trainings. Of each it has the task and its title,
the seed, the steps at which a snapshot was taken, the learning rate at each of them, how many steps' gradients a
snapshot sums (``window``), for how many ranks the batches were drawn, the size up to which DDP fills a bucket, and the
layers with their shapes, in the order of ``model.named_parameters()``.

``<task>-<seed>.npy`` is of shape ``(snapshots, elements)`` and of type ``<u2``: the bits of bfloat16, the layers one
after the other. bfloat16 halves the folder; what it rounds away is a 256th of a value at most, and policies are shown
the rounded gradients as if they were the training's. Arrays are read with ``allow_pickle=False`` and without being
loaded whole. When a folder is opened, the shape, type and SHA-256 of every array are checked; that a snapshot is finite
is checked when it is read.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from experiments.papers.lgreco.gradients import NUM_RANKS, Snapshot, along
from experiments.papers.lgreco.methods import PICTURES, PICTURES_SMOKE
from experiments.tasks.words import WORDS, WORDS_SMOKE
from thinwire_tools.exits import ends_command

FORMAT = "thinwire-gradients"
VERSION = 1
MANIFEST = "recording.json"
_BLOCK = 1 << 20


class BadRecording(ValueError):
    """A folder does not hold what `Recording.write` writes."""


@dataclass(frozen=True)
class Layer:
    """A parameter, as ``model.named_parameters()`` lists it."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Training:
    """What the manifest says of one training."""

    task: str
    title: str
    seed: int
    steps: tuple[int, ...]
    learning_rates: tuple[float, ...]
    window: int
    num_ranks: int
    bucket_cap_mb: float
    layers: tuple[Layer, ...]
    sha256: str = ""

    @property
    def file(self) -> str:
        return f"{self.task}-{self.seed}.npy"

    @property
    def numel(self) -> int:
        return sum(layer.numel for layer in self.layers)

    @property
    def bucket_of(self) -> dict[str, int]:
        """By layer, the index of its DDP bucket in the order in which buckets are sent: the last layers fill the first
        one."""
        buckets, bucket, filled = {}, 0, 0
        for layer in reversed(self.layers):
            buckets[layer.name] = bucket
            filled += 4 * layer.numel
            if filled >= self.bucket_cap_mb * 2**20:
                bucket, filled = bucket + 1, 0
        return buckets

    @classmethod
    def from_json(cls, record: Any) -> Self:
        """The training of a manifest's entry.

        Raises:
            BadRecording: it is not one.
        """
        try:
            lists = {name: tuple(record[name]) for name in ("steps", "learning_rates")}
            layers = tuple(Layer(layer["name"], tuple(layer["shape"])) for layer in record["layers"])
            return cls(**{**record, **lists, "layers": layers})
        except (TypeError, KeyError) as error:
            raise BadRecording(f"a training of {MANIFEST} is not one: {error!r}") from None


@dataclass(frozen=True)
class Recording:
    """A folder of recorded gradients, checked when it was opened."""

    folder: Path
    trainings: tuple[Training, ...]

    @classmethod
    def open(cls, folder: Path) -> Recording:
        """Check a folder.

        Raises:
            BadRecording: something in it is not what `write` writes.
            OSError: it cannot be read.
        """
        manifest = folder / MANIFEST
        try:
            record = json.loads(manifest.read_text())
            known = record["format"] == FORMAT and record["version"] == VERSION
            entries = record["trainings"]
        except (ValueError, KeyError, TypeError) as error:
            raise BadRecording(f"{manifest} is no manifest of gradients: {error!r}") from None
        if not known:
            raise BadRecording(f"{manifest}: format and version are not {FORMAT} {VERSION}; record it again")
        trainings = tuple(Training.from_json(entry) for entry in entries)
        recording = cls(folder, trainings)
        for training in trainings:
            recording._array(training)
            if _digest(folder / training.file) != training.sha256:
                raise BadRecording(f"{folder / training.file} is not the file that was recorded: its SHA-256 differs")
        return recording

    @classmethod
    def write(cls, folder: Path, trainings: Sequence[tuple[Training, Sequence[Snapshot]]]) -> Recording:
        """Write trainings and their snapshots to a folder, the manifest last."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST).unlink(missing_ok=True)
        written = []
        for training, snapshots in trainings:
            rows = [_bits(training, snapshot) for snapshot in snapshots]
            np.save(folder / training.file, np.stack(rows), allow_pickle=False)
            entry = asdict(training) | {"sha256": _digest(folder / training.file)}
            written.append(entry)
        record = {"format": FORMAT, "version": VERSION, "trainings": written}
        (folder / MANIFEST).write_text(json.dumps(record, indent=1) + "\n")
        return cls.open(folder)

    @property
    def num_bytes(self) -> int:
        """Of all arrays."""
        return sum((self.folder / training.file).stat().st_size for training in self.trainings)

    def of(self, task: str) -> tuple[Training, ...]:
        """The trainings of a task."""
        return tuple(training for training in self.trainings if training.task == task)

    @property
    def tasks(self) -> dict[str, str]:
        """Titles of the tasks, by name."""
        return {training.task: training.title for training in self.trainings}

    def snapshots(self, training: Training) -> Iterator[Snapshot]:
        """The snapshots of a training, in the order of their steps.

        Raises:
            BadRecording: one of them is not finite.
        """
        array = self._array(training)
        for row, (step, rate) in enumerate(zip(training.steps, training.learning_rates, strict=True)):
            bits = torch.from_numpy(array[row].astype(np.int16, casting="unsafe"))
            values = bits.view(torch.bfloat16).float()
            if not bool(torch.isfinite(values).all()):
                raise BadRecording(f"{self.folder / training.file}: the snapshot of step {step} is not finite")
            parts = values.split([layer.numel for layer in training.layers])
            gradients = {layer.name: part.view(layer.shape) for layer, part in zip(training.layers, parts, strict=True)}
            yield Snapshot(step, gradients, rate)

    def _array(self, training: Training) -> np.ndarray:
        path = self.folder / training.file
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise BadRecording(f"{path} is no plain array: {error}") from None
        if array.dtype != np.dtype("<u2") or array.shape != (len(training.steps), training.numel):
            raise BadRecording(
                f"{path} has {array.dtype} of shape {array.shape}, the manifest says <u2 of "
                f"{(len(training.steps), training.numel)}"
            )
        return array


def layers_of(gradients: Mapping[str, Tensor]) -> tuple[Layer, ...]:
    """Names and shapes."""
    return tuple(Layer(name, tuple(gradient.shape)) for name, gradient in gradients.items())


def _bits(training: Training, snapshot: Snapshot) -> np.ndarray:
    flat = torch.cat([snapshot.gradients[layer.name].reshape(-1) for layer in training.layers])
    return flat.to(torch.bfloat16).view(torch.int16).numpy().astype("<u2", casting="unsafe")


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


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
