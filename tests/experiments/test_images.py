"""The images that experiments train on, and the small residual network that learns them."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiments.tasks import images
from experiments.tasks.resnet import ImageTask, ResNet

RECORD = 3073


def _write_cifar(folder: Path, records: int = 3) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for index, name in enumerate([*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]):
        content = np.zeros((records, RECORD), dtype=np.uint8)
        content[:, 0] = (np.arange(records) + index) % 10
        content[:, 1:1025], content[:, 1025:2049], content[:, 2049:] = 10 + index, 20, 30
        content[:, 1 + 32 * 5 + 7] = 99
        (folder / name).write_bytes(content.tobytes())
    return folder


@pytest.mark.parametrize("inside", ["", "cifar-10-batches-bin"])
def test_cifar_is_read_as_it_is_defined(tmp_path: Path, inside: str) -> None:
    _write_cifar(tmp_path / inside)
    found = images.cifar10(tmp_path)
    assert found.train.shape == (15, 3, 32, 32)
    assert found.held_out.shape == (3, 3, 32, 32)
    assert found.train_labels.tolist() == [(record + batch) % 10 for batch in range(5) for record in range(3)]
    # Channel by channel, row by row, in the order of the files.
    assert found.train[3 * 2, :, 0, 0].tolist() == [12, 20, 30]
    assert int(found.train[0, 0, 5, 7]) == 99
    assert found.held_out[0, 0, 0, 0] == 15
    pixels = found.normalised(found.train)
    assert pixels.dtype == torch.float32
    assert abs(float(pixels.mean())) < 0.1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * (RECORD - 1),
        b"\x00" * (2 * RECORD + 1),
        b"\x0a" + b"\x00" * (RECORD - 1),
        b"\xff" * RECORD,
        b"\x00" * RECORD * 10_001,
        pickle.dumps({"data": [1, 2, 3]}),
    ],
    ids=["empty", "short", "long", "class 10", "class 255", "too many", "pickle"],
)
def test_hostile_and_short_cifar_files_are_refused(tmp_path: Path, content: bytes) -> None:
    _write_cifar(tmp_path)
    (tmp_path / "data_batch_4.bin").write_bytes(content)
    with pytest.raises(ValueError, match=r"data_batch_4\.bin.*(records of 3073|is of class)"):
        images.cifar10(tmp_path)


def test_a_missing_cifar_file_and_one_that_is_no_file_are_errors(tmp_path: Path) -> None:
    _write_cifar(tmp_path)
    (tmp_path / "test_batch.bin").unlink()
    with pytest.raises(FileNotFoundError, match="cifar-10-binary"):
        images.cifar10(tmp_path)
    os.mkfifo(tmp_path / "test_batch.bin")
    with pytest.raises(ValueError, match="is not a file"):
        images.cifar10(tmp_path)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "harm"),)

    _write_cifar(tmp_path)
    payload = pickle.dumps(Bomb())
    (tmp_path / "data_batch_1.bin").write_bytes(payload + b"\x00" * (-len(payload) % RECORD))
    with pytest.raises(ValueError, match="is of class"):
        images.cifar10(tmp_path)
    assert not (tmp_path / "harm").exists()


def test_the_digits_are_split_by_index() -> None:
    pytest.importorskip("sklearn")
    found = images.digits()
    assert (found.train.shape, found.held_out.shape) == ((898, 1, 8, 8), (899, 1, 8, 8))
    assert found.train.dtype == torch.uint8
    assert int(found.train.max()) == 240
    assert set(found.held_out_labels.tolist()) == set(range(10))


# --- the task


@pytest.fixture
def cifar_task(tmp_path: Path) -> ImageTask:
    return ImageTask(data=str(_write_cifar(tmp_path)), width=8, steps=10, batch=4, probe_images=2)


def test_the_task_is_a_function_of_seed_and_rank(cifar_task: ImageTask) -> None:
    first, second = (list(cifar_task.batches(3, rank, 2)) for rank in (0, 1))
    again = list(cifar_task.batches(3, 0, 2))
    assert len(first) == cifar_task.steps
    assert all(torch.equal(a[1], b[1]) for a, b in zip(first, again, strict=True))
    assert any(not torch.equal(a[1], b[1]) for a, b in zip(first, second, strict=True))
    weights = [torch.cat([p.flatten() for p in cifar_task.build(seed).parameters()]) for seed in (3, 3, 4)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_the_learning_rate_falls_to_a_tenth_once(cifar_task: ImageTask) -> None:
    rates = [cifar_task.rate(step) for step in range(cifar_task.steps)]
    assert rates == pytest.approx([0.02] * 7 + [0.002] * 3)
    assert cifar_task.drop_step == 7


def test_every_held_out_image_is_scored_once(cifar_task: ImageTask) -> None:
    model = cifar_task.build(0)
    parts = [cifar_task.score(model, rank, 2, probe=False) for rank in (0, 1)]
    total, right, count = cifar_task.score(model, 0, 1, probe=False)
    assert sum(part[2] for part in parts) == count == 3
    assert sum(part[1] for part in parts) == right
    assert sum(part[0] for part in parts) == pytest.approx(total, rel=1e-5)
    assert cifar_task.evaluate(model, 0, 1, probe=False) == (total, count)


def test_the_network_is_mostly_convolutions() -> None:
    model = ResNet(1, 32)
    size = {name: parameter.numel() for name, parameter in model.named_parameters()}
    convolutions = sum(p.numel() for p in model.parameters() if p.ndim == 4)
    assert 0.25e6 < sum(size.values()) < 1e6
    assert convolutions > 0.98 * sum(size.values())
    assert not list(model.buffers())
