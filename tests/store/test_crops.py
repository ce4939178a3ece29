"""Messages of images that are seen cropped: a visit reads and renews the part that its crop sees."""

from __future__ import annotations

import pytest
import torch

from thinwire.store import CroppedStore, Crops, Part, RecordFormat, Rows

SIZE, PADDING = 8, 2
FORM = RecordFormat((Part(3, 64, True), Part(3, 16, True)))
"""Of 8 positions a side, and of 4: two pixels to a position."""


def opened(form: RecordFormat = FORM, **options) -> CroppedStore:
    store = Crops(size=SIZE, padding=PADDING, **options).open(form, "side", run=1)
    assert isinstance(store, CroppedStore)
    return store


def rows(*corners: tuple[int, int]) -> Rows:
    return Rows(tuple(range(len(corners))), (3,) * len(corners), 3, corners)


def save(store: CroppedStore, values: torch.Tensor, at: Rows, step: int) -> None:
    store.save(store.form.encode(values.clone().view(-1), at), at, step)


def test_a_visit_finds_what_its_crop_shares_with_those_before_and_zero_elsewhere() -> None:
    store = opened()
    image = torch.randn(3, 12, 12, generator=torch.Generator().manual_seed(0))
    small = torch.randn(3, 6, 6, generator=torch.Generator().manual_seed(1))

    def seen(down: int, right: int) -> torch.Tensor:
        half_down, half_right = (down + 1) // 2, (right + 1) // 2
        parts = (
            image[:, down : down + 8, right : right + 8],
            small[:, half_down : half_down + 4, half_right : half_right + 4],
        )
        return torch.cat([part.reshape(-1) for part in parts])

    first, second = rows((0, 4)), rows((3, 1))
    save(store, seen(0, 4), first, 0)
    assert torch.equal(store.load(first), seen(0, 4))
    found = store.load(second)
    large, little = found[: 3 * 64].view(3, 8, 8), found[3 * 64 :].view(3, 4, 4)
    # The crop at (3, 1) shares rows 3 to 7 and columns 4 to 8 with that at (0, 4), and 2 to 3, 2 to 4 of the small one.
    assert torch.equal(large[:, :5, 3:], image[:, 3:8, 4:9])
    assert not large[:, 5:].any()
    assert not large[:, :, :3].any()
    assert torch.equal(little[:, :2, 1:], small[:, 2:4, 2:5])
    assert not little[:, 2:].any()
    save(store, seen(3, 1), second, 1)
    assert torch.equal(store.load(second), seen(3, 1))
    assert torch.equal(store.load(first), seen(0, 4)), "another visit has renewed its own part only"
    assert store.visits(0) == 2
    assert store.num_bytes == store.kept.record_bytes == 4 * (3 * 144 + 3 * 36 + 4)


def test_what_is_no_square_image_or_corner_is_refused() -> None:
    for part in (Part(3, 63, True), Part(1, 64, False), Part(3, 81, True)):
        with pytest.raises(ValueError, match="not one of square images of 8 pixels"):
            opened(RecordFormat((part,)))
    store = opened()
    store.check_corners([(0, 4), (4, 0)])
    with pytest.raises(ValueError, match="no corners"):
        store.check_corners(None)
    with pytest.raises(ValueError, match="padded by 2 pixels"):
        store.check_corners([(0, 5)])
