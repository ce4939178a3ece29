"""Labeled images to train on: CIFAR-10 where its binary files are at hand, else the digits that scikit-learn ships.

Nothing is downloaded and nothing is unpickled.
"""

from __future__ import annotations

import functools
import stat
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

NUM_CLASSES = 10
_CIFAR_SHAPE = (3, 32, 32)
_CIFAR_RECORD = 1 + 3 * 32 * 32
_CIFAR_MOST_RECORDS = 10_000
_CIFAR_TRAIN = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
_CIFAR_HELD_OUT = "test_batch.bin"
_CIFAR_FOLDER = "cifar-10-batches-bin"


@dataclass(frozen=True)
class Images:
    """Pixels as ``uint8 [images, channels, height, width]``, classes as ``int64 [images]``."""

    name: str
    train: Tensor
    train_labels: Tensor
    held_out: Tensor
    held_out_labels: Tensor

    @property
    def channels(self) -> int:
        return self.train.shape[1]

    @functools.cached_property
    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the training pixels by channel, ``[1, channels, 1, 1]`` each."""
        # A sample: the moments of CIFAR's 50 000 images in fp32 would take 600 MB.
        pixels = self.train[:: max(1, len(self.train) // 5000)].float()
        return pixels.mean((0, 2, 3), keepdim=True), pixels.std((0, 2, 3), keepdim=True).clamp_min(1.0)

    def normalized(self, pixels: Tensor) -> Tensor:
        """``pixels`` as fp32 with the training data's mean and deviation taken out."""
        mean, deviation = self.moments
        return (pixels.float() - mean) / deviation


@functools.lru_cache(maxsize=2)
def load(folder: str | None) -> Images:
    """CIFAR-10 of ``folder``, or the digits if it is None. Errors are those of `cifar10` and `digits`."""
    return digits() if folder is None else cifar10(Path(folder))


def cifar10(folder: Path) -> Images:
    """CIFAR-10 from its binary version: ``data_batch_1.bin`` to ``5`` to train on, ``test_batch.bin`` held out.

    ``folder`` is the one that holds these files, or the one in which the archive was unpacked. A record is one byte of
    class and 3072 of pixels: red, green, blue, each 32 rows of 32.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is no whole number of records, has none, has more than CIFAR-10's 10 000, or a class over 9.
    """
    if not (folder / _CIFAR_HELD_OUT).exists() and (folder / _CIFAR_FOLDER).is_dir():
        folder = folder / _CIFAR_FOLDER
    parts = [_cifar_records(folder / name) for name in _CIFAR_TRAIN]
    held_out, held_out_labels = _cifar_records(folder / _CIFAR_HELD_OUT)
    pixels, labels = zip(*parts, strict=True)
    return Images("CIFAR-10", torch.cat(pixels), torch.cat(labels), held_out, held_out_labels)


def _cifar_records(path: Path) -> tuple[Tensor, Tensor]:
    try:
        status = path.stat()
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path} is missing: unpack the binary version of CIFAR-10 (cifar-10-binary.tar.gz) and give that folder"
        ) from None
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is not a file")
    if not 0 < status.st_size <= _CIFAR_MOST_RECORDS * _CIFAR_RECORD or status.st_size % _CIFAR_RECORD:
        raise ValueError(
            f"{path} has {status.st_size} bytes, which is not 1 to {_CIFAR_MOST_RECORDS} records of {_CIFAR_RECORD}: "
            "it is cut short, or not of CIFAR-10's binary version"
        )
    with path.open("rb") as file:
        content = file.read(status.st_size)
    if len(content) != status.st_size:
        raise ValueError(f"{path} changed while it was read: {len(content)} bytes instead of {status.st_size}")
    records = torch.from_numpy(np.frombuffer(content, dtype=np.uint8).reshape(-1, _CIFAR_RECORD).copy())
    labels = records[:, 0].long()
    if int(labels.max()) >= NUM_CLASSES:
        at = int((labels >= NUM_CLASSES).nonzero()[0])
        raise ValueError(f"{path}: record {at} is of class {int(labels[at])}; CIFAR-10 has 0 to {NUM_CLASSES - 1}")
    return records[:, 1:].reshape(-1, *_CIFAR_SHAPE).contiguous(), labels


def digits() -> Images:
    """scikit-learn's 1797 handwritten digits of 8 x 8 pixels; the second half is held out, so that accuracy has
    steps of a ninth of a percent.

    Raises ``ImportError`` without scikit-learn.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "the digits come with scikit-learn: pip install '.[repro]', or give CIFAR-10 with --data"
        ) from error
    rows, classes = load_digits(return_X_y=True)
    # Pixels are whole numbers from 0 to 16.
    pixels = torch.from_numpy(np.asarray(rows) * 15).to(torch.uint8).view(-1, 1, 8, 8)
    labels = torch.from_numpy(np.asarray(classes)).long()
    cut = len(pixels) // 2
    return Images("digits", pixels[:cut], labels[:cut], pixels[cut:], labels[cut:])
