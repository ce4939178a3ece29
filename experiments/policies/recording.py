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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from experiments.papers.lgreco.gradients import Snapshot

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
