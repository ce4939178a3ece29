"""Formats of limited range under FSDP2: the loss scale changes nothing that arrives, and layers may come late."""

from __future__ import annotations

import torch
from torch import Tensor

from harness import on_ranks
from sharded import Net, batch, build, compress


class Fading(Net):
    """The weight of its last block is ``share``, of which 0 leaves it gradients of zeros; None leaves it out."""

    share: float | None = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.stem(x))
        if self.share is not None:
            x = x + self.share * (self.blocks[1](x) - x)
        return self.head(x)


SCALE = 1024.0
Arrived = dict[str, Tensor]
"""Gradients of the last block in a step, without the loss scale."""


def _error(arrived: Arrived, exact: Arrived) -> float:
    a, b = (torch.cat([found[name].flatten() for name in exact]) for found in (arrived, exact))
    return float((a - b).norm() / b.norm())


def _arrived(rank: int, gradients: str, share: float | None) -> list[Arrived]:
    """What arrives in the two steps behind the first, in which the last block has this share."""
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    model = build(net=Fading)
    wire = compress(model, gradients=gradients, grad_scaler=scaler)
    found = []
    for step in range(3):
        model.share = 1.0 if step else share
        x, y = batch(step, rank, 64)
        scaler.scale((model(x) - y).square().mean()).backward()
        if step:
            found.append({name: p.grad.full_tensor() / SCALE for name, p in model.blocks[1].named_parameters()})
        model.zero_grad()
    wire.detach()
    return found


CASES: dict[str, tuple[float | None, tuple[int, ...]]] = {
    "there": (1.0, ()),
    "left out": (None, (0, 1)),
    "zero": (0.0, (0, 1)),
    "zero on one rank": (0.0, (0,)),
}
"""The share of the last block in the first step, and the ranks of which it is that share."""


@on_ranks(2)
def test_a_layer_that_comes_late_arrives_as_well_as_one_that_was_there(rank: int) -> None:
    for spec in ("rangefloat(bits=8)", "ef(rangefloat(bits=8))"):
        there: list[float] = []
        for case, (share, ranks) in CASES.items():
            share = share if rank in ranks else 1.0
            exact, arrived = (_arrived(rank, gradients, share) for gradients in ("raw", spec))
            late = [_error(a, b) for a, b in zip(arrived, exact, strict=True)]
            there = there or late
            assert max(there) < 0.1, spec
            close = all(b <= 1.2 * a + 0.02 for a, b in zip(there, late, strict=True))
            assert close, f"{spec}, {case}: {late}, not {there}"
