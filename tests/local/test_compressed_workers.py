"""DiLoCo over workers that are several ranks each, whose own messages are compressed, too."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import sharded
from harness import on_ranks
from pipelines import Pipe, needs_pipelines, samples
from ranks import assert_alike, of_ranks
from thinwire.local import DiLoCo

OUTER = {"every": 4, "compressor": "minmax(bits=4)"}


def train(local: DiLoCo, step: Callable[[int], float | None], weights: Callable[[], Tensor]) -> list[float | None]:
    """Losses of some rounds; peers of both workers have the same weights after each exchange, and only then."""
    losses = []
    for number in range(20):
        losses.append(step(number))
        local.step()
        held = of_ranks(weights())
        peers = zip(held[: len(held) // 2], held[len(held) // 2 :], strict=True)
        assert {torch.equal(mine, theirs) for mine, theirs in peers} == {local.steps % 4 == 0}
    assert local.wire.stats.steps == 5
    assert local.wire.stats.ratio > 3
    return losses


@needs_pipelines
@on_ranks(4)
def test_workers_that_are_compressed_pipelines(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("workers", "stages"))
    specs = {"forward": "delta(maxabs(bits=3))", "backward": "maxabs(bits=6)"}
    pipe = Pipe(rank % 2, 2, "1f1b", chunks=2, group=mesh.get_group("stages"), **specs)
    local = DiLoCo(pipe.modules[0], pipe.optimizer, group=mesh.get_group("workers"), **OUTER)
    x, y = samples()
    ids = torch.arange(rank // 2, len(x), 2)

    def weights() -> Tensor:
        return torch.cat([p.flatten() for p in pipe.parameters()])

    losses = train(local, lambda _: pipe.step(x[ids], y[ids], ids), weights)
    stats = pipe.stages[0].stats
    assert stats.steps == len(losses)
    assert stats.dense_bytes > 1.5 * (stats.forward_sent_bytes + stats.backward_sent_bytes) > 0
    if pipe.last:
        assert losses[-1] < 0.9 * losses[0]


@on_ranks(8)
def test_workers_that_are_sharded_and_replicated(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("workers", "replicate", "shard"))
    model = sharded.build(mesh["replicate", "shard"])
    wire = sharded.compress(model, "minmax(bits=8)", "minmax(bits=4)")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    local = DiLoCo(model, optimizer, group=mesh.get_group("workers"), **OUTER)

    def weights() -> Tensor:
        return torch.cat([p.flatten() for p in sharded.whole(model).values()])

    losses = train(local, lambda step: sharded.train(model, 1, first=step, optimizer=optimizer)[0], weights)
    assert wire.stats.steps == len(losses)
    assert wire.stats.ratio > 3
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    assert_alike(weights())
