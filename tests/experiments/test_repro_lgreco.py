"""``python -m experiments lgreco``: how bytes are counted, and the loss-based metric."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

import thinwire
from experiments.papers.lgreco.metric import Checkpoint, sensitivities
from experiments.papers.lgreco.quality import bytes_from, first_plan, gains
from thinwire_tools.compare.comparison import Run


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


class _Lines:
    """Least squares by gradient descent: what a task must have for the metric."""

    learning_rate = 0.05

    def build(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        layers = {"wide": nn.Linear(64, 32, bias=False), "narrow": nn.Linear(32, 32, bias=False)}
        return nn.Sequential(OrderedDict(layers))

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
