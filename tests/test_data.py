"""Which sample is which, and what comes next."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from thinwire.data import Indexed, Share, with_upcoming


def test_items_come_with_their_ids_whatever_the_order() -> None:
    dataset = TensorDataset(torch.arange(10) * 10, torch.arange(10) * 100)
    loader = DataLoader(Indexed(dataset), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(0))
    seen = []
    for ids, (x, y) in loader:
        assert ids.dtype == torch.int64
        assert torch.equal(x, ids * 10)
        assert torch.equal(y, ids * 100)
        seen += ids.tolist()
    assert sorted(seen) == list(range(10))
    assert seen != sorted(seen)
    assert len(Indexed(dataset)) == 10


def test_each_batch_knows_the_one_after_it() -> None:
    loader = DataLoader(Indexed(TensorDataset(torch.arange(7))), batch_size=3)
    steps = list(with_upcoming(loader))
    assert [step.ids.tolist() for step in steps] == [[0, 1, 2], [3, 4, 5], [6]]
    assert [step.upcoming.tolist() for step in steps] == [[3, 4, 5], [6], []]
    assert [step.batch[0].tolist() for step in steps] == [[0, 1, 2], [3, 4, 5], [6]]
    assert list(with_upcoming([])) == []


@pytest.mark.parametrize(("samples", "replicas"), [(10, 1), (10, 3), (8, 8)])
def test_shares_stay_the_same_and_their_order_does_not(samples: int, replicas: int) -> None:
    shares = [Share(range(samples), replica, replicas, seed=3) for replica in range(replicas)]
    first = [list(share) for share in shares]
    assert sorted(sample for ids in first for sample in ids) == list(range(samples))
    assert max(map(len, first)) - min(map(len, first)) <= 1
    assert [len(share) for share in shares] == [len(ids) for ids in first]
    for share in shares:
        share.set_epoch(1)
    second = [list(share) for share in shares]
    assert [sorted(ids) for ids in second] == [sorted(ids) for ids in first]
    if samples > 3 * replicas:
        assert second != first
    shares[0].set_epoch(0)
    assert list(shares[0]) == first[0]
