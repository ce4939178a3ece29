"""The images that experiments train on, and the small residual network that learns them."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.tasks import images
from experiments.tasks.images import ImageTask

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


def test_cifar_is_read_as_it_is_defined(tmp_path: Path) -> None:
    for inside in ("", "cifar-10-batches-bin"):
        _write_cifar(tmp_path / (inside or "flat") / inside)
        found = images.cifar10(tmp_path / (inside or "flat"))
        assert found.train.shape == (15, 3, 32, 32)
        assert found.held_out.shape == (3, 3, 32, 32)
        assert found.train_labels.tolist() == [(record + batch) % 10 for batch in range(5) for record in range(3)]
        # Channel by channel, row by row, in the order of the files.
        assert found.train[3 * 2, :, 0, 0].tolist() == [12, 20, 30]
        assert int(found.train[0, 0, 5, 7]) == 99
        assert found.held_out[0, 0, 0, 0] == 15
        assert abs(float(found.normalized(found.train).mean())) < 0.1


def test_hostile_short_and_missing_cifar_files_are_refused(tmp_path: Path) -> None:
    _write_cifar(tmp_path)
    contents = [b"", b"\x00" * (RECORD - 1), b"\x0a" + b"\x00" * (RECORD - 1), b"\x00" * RECORD * 10_001]
    for content in [*contents, pickle.dumps({"data": []})]:
        (tmp_path / "data_batch_4.bin").write_bytes(content)
        with pytest.raises(ValueError, match=r"data_batch_4\.bin.*(records of 3073|is of class)"):
            images.cifar10(tmp_path)
    _write_cifar(tmp_path)
    (tmp_path / "test_batch.bin").unlink()
    with pytest.raises(FileNotFoundError, match="cifar-10-binary"):
        images.cifar10(tmp_path)


@pytest.fixture
def cifar_task(tmp_path: Path) -> ImageTask:
    return ImageTask(data=str(_write_cifar(tmp_path)), width=8, steps=10, batch=4, probe_images=2)


def test_the_task_is_a_function_of_seed_and_rank(cifar_task: ImageTask) -> None:
    first, second = (list(cifar_task.batches(3, rank, 2)) for rank in (0, 1))
    again = list(cifar_task.batches(3, 0, 2))
    assert all(torch.equal(a[1], b[1]) for a, b in zip(first, again, strict=True))
    assert any(not torch.equal(a[1], b[1]) for a, b in zip(first, second, strict=True))
    noisy = dataclasses.replace(cifar_task, noise=0.5)
    drawn = [
        next(iter(noisy.batches(3, rank, 2)))[0] - next(iter(cifar_task.batches(3, rank, 2)))[0] for rank in (0, 1)
    ]
    assert float(drawn[0].std()) == pytest.approx(0.5, rel=0.05)
    assert not torch.equal(*drawn)
    assert len(noisy.images.held_out) == 3 * (4000 // 3)
    # The rate falls to a tenth once.
    assert [cifar_task.rate(step) for step in range(10)] == pytest.approx([0.02] * 7 + [0.002] * 3)


def test_every_held_out_image_is_scored_once(cifar_task: ImageTask) -> None:
    model = cifar_task.build(0)
    parts = [cifar_task.score(model, rank, 2, probe=False) for rank in (0, 1)]
    total, right, count = cifar_task.score(model, 0, 1, probe=False)
    assert sum(part[2] for part in parts) == count == 3
    assert sum(part[1] for part in parts) == right
    assert sum(part[0] for part in parts) == pytest.approx(total, rel=1e-5)
    assert cifar_task.evaluate(model, 0, 1, probe=False) == (total, count)
