"""The further rows of the kernel benchmark run, each under a name of its own."""

from __future__ import annotations

import torch

from thinwire.bench.kernels_more import cases


def test_every_row_runs() -> None:
    x, y = [torch.randn(10_000) for _ in range(2)], [torch.zeros(10_000) for _ in range(2)]
    rows = cases(x, y)
    assert len({name for name, _ in rows}) == len(rows) > 15
    for _, run in rows:
        run(0)
        run(1)
