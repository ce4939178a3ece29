"""Pipelines over images that are seen cropped and flipped: messages are cropped as their images are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import thinwire
from harness import on_ranks, run_ranks
from pipelines import needs_pipelines

pytestmark = needs_pipelines

SIZE, PADDING, IMAGES, BATCH = 8, 1, 12, 4
CROPS = thinwire.store.Crops(size=SIZE, padding=PADDING)


def part(index: int) -> nn.Module:
    torch.manual_seed(index)
    if index == 0:
        return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 3, 2, 1), nn.Tanh())
    return nn.Sequential(nn.Flatten(), nn.Linear(4 * 16, 10))


def train(rank: int, store: Any, epochs: int, give: bool = True) -> dict[str, Any]:
    module = part(rank)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    stage = thinwire.compress(stage, forward="delta(maxabs(bits=3))", backward="raw", store=store)
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=nn.functional.cross_entropy)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    draws = torch.Generator().manual_seed(0)
    images = torch.randn(IMAGES, 1, SIZE + 2 * PADDING, SIZE + 2 * PADDING, generator=draws)
    losses: list[Tensor] = []
    every: list[float] = []
    for _ in range(epochs):
        for ids in torch.randperm(IMAGES, generator=draws).split(BATCH):
            corners = torch.randint(2 * PADDING + 1, (BATCH, 2), generator=draws)
            optimizer.zero_grad()
            if stage.is_first:
                stage.set_sample_ids(ids, corners=corners if give else None)
                pairs = zip(images[ids], corners.tolist(), strict=True)
                schedule.step(torch.stack([x[:, y : y + SIZE, at : at + SIZE] for x, (y, at) in pairs]))
            else:
                schedule.step(target=ids % 10, losses=losses)
            optimizer.step()
            every += [loss.item() for loss in losses]
    (store,) = stage.stores.values()
    return {"losses": every, "digest": store.digest(), "stats": stage.stats}


def test_both_sides_keep_the_same_crops_and_changes_get_smaller_than_where_messages_are_not_cropped() -> None:
    first, last = run_ranks(train, 2, CROPS, 8)
    assert first["digest"] == last["digest"]
    assert sum(last["losses"][-6:]) < 0.97 * sum(last["losses"][:6])
    assert not first["stats"].resets
    # At half of the pixels, crops of 8 begin at positions 0 or 1 of 5.
    assert first["stats"].store_bytes == IMAGES * -(-4 * 4 * 5 * 5 // 64) * 64
    blind, _ = run_ranks(train, 2, thinwire.store.Memory(), 8, False)
    ends = [answer["stats"].epochs[-1] for answer in (first, blind)]
    assert ends[0].delta / ends[0].activation < ends[1].delta / ends[1].activation


@on_ranks(2)
def test_corners_and_store_go_together_on_every_rank(rank: int) -> None:
    for store, give, message in ((CROPS, False, "no corners"), (thinwire.store.Memory(), True, "go with store=")):
        with pytest.raises((ValueError, RuntimeError), match=message):
            train(rank, store, 1, give)
