"""``python -m experiments lgreco``: what is compared and chosen, the loss-based metric, how rows are judged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import thinwire
from experiments.framework.claims import Row, judge
from experiments.papers.lgreco import equal_bytes, methods
from experiments.papers.lgreco.gradients import Snapshot, choose
from experiments.papers.lgreco.judging import bytes_from, first_plan, gains
from experiments.papers.lgreco.methods import POWERSGD, TOPK
from experiments.papers.lgreco.metric import Checkpoint, sensitivities
from thinwire.policies import LGreco, parse_policy
from thinwire_tools.compare.comparison import Run

# --- what is compared


# --- rows


def _run(name: str, payload: Sequence[float] = (0, 1000, 2000, 3000, 4000), plans: Sequence[int] = ()) -> Run:
    return Run(
        name,
        step_s=[0.1] * 40,
        probe_steps=[10, 20, 30, 40],
        losses=[5.0, 4.0, 3.0, 2.5, 2.0],
        payload_bytes=list(payload),
        plans=[{"step": step} for step in plans],
    )


def test_bytes_count_from_the_first_plan_on() -> None:
    adapted = _run("adapted", payload=(0, 1000, 1500, 2000, 2500), plans=[10, 20])
    assert first_plan([adapted]) == 10
    assert first_plan([_run("uniform")]) == 0
    assert bytes_from(adapted, 10) == 50
    assert bytes_from(adapted, 0) == 62.5
    # A plan after the last probe but one: what is left is that probe's stretch.
    assert bytes_from(adapted, 35) == 50
    assert gains([adapted, adapted], [_run("uniform")] * 2) == [2.0, 2.0]


# --- equal bytes


def _equal(by_seed: list[float], half: float = 0.02, alone: float = 0.1, fewer: float = 1.0) -> tuple[bool | None, str]:
    name = equal_bytes.PAIRS[0].name
    spread = [-0.001, 0.0, 0.001]
    data = {
        "by_seed": by_seed,
        "half_loses": [half + x for x in spread],
        "alone_loses": [alone + x for x in spread],
        "fewer_bytes": [fewer] * 3,
    }
    kinds = [
        Row(equal_bytes.FIGURE, f"lost/{name}/{kind}", 0.0, "", {"lost": [0.0] * 3}) for kind in ("uniform", "lgreco")
    ]
    rows = [*kinds, Row(equal_bytes.FIGURE, f"lower_loss/{name}", 0.0, "", data)]
    (found,) = (found for found in judge(equal_bytes.claims(), rows, emulated=False) if found.claim)
    return found.holds, found.why


def test_at_equal_bytes_a_verdict_takes_equal_bytes_and_a_training_that_tells_half_of_them() -> None:
    pytest.importorskip("scipy")
    better, worse, unclear = [0.01, 0.011, 0.012], [-0.01, -0.011, -0.012], [-0.02, 0.0, 0.03]
    assert _equal(better)[0] is True
    assert _equal(worse)[0] is False
    assert _equal(unclear)[0] is None
    assert _equal(better, fewer=0.9) == (None, "L-GreCo sent more than uniform compression")
    assert _equal(better, half=0.0)[0] is None
    assert _equal(better, alone=0.0) == (None, "uniform compression is not shown to be better than sending nothing")


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


def test_a_choice_is_smaller_errs_no_more_and_is_remembered_at_the_next() -> None:
    found = choose(LGreco(), TOPK.spec("gpt"), _snapshots())
    assert [one.step for one in found] == [10, 20]
    for one in found:
        assert one.gain > 1.2
        assert one.relative_error <= 1 + 1e-9
        assert set(one.plan) == {"large", "a", "b", "bias"}
    spec = POWERSGD.spec("gpt")
    policy = parse_policy(methods.accordion(4, spec, "powersgd(rank=2)"))
    first, second = _snapshots()
    strong, doubled = (choose(policy, spec, [first, then])[1] for then in (replace(first, step=20), second))
    assert strong.gain > 2
    # A norm that doubled is critical.
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
    rows = sensitivities(task, start, candidates, steps=10)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    for name in candidates:
        raw, most, half = (row for row in rows if row.layer == name)
        assert (raw.loss_difference, raw.error) == (0.0, 0.0)
        # A gradient of which less arrives leads down more slowly.
        assert 0 < half.loss_difference < most.loss_difference
        assert 0 < half.error < most.error
