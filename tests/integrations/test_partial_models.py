"""Models of which DDP reduces only a part: layers that a step does not use, and those that it was told to ignore."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from harness import on_ranks
from ranks import alike, assert_alike, of_ranks
from thinwire.integrations.transports import trained

_WIDTH = 32


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.expert = nn.Linear(_WIDTH, _WIDTH, bias=False)

    def forward(self, x: Tensor, whole: bool = True) -> Tensor:
        y = self.shared(x)
        return self.expert(y) if whole else y


def _gradient(rank: int, step: int) -> Tensor:
    """The gradient that a rank has of the expert in a step."""
    torch.manual_seed(0)
    model = Experts()
    model(_batch(rank, step)).mean().backward()
    assert model.expert.weight.grad is not None
    return model.expert.weight.grad


def _batch(rank: int, step: int) -> Tensor:
    return torch.randn(8, _WIDTH, generator=torch.Generator().manual_seed(2 * step + rank))


def _unused_every_second_step(rank: int, bucket_view: bool, before: str) -> None:
    """The expert's gradients arrive or stay in a residual. ``before``: what gradients are as a pass begins."""
    torch.manual_seed(0)
    model = DDP(Experts(), find_unused_parameters=True, gradient_as_bucket_view=bucket_view)
    wire = thinwire.compress(model, "ef(topk(density=0.02))", skip_if_slower=False, min_numel=0)
    given, arrived = torch.zeros(_WIDTH, _WIDTH), torch.zeros(_WIDTH, _WIDTH)
    for step in range(8):
        model.zero_grad(set_to_none=before == "none")
        model(_batch(rank, step), step % 2 == 0).mean().backward()
        if step % 2 == 0:
            given += sum(_gradient(r, step) for r in range(2)) / 2
        if (got := model.module.expert.weight.grad) is not None:
            arrived += got
    (key,) = (key for key in wire.state_dict() if "residual" in key and "expert" in key)
    unsent = sum(of_ranks(wire.state_dict()[key])) / 2
    assert float((given - arrived - unsent.view(given.shape)).norm() / given.norm()) < 1e-5


@on_ranks(2)
def test_what_a_residual_sends_of_a_layer_that_no_rank_used_is_kept(rank: int) -> None:
    for bucket_view in (False, True):
        for before in ("none", "zeros"):
            _unused_every_second_step(rank, bucket_view, before)


@on_ranks(2)
def test_momentum_and_velocity_of_a_layer_that_no_rank_used_are_kept(rank: int) -> None:
    torch.manual_seed(0)
    model = DDP(Experts(), find_unused_parameters=True)
    wire = thinwire.compress(model, "dgc(topk(density=0.02))", skip_if_slower=False, min_numel=0)

    def kept(step: int, whole: bool) -> dict[str, Tensor]:
        model.zero_grad()
        model(_batch(rank, step), whole).mean().backward()
        return {key.split("/")[1]: v for key, v in wire.state_dict().items() if key.endswith("expert.weight")}

    first, unused, used = kept(0, whole=True), kept(1, whole=False), kept(2, whole=True)
    assert set(first) == {"momentum", "velocity"}
    assert alike(first, unused)
    assert not alike(unused, used)


@on_ranks(2)
def test_layers_that_ddp_ignores_belong_to_their_rank(rank: int) -> None:
    for checks in (thinwire.Checks(1), thinwire.Checks(resync_every=1)):
        torch.manual_seed(rank)
        module = Experts()
        DDP._set_params_and_buffers_to_ignore_for_model(module, ["expert.weight"])
        model = DDP(module)
        own, shared = module.expert.weight.detach().clone(), module.shared.weight.detach().clone()
        wire = thinwire.compress(model, "minmax(bits=4)", skip_if_slower=False, min_numel=0, checks=checks)
        optimizer = torch.optim.SGD(module.shared.parameters(), lr=0.1)
        for step in range(3):
            model.zero_grad()
            model(_batch(rank, step)).square().mean().backward()
            optimizer.step()
        assert list(trained(model)) == list(wire.plan.layers) == ["shared.weight"]
        assert torch.equal(own, module.expert.weight)
        assert not torch.equal(shared, module.shared.weight)


@on_ranks(2)
def test_a_layer_that_is_frozen_at_first_is_then_compressed_as_the_others(rank: int) -> None:
    for kind, options in (("QuantizedAdam", {"warmup": 2}), ("CompressedAdamW", {})):
        model = DDP(Experts(), find_unused_parameters=True)
        model.module.expert.requires_grad_(False)
        optimizer = getattr(thinwire.optim, kind)(model.parameters(), lr=1e-2, **options)
        wire = thinwire.compress(model, "minmax(bits=4)", optimizer=optimizer, skip_if_slower=False, min_numel=0)
        for step in range(8):
            model.module.expert.requires_grad_(step >= 4)
            optimizer.zero_grad()
            model(_batch(rank, step)).square().mean().backward()
            optimizer.step()
        assert str(wire.plan["expert.weight"]) == str(wire.plan["shared.weight"]) == "ef(minmax(bits=4, bucket=128))"
        assert_alike(model.module.expert.weight.detach())
