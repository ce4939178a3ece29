"""Cluster centers: the same on both sides, near what has come, and no larger for more samples."""

from __future__ import annotations

import pytest
import torch

from thinwire.store import CenterStore, CenterTable, Part, RecordFormat, Rows, StoreError, center_bytes


def vectors(count: int, width: int = 4, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def test_the_first_vectors_become_centers_and_are_their_own_nearest() -> None:
    centers, first = CenterTable(8, 4), vectors(8)
    centers.begin(first[:5])
    assert centers.missing == 3
    centers.begin(first[5:])
    names = centers.nearest(first)
    assert names.tolist() == list(range(8))
    assert torch.equal(centers.look_up(names), first)


def test_a_center_is_the_mean_of_what_came_to_it() -> None:
    centers = CenterTable(2, 1)
    centers.begin(torch.tensor([[0.0], [10.0]]))
    centers.update(torch.tensor([0, 0, 1], dtype=torch.uint8), torch.tensor([[1.0], [2.0], [20.0]]))
    torch.testing.assert_close(centers.look_up(torch.tensor([0, 1])), torch.tensor([[1.0], [15.0]]))


def test_a_center_follows_a_drift_within_its_window() -> None:
    slow, quick = CenterTable(1, 1, window=10**6), CenterTable(1, 1, window=4)
    name = torch.zeros(1, dtype=torch.uint8)
    for centers in (slow, quick):
        centers.begin(torch.zeros(1, 1))
        for value in [0.0] * 50 + [1.0] * 10:
            centers.update(name, torch.full((1, 1), value))
    assert float(quick.look_up(name)) > 0.8 > 0.3 > float(slow.look_up(name))


def test_what_is_not_finite_moves_no_center() -> None:
    centers = CenterTable(2, 2)
    centers.begin(vectors(2, 2))
    before = centers.look_up(torch.tensor([0, 1])).clone()
    arrived = torch.tensor([[torch.nan, 0.0], [torch.inf, 1.0]])
    centers.update(torch.tensor([0, 1], dtype=torch.uint8), arrived)
    assert torch.equal(centers.look_up(torch.tensor([0, 1])), before)


def test_names_shapes_and_states_are_checked() -> None:
    centers, again = CenterTable(4, 3), CenterTable(4, 3)
    centers.begin(vectors(3, 3))
    with pytest.raises(StoreError, match="center 3 of 3"):
        centers.look_up(torch.tensor([3], dtype=torch.uint8))
    state = centers.state_dict()
    again.load_state_dict(state)
    assert again.missing == 1
    assert torch.equal(again.nearest(vectors(9, 3, 1)), centers.nearest(vectors(9, 3, 1)))
    for wrong in ({}, {**state, "ready": torch.tensor(5)}, {**state, "counts": -state["counts"]}):
        with pytest.raises(StoreError):
            again.load_state_dict(wrong)
    with pytest.raises(StoreError, match="expected"):
        CenterTable(4, 2).load_state_dict(state)


FORM = RecordFormat((Part(5, 4, True), Part(1, 3, False)))


def visit(sender: CenterStore, receiver: CenterStore, rows: Rows, step: int) -> torch.Tensor:
    """One micro-batch whose changes arrive as they are: its values. Both stores get what the receiver has."""
    draws = torch.Generator().manual_seed(step)
    values = torch.randn(len(rows.samples), FORM.numel(rows.padded), generator=draws)
    values.view(len(rows.samples), -1)[:, : 4 * rows.padded].view(-1, rows.padded, 4)[~rows.vectors(FORM.parts[:1])] = 0
    choices = sender.choose(values.view(-1), rows) if sender.visits(0) else None
    for store in (sender, receiver):
        store.save(FORM.encode(values.clone().view(-1), rows), rows, step, choices)
    return values.view(-1)


def test_both_sides_have_the_same_centers_which_move_between_steps_only() -> None:
    sender, receiver = CenterStore(FORM, 4), CenterStore(FORM, 4)
    for step in range(6):
        rows = Rows((step, 100 + step), (5, 2), 5)
        for store in (sender, receiver):
            store.admit(rows.samples)
            assert not store.refused
        known = sender.visits(step)
        views = [store.view(step, compare=True) for store in (sender, receiver)]
        assert views[0] == views[1]
        assert (views[0] is None) == (step == 0)
        values = visit(sender, receiver, rows, step)
        if known:
            choices = sender.choose(values, rows)
            before = sender.load(rows, choices)
            visit(sender, receiver, rows, step + 50)
            assert torch.equal(sender.load(rows, choices), before), "a step takes all changes from the same centers"
            assert torch.equal(receiver.load(rows, choices), before)
            assert not before.view(2, -1)[1, 8:20].any(), "there is nothing behind a sample's length"
    assert known
    assert sender.digest() == receiver.digest()
    assert sender.num_bytes == center_bytes(4, (5, 4)) + center_bytes(4, (3,))
    assert len(sender) == 0


def test_the_state_of_a_store_brings_it_back_and_is_checked() -> None:
    sender, receiver, again = (CenterStore(FORM, 2) for _ in range(3))
    for step in range(3):
        sender.admit([0])
        receiver.admit([0])
        visit(sender, receiver, Rows.uniform((1, 2), 5), step)
    state = sender.state_dict()
    again.load_state_dict(state)
    assert again.digest() == sender.digest()
    missing = {name: value for name, value in state.items() if name != "values1"}
    nan = {**state, "values0": torch.full_like(state["values0"], torch.nan)}
    for wrong in ({}, missing, nan, {**state, "written": torch.tensor([1, -1])}, {**state, "counts0": torch.zeros(2)}):
        with pytest.raises(StoreError):
            CenterStore(FORM, 2).load_state_dict(wrong)
    with pytest.raises(StoreError, match="expected"):
        CenterStore(FORM, 3).load_state_dict(state)
