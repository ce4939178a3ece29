"""Messages of images that are seen cropped: each visit reads and renews the part of a message that it sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isqrt

import torch
from torch import Tensor

from thinwire.store.memory import Evict, MemoryStore
from thinwire.store.store import Part, RecordFormat, Rows

Corner = tuple[int, int]
"""Pixels from the upper left corner of a padded image to that of a crop: down, and to the right."""


@dataclass(frozen=True)
class Frame:
    """One activation tensor's part in the message of a whole image: channels, and a square of positions.

    A crop of ``size`` pixels a side begins at most ``2 × padding`` pixels from the corner of the padded image. An
    activation of s positions a side has ``size / s`` pixels to a position; its frame has ``2 × padding`` pixels more,
    in as many positions as are nearest.
    """

    channels: int
    side: int
    """Number of positions of an activation's side."""
    size: int
    padding: int

    @property
    def whole_side(self) -> int:
        """Number of positions of the frame's side."""
        return self.side + self._positions(2 * self.padding)

    def part(self) -> Part:
        """Return the frame's part in a record."""
        return Part(1, self.channels * self.whole_side**2, False)

    def window(self, corner: Corner) -> tuple[slice, slice, slice]:
        """Return the place of a crop's activation in its frame."""
        down, right = (self._positions(pixels) for pixels in corner)
        return slice(None), slice(down, down + self.side), slice(right, right + self.side)

    def _positions(self, pixels: int) -> int:
        return (2 * pixels * self.side + self.size) // (2 * self.size)  # rounded to the nearest, in integers

    @staticmethod
    def from_part(part: Part, size: int, padding: int) -> Frame:
        """Return the frame of an activation (samples, channels, positions, positions).

        Raises:
            ValueError: the activation is not that of a square image of ``size`` pixels.
        """
        side = isqrt(part.width)
        if not part.grows or side * side != part.width or side > size:
            raise ValueError(
                f"an activation of {part.positions} times {part.width} elements is not one of square images of {size} "
                "pixels a side: with thinwire.store.Crops what crosses a boundary is (batch, channels, height, width)"
            )
        return Frame(part.positions, side, size, padding)


class CroppedStore(MemoryStore):
    """Keeps messages of whole images in memory, of which each visit sees a crop (AQ-SGD, H.6): changes are taken from
    the same crop of the message, and no other part of it is renewed. Unseen positions are zero.

    Args:
        form: format of an activation, (samples, channels, positions, positions).
        size: pixels of a crop's side.
        padding: pixels by which images are padded on each side.
        capacity: returns how many images of a format there is room for.
        evict: see `RecordStore`.

    Raises:
        ValueError: see `Frame.from_part`.
    """

    def __init__(
        self,
        form: RecordFormat,
        size: int,
        padding: int,
        capacity: Callable[[RecordFormat], int | None],
        evict: Evict | None,
    ) -> None:
        self._frames = tuple(Frame.from_part(part, size, padding) for part in form.parts)
        whole = replace(form, parts=tuple(frame.part() for frame in self._frames))
        super().__init__(form, capacity(whole), evict)
        self.kept = whole
        self._padding = padding

    def check_corners(self, corners: Sequence[Corner] | None) -> None:
        if corners is None:
            raise ValueError("no corners: set_sample_ids(ids, corners=...) takes where each image was cropped")
        for corner in corners:
            if max(corner) > 2 * self._padding:
                raise ValueError(
                    f"a crop begins at {corner}, and images are padded by {self._padding} pixels on each side"
                )

    def load(self, rows: Rows, choices: Tensor | None = None) -> Tensor:
        cut = [
            torch.stack([own[frame.window(corner)] for own, corner in zip(of_frame, rows.corners, strict=True)])
            for of_frame, frame in zip(self._load_whole(rows.samples), self._frames, strict=True)
        ]
        return torch.cat([own.view(len(rows.samples), -1) for own in cut], dim=1).view(-1)

    def save(self, records: Tensor, rows: Rows, step: int, choices: Tensor | None = None) -> None:
        if not rows.samples:
            return
        frames = self._load_whole(rows.samples)
        seen = self.form.decode(records, rows.lengths, rows).view(len(rows.samples), -1)
        widths = [frame.channels * frame.side**2 for frame in self._frames]
        for of_frame, frame, values in zip(frames, self._frames, seen.split(widths, dim=1), strict=True):
            for whole, corner, own in zip(of_frame, rows.corners, values, strict=True):
                whole[frame.window(corner)] = own.view(frame.channels, frame.side, frame.side)
        whole_rows = Rows.uniform(rows.samples, 0)
        flat = torch.cat([of_frame.reshape(len(rows.samples), -1) for of_frame in frames], dim=1).view(-1)
        super().save(self.kept.encode(flat, whole_rows), whole_rows, step)

    def _load_whole(self, samples: Sequence[int]) -> list[Tensor]:
        """Return the frames of these samples, (samples, channels, positions, positions); zero where none is kept."""
        whole = torch.zeros(len(samples), self.kept.numel(0), dtype=torch.float32, device="cpu")
        known = [i for i, sample in enumerate(samples) if sample in self]
        if known:
            whole[known] = super().load(Rows.uniform((samples[i] for i in known), 0)).view(len(known), -1)
        widths = [frame.part().at(0) for frame in self._frames]
        shapes = [(len(samples), frame.channels, frame.whole_side, frame.whole_side) for frame in self._frames]
        return [own.reshape(shape) for own, shape in zip(whole.split(widths, dim=1), shapes, strict=True)]
