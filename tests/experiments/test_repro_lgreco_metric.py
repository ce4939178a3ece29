"""``python -m experiments lgreco``: what policies choose on given gradients, and the loss-based metric."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import thinwire
from experiments.papers.lgreco import methods
from experiments.papers.lgreco.gradients import Snapshot, choose
from experiments.papers.lgreco.methods import POWERSGD, TOPK
from experiments.papers.lgreco.metric import Checkpoint, Sensitivity, correlation as correlated, sensitivities
from thinwire.policies import LGreco, parse_policy

# --- gradients, and what policies make of them


def _snapshots() -> list[Snapshot]:
    generator = torch.Generator().manual_seed(0)

    def layer(*shape: int, scale: float) -> Tensor:
        return scale * torch.randn(*shape, generator=generator)

    # A large layer of which little matters, and small ones that are all alike.
    sparse = layer(512, 64, scale=1e-3)
    sparse[:8] += layer(8, 64, scale=1.0)
    gradients = {
        "large": sparse,
        "a": layer(64, 64, scale=0.1),
        "b": layer(64, 64, scale=0.1),
        "bias": layer(64, scale=1),
    }
    return [Snapshot(10, gradients, 1e-3), Snapshot(20, {**gradients, "a": 2 * gradients["a"]}, 5e-4)]


def test_a_choice_is_smaller_and_errs_no_more() -> None:
    found = choose(LGreco(), TOPK.spec("gpt"), _snapshots())
    assert [one.step for one in found] == [10, 20]
    for one in found:
        assert one.gain > 1.2
        assert one.relative_error <= 1 + 1e-9
        assert set(one.plan) == {"large", "a", "b", "bias"}


def test_what_a_policy_notes_is_there_at_its_next_choice() -> None:
    spec = POWERSGD.spec("gpt")
    policy = parse_policy(methods.accordion(4, spec, "powersgd(rank=2)"))
    first, second = _snapshots()
    strong, fallen, doubled = (
        choose(policy, spec, [first, then])[1]
        for then in (replace(first, step=20), replace(first, learning_rate=1e-4), second)
    )
    assert strong.gain > 2
    # A rate that falls from snapshot to snapshot, as a cosine's does, is no drop; a norm that doubled is critical.
    assert fallen.gain == strong.gain
    assert {name for name, c in doubled.plan.items() if f"rank={methods.RANK}" in str(c)} == {"a"}


# --- the loss-based metric


class _Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(64, 32, bias=False)
        self.narrow = nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.wide(x))


class _Lines:
    """Least squares by gradient descent: what a task must have for the metric."""

    learning_rate = 0.05

    def build(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return _Line()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.learning_rate)

    def batches(self, seed: int, rank: int, num_ranks: int) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(20):
            yield torch.randn(16, 64, generator=generator)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch) - batch[:, :32]).square().mean()


def test_only_the_named_layer_is_compressed_and_the_checkpoint_stays() -> None:
    task = _Lines()
    model = task.build(0)
    start = Checkpoint(model, task.optimizer(model), 0, task.learning_rate)
    before = [parameter.clone() for parameter in model.parameters()]
    specs = ("raw()", "truncate(gamma=64)", "truncate(gamma=2)")
    candidates = {name: [thinwire.parse(spec) for spec in specs] for name in ("wide.weight", "narrow.weight")}
    steps: list[int] = []
    rows = sensitivities(task, start, candidates, steps=10, on_step=lambda: steps.append(1))
    assert len(steps) == (1 + 6) * 10
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    for name in candidates:
        raw, most, half = (row for row in rows if row.layer == name)
        assert (raw.loss_difference, raw.error) == (0.0, 0.0)
        # A gradient of which less arrives leads down more slowly.
        assert 0 < half.loss_difference < most.loss_difference
        assert 0 < half.error < most.error
    assert correlated(rows).count == 6
    with pytest.raises(ValueError, match="no parameter 'deep'"):
        sensitivities(task, start, {"deep": []}, steps=1)


def _rows_of(pairs: Sequence[tuple[float, float]]) -> list[Sensitivity]:
    return [Sensitivity("layer", "spec", loss, error) for loss, error in pairs]


def test_correlation_is_of_values_and_of_their_order() -> None:
    pytest.importorskip("scipy")
    found = correlated(_rows_of([(1, 1), (2, 4), (3, 9), (4, 16)]))
    assert found.spearman == pytest.approx(1)
    assert 0.9 < found.pearson < 1
    assert correlated(_rows_of([(3, 1), (2, 2), (1, 3)])).pearson == pytest.approx(-1)
    assert math.isnan(correlated(_rows_of([(1, 1), (1, 2), (1, 3)])).pearson)
    with pytest.raises(ValueError, match="no correlation"):
        correlated(_rows_of([(1, 1), (2, 2)]))
