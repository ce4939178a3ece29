"""Formats of limited range under FSDP2: the loss scale changes nothing that arrives, and layers may come late."""

from __future__ import annotations

import torch
from torch import Tensor

from harness import run_ranks
from sharded import Net, batch, build, compress

SPECS = ["rangefloat(bits=10)", "rangefloat(bits=10, range=1.0)", "natural", "minmax(bits=8)", "fft(theta=0.5)"]
LATE = "blocks.1."


class Fading(Net):
    """The weight of its last block is ``share``, of which 0 leaves it gradients of zeros; None leaves it out."""

    share: float | None = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.stem(x))
        if self.share is not None:
            x = x + self.share * (self.blocks[1](x) - x)
        return self.head(x)


def _gradients(model: Fading, rank: int, step: int, scaler: torch.amp.GradScaler) -> dict[str, Tensor]:
    """What has arrived in a step, without the loss scale."""
    x, y = batch(step, rank, 64)
    scaler.scale((model(x) - y).square().mean()).backward()
    found = {
        name: p.grad.full_tensor() / scaler.get_scale() for name, p in model.named_parameters() if p.grad is not None
    }
    model.zero_grad()
    return found


def _error(arrived: dict[str, Tensor], exact: dict[str, Tensor], of: str = "") -> float:
    names = [name for name in exact if name.startswith(of)]
    a, b = (torch.cat([found[name].flatten() for name in names]) for found in (arrived, exact))
    return float((a - b).norm() / b.norm())


def _arrived(rank: int, gradients: str, scale: float) -> list[dict[str, Tensor]]:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    model = build(net=Fading)
    wire = compress(model, gradients=gradients, grad_scaler=scaler)
    found = [_gradients(model, rank, step, scaler) for step in range(2)]
    wire.detach()
    return found


def _scaled(rank: int, specs: list[str]) -> dict[str, tuple[list[float], list[float]]]:
    """By compressor: errors of two steps, and what a loss scale changes in them."""
    found, exact = {}, _arrived(rank, "raw", 1.0)
    for spec in specs:
        plain, scaled = _arrived(rank, spec, 1.0), _arrived(rank, spec, 2.0**16)
        found[spec] = list(map(_error, plain, exact)), list(map(_error, scaled, plain))
    return found


def test_the_loss_scale_changes_nothing_that_arrives() -> None:
    for found in run_ranks(_scaled, 2, SPECS):
        for spec, (errors, changes) in found.items():
            assert max(errors) < (0.6 if "fft" in spec else 0.3), spec
            assert max(changes) < 1e-3, spec


LATE_SPECS = ("rangefloat(bits=8)", "ef(rangefloat(bits=8))")
CASES: dict[str, tuple[float | None, tuple[int, ...]]] = {
    "there": (1.0, ()),
    "left out": (None, (0, 1)),
    "zero": (0.0, (0, 1)),
    "zero on one rank": (0.0, (0,)),
}
"""The share of the last block in the first step, and the ranks of which it is that share."""


def _late(rank: int) -> dict[str, dict[str, list[float]]]:
    """Errors of the last block in two steps after the first one, by compressor and case."""
    found: dict[str, dict[str, list[float]]] = {spec: {} for spec in LATE_SPECS}
    for case, (share, ranks) in CASES.items():
        exact, *arrived = (
            _later(rank, gradients, share if rank in ranks else 1.0) for gradients in ("raw", *LATE_SPECS)
        )
        for spec, steps in zip(LATE_SPECS, arrived, strict=True):
            found[spec][case] = [_error(a, b, LATE) for a, b in zip(steps, exact, strict=True)]
    return found


def _later(rank: int, gradients: str, share: float | None) -> list[dict[str, Tensor]]:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model = build(net=Fading)
    wire = compress(model, gradients=gradients, grad_scaler=scaler)
    model.share = share
    _gradients(model, rank, 0, scaler)
    model.share = 1.0
    steps = [_gradients(model, rank, step, scaler) for step in (1, 2)]
    wire.detach()
    return steps


def test_a_layer_that_comes_late_arrives_as_well_as_one_that_was_there() -> None:
    for found in run_ranks(_late, 2):
        for spec, errors in found.items():
            there = errors.pop("there")
            assert max(there) < 0.1, spec
            for case, late in errors.items():
                close = all(b <= 1.2 * a + 0.02 for a, b in zip(there, late, strict=True))
                assert close, f"{spec}, {case}: {late}, not {there}"
