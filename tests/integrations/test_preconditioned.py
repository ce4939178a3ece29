"""CompressedAdamW under `thinwire.compress`: what is sent, what it costs in loss, checkpoints, skipped steps."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from harness import run_ranks
from nets import assert_replicas_identical, batch as batch_of, fingerprint, loss_of, make, train, trained
from thinwire.optim import CompressedAdamW

TWO_BITS = "gaussian(bits=2)"
LR = 3e-3


def _attach(rank: int, compressor: str, order: Any = "pre", **options: Any) -> tuple[nn.Module, CompressedAdamW, Any]:
    model = make(rank)
    optimizer = CompressedAdamW(trained(model), lr=LR, betas=(0.9, 0.99), order=order)
    wire = thinwire.compress(model, compressor, optimizer=optimizer, skip_if_slower=False, min_numel=64, **options)
    return model, optimizer, wire


def _means(rank: int, size: int, order: Any) -> None:
    """With nothing compressed, ranks step with the mean of what each makes of its own gradient."""
    model, optimizer, _ = _attach(rank, "raw", order, start=0)
    lone = make(rank)
    alone = CompressedAdamW(trained(lone), lr=LR, betas=(0.9, 0.99), order=order)
    with lone.no_sync():
        loss_of(lone, batch_of(rank, 0)).backward()
    loss_of(model, batch_of(rank, 0)).backward()
    for mine, sent in zip(trained(lone), trained(model), strict=True):
        assert mine.grad is not None
        assert sent.grad is not None
        expected = mine.grad.clone()
        alone.outgoing([(mine, expected)], 1.0)
        gathered = [torch.empty_like(expected) for _ in range(size)]
        torch.distributed.all_gather(gathered, expected)
        torch.testing.assert_close(sent.grad, torch.stack(gathered).mean(0), rtol=1e-5, atol=1e-9)
    optimizer.step()
    assert_replicas_identical(model)


@pytest.mark.parametrize("order", ["pre", "update"])
def test_ranks_step_with_the_mean_of_their_updates(order: str) -> None:
    run_ranks(_means, 2, 2, order)


def _losses(rank: int, size: int, compressor: str, order: Any, steps: int) -> dict[str, Any]:
    model, optimizer, wire = _attach(rank, compressor, order)
    losses = train(model, rank, steps, optimizer=optimizer)
    assert_replicas_identical(model)
    specs = {str(c) for c in wire.plan.layers.values()}
    return {"loss": sum(losses[-10:]) / 10, "sent": wire.stats.payload_sent_bytes, "specs": specs}


@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    ("compressor", "order", "margin"),
    [(TWO_BITS, "pre", 0.05), ("onebit(bucket=512)", "update", 0.10), ("topk(density=0.05)", "update", 0.15)],
)
def test_few_bits_end_where_full_precision_does(compressor: str, order: str, margin: float) -> None:
    coded, exact = (run_ranks(_losses, 2, 2, of, order, 60, timeout_s=300.0)[0] for of in (compressor, "raw"))
    assert coded["loss"] < (1 + margin) * exact["loss"]
    assert any(spec.startswith("ef(") for spec in coded["specs"])
    assert coded["sent"] > 0


def _resumed(rank: int, size: int, order: Any) -> None:
    model, optimizer, wire = _attach(rank, TWO_BITS, order)
    train(model, rank, 4, optimizer=optimizer)
    # As rank 0 writes it: one optimizer state for all, and every rank's moments in the wire's.
    states = [copy.deepcopy(optimizer.state_dict()) if rank == 0 else None]
    torch.distributed.broadcast_object_list(states)
    saved = {"model": {k: v.clone() for k, v in model.state_dict().items()}, "wire": wire.gather_state_dict()}
    train(model, rank, 4, first=4, optimizer=optimizer)
    resumed, other, new = _attach(rank, TWO_BITS, order)
    resumed.load_state_dict(saved["model"])
    new.load_state_dict(saved["wire"])
    assert states[0] is not None
    other.load_state_dict(states[0])
    train(resumed, rank, 4, first=4, optimizer=other)
    assert fingerprint(resumed) == fingerprint(model)


@pytest.mark.parametrize("order", ["pre", "update"])
def test_one_checkpoint_resumes_bit_for_bit_on_every_rank(order: str) -> None:
    run_ranks(_resumed, 2, 2, order)


class Strided(nn.Module):
    """Parameters whose elements do not lie in memory in the order of their indices; one of them has gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(12, 8).t())
        self.gaps = nn.Parameter(torch.randn(8, 24)[:, :12])

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).square().mean() + (x.flatten(1)[:, :8] @ (self.transposed + 2 * self.gaps)).pow(4).mean()


STEPPING: dict[str, Callable[[nn.Module], Any]] = {
    "pre": lambda model: CompressedAdamW(model.parameters(), lr=LR),
    "update": lambda model: CompressedAdamW(model.parameters(), lr=LR, order="update", clip=0.5),
}


def _strided(rank: int, kind: str) -> None:
    torch.manual_seed(0)
    alone = Strided()
    model = copy.deepcopy(alone)
    ours, theirs = STEPPING[kind](model), STEPPING[kind](alone)
    ddp = nn.parallel.DistributedDataParallel(model)
    wire = thinwire.compress(ddp, "raw", optimizer=ours, skip_if_slower=False)
    for step in range(10):
        if step == 5:
            saved = wire.gather_state_dict()
            wire.load_state_dict(saved)
            for (name, mine), other in zip(model.named_parameters(), alone.parameters(), strict=True):
                for moment, values in theirs.local_state(other).items():
                    torch.testing.assert_close(saved[f"rank{rank}/{moment}/{name}"], values)
                    torch.testing.assert_close(ours.state[mine][moment].flatten(), values)
        if step == 7:
            wire.detach()
        for net, optimizer in ((ddp, ours), (alone, theirs)):
            optimizer.zero_grad()
            net(torch.randn(3, 4, 5, 5, generator=torch.Generator().manual_seed(step))).backward()
            optimizer.step()
        for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("kind", STEPPING)
def test_ranks_step_as_one_does_whatever_the_order_of_parameters_in_memory(kind: str) -> None:
    """Ranks of the same data; DDP's buckets hold gradients as their parameters lie in memory."""
    run_ranks(_strided, 2, kind)


def _saved(rank: int, size: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model, optimizer, wire = _attach(rank, TWO_BITS)
    train(model, rank, 3, optimizer=optimizer)
    return wire.gather_state_dict(), optimizer.local_state(trained(model)[0])


def _loaded(rank: int, size: int, state: dict[str, Tensor]) -> dict[str, Tensor]:
    model, optimizer, wire = _attach(rank, TWO_BITS)
    wire.load_state_dict(state)
    return optimizer.local_state(trained(model)[0])


def test_another_world_starts_with_the_mean_moments() -> None:
    answers = run_ranks(_saved, 2, 2)
    mean = torch.stack([moments["exp_avg_sq"] for _, moments in answers]).mean(0)
    assert not torch.equal(answers[0][1]["exp_avg_sq"], answers[1][1]["exp_avg_sq"])
    for moments in run_ranks(_loaded, 3, 3, answers[0][0]):
        torch.testing.assert_close(moments["exp_avg_sq"], mean)


def _damaged(rank: int, size: int, state: dict[str, Tensor]) -> str:
    _, _, wire = _attach(rank, TWO_BITS)
    key = next(key for key in state if "exp_avg_sq" in key and key.startswith("rank0"))
    try:
        wire.load_state_dict(state | {key: state[key] + 1.0})
    except (ValueError, thinwire.PeerFailedError) as error:
        return str(error)
    return ""


def test_damaged_moments_are_refused_on_every_rank() -> None:
    state = run_ranks(_saved, 2, 2)[0][0]
    assert all("exp_avg_sq" in message for message in run_ranks(_damaged, 2, 2, state))


def _scaled(rank: int, size: int) -> None:
    """A GradScaler that meets infinity on one rank: no rank steps, and nothing is left of it anywhere."""
    found = []
    for spoil in (True, False):
        model, optimizer, _ = _attach(rank, TWO_BITS)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
        for step in range(6):
            if step == 3 and not spoil:
                continue
            optimizer.zero_grad()
            loss = scaler.scale(loss_of(model, batch_of(rank, step)))
            if spoil and step == 3 and rank == 1:
                loss = loss * math.inf
            loss.backward()
            scaler.step(optimizer)
            scaler.update(2.0**10)
        assert_replicas_identical(model)
        found.append(torch.cat([m for p in trained(model) for m in optimizer.local_state(p).values()]))
    torch.testing.assert_close(found[0], found[1], rtol=0.5, atol=1e-4)
    assert bool(torch.isfinite(found[0]).all())


def test_a_step_with_infinite_gradients_leaves_no_trace() -> None:
    run_ranks(_scaled, 2, 2)


def _detached(rank: int, size: int) -> None:
    model, optimizer, wire = _attach(rank, TWO_BITS)
    train(model, rank, 2, optimizer=optimizer)
    loss_of(model, batch_of(rank, 2)).backward()  # sent, and never stepped with
    wire.detach()
    optimizer.zero_grad()
    before = [p.detach().clone() for p in trained(model)]
    train(model, rank, 1, first=3, optimizer=optimizer)
    moved = max(float((p.detach() - b).abs().max()) for p, b in zip(trained(model), before, strict=True))
    assert moved < 20 * LR  # a gradient taken for an update would have been a step of its own length
    assert_replicas_identical(model)


def test_after_detach_the_optimizer_gets_gradients_again() -> None:
    run_ranks(_detached, 2, 2)


def _incomplete(rank: int, size: int) -> str:
    model = make(rank)
    try:
        thinwire.compress(model, TWO_BITS, optimizer=CompressedAdamW(trained(model)[:-1], lr=LR))
    except ValueError as error:
        return str(error)
    return ""


def test_an_optimizer_that_lacks_a_parameter_is_refused() -> None:
    assert all("CompressedAdamW lacks" in message for message in run_ranks(_incomplete, 2, 2))


def _forgotten(rank: int, size: int) -> list[list[str]]:
    """The files of the warnings of two steps: of an optimizer that no Wire knows, of local updates, and of a Wire."""
    told = []
    for attached in ("", "locally", "wire"):
        model = make(rank)
        optimizer = CompressedAdamW(trained(model), lr=LR)
        if attached == "locally":
            thinwire.local.DiLoCo(model.module, optimizer, compressor="raw")
        elif attached == "wire":
            thinwire.compress(model, TWO_BITS, optimizer=optimizer)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                optimizer.step()
        told.append([w.filename for w in caught if "no Wire is attached to this CompressedAdamW" in str(w.message)])
    return told


def test_a_warning_says_once_that_no_wire_knows_the_optimizer() -> None:
    assert run_ranks(_forgotten, 2, 2) == [[[__file__], [], []]] * 2
