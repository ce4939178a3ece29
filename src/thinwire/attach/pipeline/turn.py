"""What the ranks of a pipeline know of a step before its first micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from thinwire.attach.pipeline.crossing import chunk_sizes
from thinwire.store import LARGEST_SAMPLE, Rows

Ids = Sequence[int] | Tensor
"""Integers, one a sample."""


@dataclass(frozen=True)
class Batch:
    """The samples of a step, as the training loop gives them."""

    samples: tuple[int, ...]
    length: int | None = None
    lengths: tuple[int, ...] | None = None
    upcoming: tuple[int, ...] = ()

    @staticmethod
    def of(samples: Ids, length: int | None, lengths: Ids | None, upcoming: Ids) -> Batch:
        """Checked.

        Raises:
            TypeError: an id is not an integer.
            ValueError: no samples, an id twice, a negative one, or lengths that cannot be.
        """
        ids = _integers("sample ids", samples)
        if not ids:
            raise ValueError("a step needs at least one sample id")
        if len(set(ids)) != len(ids):
            twice = next(sample for i, sample in enumerate(ids) if sample in ids[:i])
            raise ValueError(f"sample {twice} is in the batch twice: each sample has one message, so once in a step")
        its_lengths = None if lengths is None else _integers("lengths", lengths)
        if its_lengths is not None and len(its_lengths) != len(ids):
            raise ValueError(f"{len(its_lengths)} lengths are given for {len(ids)} samples")
        if its_lengths is not None and length is not None and max(its_lengths) > length:
            raise ValueError(f"a sample has {max(its_lengths)} positions, in a batch padded to {length}")
        if length is not None and length < 1:
            raise ValueError(f"length must be at least 1, not {length}")
        return Batch(ids, length, its_lengths, _integers("upcoming ids", upcoming))


def _integers(what: str, values: Ids) -> tuple[int, ...]:
    listed = values.tolist() if isinstance(values, Tensor) else list(values)
    for value in listed:
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{what} must be integers, not {value!r}")
        if not 0 <= value < LARGEST_SAMPLE:
            raise ValueError(f"{what} must be between 0 and 2^62, not {value}")
    return tuple(listed)


@dataclass(frozen=True)
class Turn:
    """One run of the schedule. The same on every rank."""

    number: int
    """Counts them all, evaluations included."""
    step: int
    """Counts those that train."""
    training: bool
    run: int
    """Names the training from its first step through all its restarts."""
    batch: Batch | None = None
    """None where stages have the shapes that they were set up with, and samples no names."""

    def rows(self, chunk: int, num_chunks: int, count: int, length: int) -> Rows:
        """The samples of a micro-batch; ``count`` and ``length`` are those that the pipeline was set up with."""
        if self.batch is None:
            return Rows.of(range(chunk * count, (chunk + 1) * count), length)
        sizes = chunk_sizes(len(self.batch.samples), num_chunks)
        here = slice(sum(sizes[:chunk]), sum(sizes[: chunk + 1]))
        padded = length if self.batch.length is None or not length else self.batch.length
        lengths = (padded,) * sizes[chunk] if self.batch.lengths is None else self.batch.lengths[here]
        return Rows(self.batch.samples[here], tuple(min(own, padded) for own in lengths), padded)
