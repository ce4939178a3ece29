"""Cluster centres: the same on both sides, near what has come, and no larger for more samples."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.papers.fullstack.centres import Centres
from thinwire.store import StoreError


def vectors(count: int, width: int = 4, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def test_the_first_vectors_become_centres_and_are_their_own_nearest() -> None:
    centres, first = Centres(8, 4), vectors(8)
    centres.begin(first[:5])
    assert centres.missing == 3
    centres.begin(first[5:])
    names = centres.nearest(first)
    assert names.tolist() == list(range(8))
    assert torch.equal(centres.look_up(names), first)
    with pytest.raises(ValueError, match="more than the 0 centres"):
        centres.begin(first[:1])


def test_a_centre_is_the_mean_of_what_came_to_it() -> None:
    centres = Centres(2, 1)
    centres.begin(torch.tensor([[0.0], [10.0]]))
    centres.update(torch.tensor([0, 0, 1], dtype=torch.uint8), torch.tensor([[1.0], [2.0], [20.0]]))
    torch.testing.assert_close(centres.look_up(torch.tensor([0, 1])), torch.tensor([[1.0], [15.0]]))


def test_a_centre_follows_a_drift_within_its_window() -> None:
    slow, quick = Centres(1, 1, window=10**6), Centres(1, 1, window=4)
    name = torch.zeros(1, dtype=torch.uint8)
    for centres in (slow, quick):
        centres.begin(torch.zeros(1, 1))
        for value in [0.0] * 50 + [1.0] * 10:
            centres.update(name, torch.full((1, 1), value))
    assert float(quick.look_up(name)) > 0.8 > 0.3 > float(slow.look_up(name))


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 16), st.integers(1, 5), st.integers(0, 1000))
def test_sides_that_are_given_the_same_keep_the_same(num: int, width: int, seed: int) -> None:
    ours, theirs = Centres(num, width), Centres(num, width)
    for side in (ours, theirs):
        side.begin(vectors(num, width, seed))
    for step in range(4):
        batch = vectors(9, width, seed + step)
        names = ours.nearest(batch)
        arrived = ours.look_up(names) + 0.9 * (batch - ours.look_up(names))
        for side in (ours, theirs):
            side.update(names, arrived)
    mine, other = ours.state_dict(), theirs.state_dict()
    assert all(torch.equal(mine[name], other[name]) for name in mine)
    assert ours.num_bytes == 4 * num * width


def test_what_is_not_finite_moves_no_centre() -> None:
    centres = Centres(2, 2)
    centres.begin(vectors(2, 2))
    before = centres.look_up(torch.tensor([0, 1])).clone()
    arrived = torch.tensor([[float("nan"), 0.0], [float("inf"), 1.0]])
    centres.update(torch.tensor([0, 1], dtype=torch.uint8), arrived)
    assert torch.equal(centres.look_up(torch.tensor([0, 1])), before)


def test_a_state_brings_them_back_and_is_checked() -> None:
    centres = Centres(4, 3)
    centres.begin(vectors(3, 3))
    state = centres.state_dict()
    again = Centres(4, 3)
    again.load_state_dict(state)
    assert again.missing == 1
    assert torch.equal(again.nearest(vectors(9, 3, 1)), centres.nearest(vectors(9, 3, 1)))
    for wrong in ({}, {**state, "ready": torch.tensor(5)}, {**state, "counts": -state["counts"]}):
        with pytest.raises(StoreError):
            again.load_state_dict(wrong)
    with pytest.raises(StoreError, match="expected"):
        Centres(4, 2).load_state_dict(state)


def test_names_and_shapes_are_checked() -> None:
    centres = Centres(4, 3)
    centres.begin(vectors(2, 3))
    with pytest.raises(StoreError, match="centre 3 of 2"):
        centres.look_up(torch.tensor([3], dtype=torch.uint8))
    with pytest.raises(ValueError, match="vectors are fp32"):
        centres.nearest(torch.zeros(2, 4))
    for num, width, window in ((0, 1, 1), (257, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(ValueError, match="must be"):
            Centres(num, width, window)
