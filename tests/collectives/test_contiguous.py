"""Tensors of any strides in a collective: what it reads and writes is in one piece, and lands where it belongs."""

from __future__ import annotations

import torch

from thinwire.collectives import contiguous_values, overwrite


def test_what_is_written_to_the_piece_is_written_to_the_tensor() -> None:
    whole = torch.arange(24.0).view(4, 6)
    for tensor in (whole.clone(), whole.clone().t(), whole.clone()[:, 1:3], torch.complex(whole, -whole).t()):
        before = tensor.clone()
        with contiguous_values(tensor) as values:
            assert values.is_contiguous()
            assert torch.equal(values, torch.view_as_real(before) if before.is_complex() else before)
            values.mul_(2)
        assert torch.equal(tensor, 2 * before)


def test_an_expanded_tensor_is_overwritten_by_what_each_element_is_first() -> None:
    row = torch.arange(3.0)
    with contiguous_values(row.expand(2, 5, 3)) as values:
        assert values.shape == (2, 5, 3)
        values.add_(1.0)
    assert torch.equal(row, torch.tensor([1.0, 2.0, 3.0]))
    overwrite(row.view(3, 1).expand(3, 0), torch.empty(3, 0))
    overwrite(row[0].expand(4), torch.full((4,), 7.0))
    assert torch.equal(row, torch.tensor([7.0, 2.0, 3.0]))
