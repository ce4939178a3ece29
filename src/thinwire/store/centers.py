"""Cluster centers of activations in place of each sample's message: for streams, in which no sample is seen again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.store.store import RecordFormat, Rows, Store, StoreError

MOST_CENTERS = 256
"""Largest number of centers, to which one byte can refer."""


class CenterTable:
    """Cluster centers of vectors of one width (AQ-SGD, appendix G: its relaxation for online learning).

    The first ``num`` vectors become the centers; a center is then the mean of all vectors assigned to it, or of about
    the last ``window`` ones, as the network drifts.

    Args:
        num: number of centers, 1 to 256.
        width: elements of a vector.
        window: about how many of the last vectors a center is the mean of.
    """

    def __init__(self, num: int, width: int, window: int = 1024) -> None:
        self.num, self.width, self.window = num, width, window
        self._values = torch.zeros(num, width, dtype=torch.float32, device="cpu")
        self._counts = torch.zeros(num, dtype=torch.int64, device="cpu")
        self._ready = 0

    @property
    def missing(self) -> int:
        """Number of vectors that must be sent raw before all centers exist."""
        return self.num - self._ready

    def begin(self, vectors: Tensor) -> None:
        """Make the first vectors centers: fp32 of shape (at most `missing`, width)."""
        new = slice(self._ready, self._ready + len(vectors))
        self._values[new], self._counts[new], self._ready = vectors, 1, new.stop

    def nearest(self, vectors: Tensor) -> Tensor:
        """Return the indices of the nearest centers, on the host: uint8 (vectors,). Only the sender calls it, because
        distances may round differently on another machine."""
        centers = self._values[: self._ready].to(vectors.device)
        return torch.cdist(vectors, centers).argmin(1).to(torch.uint8).cpu()

    def look_up(self, indices: Tensor) -> Tensor:
        """Return the centers with these indices: fp32 (vectors, width).

        Raises:
            StoreError: there is no such center.
        """
        if indices.numel() and int(indices.max()) >= self._ready:
            raise StoreError(f"the message refers to center {int(indices.max())} of {self._ready}")
        return self._values[indices.long()]

    def update(self, indices: Tensor, arrived: Tensor) -> None:
        """Move the centers with these indices toward the decoded vectors, fp32 (vectors, width)."""
        index = indices.long()
        more = torch.bincount(index, minlength=self.num)
        sums = torch.zeros_like(self._values).index_add_(0, index, arrived)
        before = self._counts.clamp(max=self.window)
        after = (before + more).unsqueeze(1)
        moved = (self._values * before.unsqueeze(1) + sums) / after.clamp(min=1)
        # A vector that is not finite would make its center useless for ever.
        good = (more > 0) & torch.isfinite(moved).all(1)
        self._values = torch.where(good.unsqueeze(1), moved, self._values)
        self._counts += torch.where(good, more, 0)

    def checksum(self) -> int:
        """Return a 64-bit checksum of the centers and their counts."""
        state = self.state_dict().values()
        return kernels.derive_key(*(kernels.checksum(part.contiguous().view(-1).view(torch.uint8)) for part in state))

    def state_dict(self) -> dict[str, Tensor]:
        """Return tensors from which `load_state_dict` restores the centers."""
        return {
            "values": self._values.clone(),
            "counts": self._counts.clone(),
            "ready": torch.tensor([self._ready], dtype=torch.int64, device="cpu"),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the centers from a `state_dict`.

        Raises:
            StoreError: the state is not one of as many centers of that width.
        """
        for name, own in self.state_dict().items():
            found = state.get(name)
            if not isinstance(found, Tensor) or found.dtype != own.dtype or found.shape != own.shape:
                what = f"{found.dtype} of shape {tuple(found.shape)}" if isinstance(found, Tensor) else "no tensor"
                raise StoreError(f"{name} in the state of cluster centers is {what}, expected {tuple(own.shape)}")
        values, counts, ready = state["values"], state["counts"], state["ready"]
        if not 0 <= int(ready) <= self.num or bool((counts < 0).any()) or not bool(torch.isfinite(values).all()):
            raise StoreError(
                f"the state has {int(ready)} of {self.num} centers, a negative count or a value that is not finite"
            )
        self._values, self._counts, self._ready = values.clone(), counts.clone(), int(ready)


class CenterStore(Store):
    """Keeps cluster centers of the vectors of activations, which stand for the messages of all samples (AQ-SGD,
    appendix G).

    A vector is one position of a sample. It is sent as the index of its nearest center c, one byte, and as its
    difference from that, ``Q(a − c)``. Both sides then move c toward the decoded vector, in the same way. Centers
    move between steps only: within one, micro-batches may be in any order. Until all centers exist, samples are sent
    whole, and vectors spread over each micro-batch become centers: neighbors in a text are alike.

    Args:
        form: format of a sample's activation; each of its parts has centers of its own.
        num: centers of each part, 1 to 256.
        window: about how many of the last vectors a center is the mean of.
    """

    chooses: ClassVar[bool] = True

    def __init__(self, form: RecordFormat, num: int, window: int = 1024) -> None:
        super().__init__(form)
        self._tables = [CenterTable(num, part.width, window) for part in form.parts]
        self._of_step = deepcopy(self._tables)
        """Centers at the beginning of the step."""
        self._written = self._saved = 0

    def __len__(self) -> int:
        """Return 0: no sample is kept by itself."""
        return 0

    def visits(self, sample: int) -> int:
        return int(not any(table.missing for table in self._tables))

    def view(self, sample: int, *, compare: bool) -> int | None:
        if not self._saved:
            return None
        # In a step that was given up, one side may have saved more than the other: the number of samples shows it.
        return self.digest() if compare else kernels.derive_key(self._written, self._saved)

    def admit(self, samples: Sequence[int]) -> None:
        self._of_step = deepcopy(self._tables)

    def choose(self, values: Tensor, rows: Rows) -> Tensor:
        columns = self._columns(values, rows)
        chosen = [table.nearest(column) for table, column in zip(self._of_step, columns, strict=True)]
        return torch.cat([own.view(len(rows.samples), -1) for own in chosen], dim=1)

    def load(self, rows: Rows, choices: Tensor | None = None) -> Tensor:
        assert choices is not None, "the sender chooses"
        widths = [part.vectors(rows.padded) for part in self.form.parts]
        valid = rows.vectors(self.form.parts)
        vectors_of_parts = []
        for table, own, some in zip(self._of_step, *(x.split(widths, dim=1) for x in (choices, valid)), strict=True):
            vectors = table.look_up(own.reshape(-1)) * some.reshape(-1, 1)
            vectors_of_parts.append(vectors.view(len(rows.samples), -1))
        return torch.cat(vectors_of_parts, dim=1).view(-1)

    def save(self, records: Tensor, rows: Rows, step: int, choices: Tensor | None = None) -> None:
        columns = self._columns(self.form.decode(records, rows.lengths, rows), rows)
        widths = [part.vectors(rows.padded) for part in self.form.parts]
        valid = rows.vectors(self.form.parts).split(widths, dim=1)
        chosen = [None] * len(widths) if choices is None else choices.split(widths, dim=1)
        for table, vectors, some, own in zip(self._tables, columns, valid, chosen, strict=True):
            arrived = vectors[some.reshape(-1)]
            if own is not None:
                table.update(own[some], arrived)
            elif len(arrived):
                count = min(table.missing, len(arrived))
                table.begin(
                    arrived[torch.arange(count, dtype=torch.int64, device="cpu") * len(arrived) // max(count, 1)]
                )
        self._written, self._saved = step + 1, self._saved + len(rows.samples)

    def forget(self, sample: int) -> None:
        """Do nothing: no record belongs to a sample alone."""

    def reset(self, samples: Iterable[int]) -> None:
        if any(True for _ in samples):
            self.clear()

    def clear(self) -> None:
        self._tables = [CenterTable(table.num, table.width, table.window) for table in self._tables]
        self._written = self._saved = 0

    def digest(self) -> int:
        return kernels.derive_key(self._written, self._saved, *(table.checksum() for table in self._tables))

    @property
    def num_bytes(self) -> int:
        return sum(center_bytes(table.num, (table.width,)) for table in self._tables)

    def state_dict(self) -> dict[str, Tensor]:
        state = {"written": torch.tensor([self._written, self._saved], dtype=torch.int64, device="cpu")}
        for index, table in enumerate(self._tables):
            state |= {f"{name}{index}": value for name, value in table.state_dict().items()}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        written = state.get("written")
        if not (isinstance(written, Tensor) and written.dtype == torch.int64 and tuple(written.shape) == (2,)):
            raise StoreError("this is not the state of cluster centers")
        if bool((written < 0).any()):
            raise StoreError(f"the state is of step {written.tolist()}, which cannot be")
        loaded = deepcopy(self._tables)
        for index, table in enumerate(loaded):
            names = ("values", "counts", "ready")
            table.load_state_dict({name: state[f"{name}{index}"] for name in names if f"{name}{index}" in state})
        self._tables = loaded
        self._written, self._saved = written.tolist()

    def _columns(self, values: Tensor, rows: Rows) -> list[Tensor]:
        """Return the vectors of each part: (samples × vectors of each, width)."""
        table = values.view(len(rows.samples), -1)
        columns = table.split([part.at(rows.padded) for part in self.form.parts], dim=1)
        return [own.reshape(-1, part.width) for own, part in zip(columns, self.form.parts, strict=True)]


def center_bytes(num: int, shape: Sequence[int]) -> int:
    """Return the bytes of ``num`` cluster centers on one side of a stage boundary, at a step's begin and moving.

    ``shape`` is that of one sample's activation without the batch, such as (length, hidden): a vector has its last
    dimensions, all but the first.
    """
    width = torch.Size(shape if len(shape) < 2 else shape[1:]).numel()
    return 2 * num * (4 * width + 8)
