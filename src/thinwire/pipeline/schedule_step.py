"""The facts that all ranks of a pipeline share of a step before its first micro-batch: its number and its batch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from thinwire.arguments import check_int, check_type
from thinwire.pipeline.message import chunk_sizes
from thinwire.store import LARGEST_SAMPLE, Corner, Rows

Ids = Sequence[int] | Tensor
"""Integers, one for each sample."""
Corners = Sequence[Sequence[int]] | Tensor
"""Integers, two for each sample: shape (samples, 2)."""
_MOST_TEXT = 1024
"""Largest number of characters of an error that other ranks are told."""


@dataclass(frozen=True)
class Batch:
    """The samples of a step, as the training loop gives them."""

    samples: tuple[int, ...]
    length: int | None = None
    lengths: tuple[int, ...] | None = None
    upcoming: tuple[int, ...] = ()
    corners: tuple[Corner, ...] | None = None

    @staticmethod
    def from_ids(
        samples: Ids, length: int | None, lengths: Ids | None, upcoming: Ids, corners: Corners | None = None
    ) -> Batch:
        """Return the batch, after its ids and lengths are checked.

        Raises:
            TypeError: An id is not an integer.
            ValueError: There are no samples, an id occurs twice or is negative, or a length is impossible.
        """
        ids = _integers("sample ids", samples)
        if not ids:
            raise ValueError("a step needs at least one sample id")
        if len(set(ids)) != len(ids):
            twice = next(sample for i, sample in enumerate(ids) if sample in ids[:i])
            raise ValueError(
                f"sample {twice} is in the batch twice, and one message is kept of each: give every sample of a batch "
                "an id of its own, as thinwire.data.Indexed does, and draw samples without replacement"
            )
        listed_lengths = None if lengths is None else _integers("lengths", lengths)
        if listed_lengths is not None and len(listed_lengths) != len(ids):
            raise ValueError(f"{len(listed_lengths)} lengths are given for {len(ids)} samples")
        if listed_lengths is not None and length is not None and max(listed_lengths) > length:
            raise ValueError(f"a sample has {max(listed_lengths)} positions, in a batch padded to {length}")
        if length is not None:
            check_int("length", length, 1)
        return Batch(ids, length, listed_lengths, _integers("upcoming ids", upcoming), _corners(corners, len(ids)))


def _corners(corners: Corners | None, count: int) -> tuple[Corner, ...] | None:
    if corners is None:
        return None
    pairs = corners.tolist() if isinstance(corners, Tensor) else [list(pair) for pair in corners]
    if len(pairs) != count or any(not isinstance(pair, list) or len(pair) != 2 for pair in pairs):
        raise ValueError(f"corners are {count} pairs of pixels, down and to the right, one for each sample")
    flat = _integers("corners", [pixels for pair in pairs for pixels in pair])
    return tuple(zip(flat[::2], flat[1::2], strict=True))


def _integers(what: str, values: Ids) -> tuple[int, ...]:
    listed = values.tolist() if isinstance(values, Tensor) else list(values)
    for value in listed:
        check_int(what, value, 0, LARGEST_SAMPLE - 1)
    return tuple(listed)


@dataclass(frozen=True)
class ScheduleStep:
    """One run of the schedule, a training step or an evaluation, the same on every rank."""

    number: int
    """Number of the run, evaluations included."""
    training_step: int
    """Number of the training step."""
    training: bool
    run: int
    """Number that identifies the training through all its restarts."""
    batch: Batch | None = None
    """Samples of the step; None where stages have the shapes that they were set up with and samples have no ids."""
    error: str = ""
    """Reason why the first stage's rank cannot take the step, if it cannot."""

    def to_json(self) -> bytes:
        """Return the announcement of the step, which `from_json` reads."""
        batch = None if self.batch is None else vars(self.batch)
        told = {**vars(self), "batch": batch, "error": self.error[:_MOST_TEXT]}
        return json.dumps(told, separators=(",", ":")).encode()

    @staticmethod
    def from_json(data: bytes) -> ScheduleStep:
        """Return the step that another rank has announced. Everything in it is checked.

        Raises:
            ValueError: The data is no such step.
        """
        try:
            told = json.loads(data)
            batch = told.pop("batch")
            step = ScheduleStep(**told, batch=None if batch is None else Batch.from_ids(**batch))
            for name in ("number", "training_step", "run"):
                check_int(name, getattr(step, name), 0, LARGEST_SAMPLE)
            check_type("training", step.training, bool, "true or false")
            check_type("error", step.error, str, "a text")
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            text = f"{type(error).__name__}: {error}"[:_MOST_TEXT]
            raise ValueError(f"the first stage's rank announced a step that cannot be: {text}") from None
        return step

    def rows(self, chunk: int, num_chunks: int, count: int, length: int) -> Rows:
        """Return the samples of micro-batch ``chunk``; ``count`` and ``length`` are those that the pipeline was set up
        with."""
        if self.batch is None:
            return Rows.uniform(range(chunk * count, (chunk + 1) * count), length)
        sizes = chunk_sizes(len(self.batch.samples), num_chunks)
        here = slice(sum(sizes[:chunk]), sum(sizes[: chunk + 1]))
        padded = length if self.batch.length is None or not length else self.batch.length
        lengths = (padded,) * sizes[chunk] if self.batch.lengths is None else self.batch.lengths[here]
        corners = () if self.batch.corners is None else self.batch.corners[here]
        return Rows(self.batch.samples[here], tuple(min(own, padded) for own in lengths), padded, corners)
