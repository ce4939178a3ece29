"""What goes wrong in communication reaches the training loop of a plain DDP model with its own type."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import thinwire
from harness import on_ranks, run_ranks
from nets import batch, loss_of, make, train
from thinwire.integrations import transports
from thinwire.runtime.bucket import BucketLayers, Substitute
from thinwire_tools.lab import free_port

_VICTIM = 1
_TIMEOUT_S = 2.0


def _loses_a_rank(rank: int, spec: str, options: dict) -> bool:
    model = make(rank)
    wire = thinwire.compress(model, spec, skip_if_slower=False, **options)
    train(model, rank, 3)
    if rank == _VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(thinwire.TransportError) as error:
        train(model, rank, 3, first=3)
    assert time.monotonic() - started < 10.0
    assert error.value.rank == _VICTIM, str(error.value)
    assert int(wire.state_dict()["step"]) >= 3
    return True


@on_ranks(2)
def test_an_error_that_the_caller_handles_while_the_model_runs_is_left_alone(rank: int) -> None:
    model = make(rank)
    thinwire.compress(model, skip_if_slower=False)
    try:
        raise RuntimeError("gloo: of another group")
    except RuntimeError as error:
        train(model, rank, 1)
        touched = hasattr(error, "rank")
    assert not touched


@pytest.mark.parametrize(
    ("spec", "transport", "num_ranks", "start"),
    [
        ("ef(minmax(bits=4))", "shared", 3, 0),
        ("minmax(bits=4)", "group", 2, 0),
        ("powersgd(rank=2)", "group", 2, 0),
        ("minmax(bits=4)", "group", 2, 100),
    ],
    ids=["shared memory", "compressed", "low rank", "dense"],
)
def test_a_killed_rank_is_a_transport_error(spec: str, transport: str, num_ranks: int, start: int) -> None:
    options = {"network": thinwire.Network(transport=transport), "start": start}
    answers = run_ranks(_loses_a_rank, num_ranks, spec, options, timeout_s=100.0, may_die=True)
    assert answers == [None if rank == _VICTIM else True for rank in range(num_ranks)]


def _stuck_after_meeting(rank: int, port: int) -> bool:
    dist.barrier()  # or another rank may still be connecting to what is destroyed here
    dist.destroy_process_group()
    # As torchrun does it: the store of a file words its errors differently.
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=3, timeout=timedelta(seconds=_TIMEOUT_S))
    model = make(rank)
    if rank == _VICTIM:
        stuck = threading.Event()
        transports.gloo_group = lambda *_, **__: stuck.wait(3 * _TIMEOUT_S) or os._exit(1)
    with pytest.raises(thinwire.TransportError) as error:
        thinwire.compress(model, "minmax(bits=4)", skip_if_slower=False)
    assert error.value.rank == _VICTIM, str(error.value)
    return True


def test_a_rank_that_is_stuck_before_groups_are_made_is_named() -> None:
    assert run_ranks(_stuck_after_meeting, 3, free_port(), timeout_s=100.0, may_die=True) == [True, None, True]


def _calls_alone(rank: int, call: str) -> tuple[int | None, str | None]:
    model = make(rank)
    wire = thinwire.compress(model, "minmax(bits=4)", skip_if_slower=False)
    train(model, rank, 3)
    alone = {
        "load_state_dict": lambda: wire.load_state_dict(wire.state_dict()),
        "gather_state_dict": wire.gather_state_dict,
    }
    act = alone[call] if rank == 1 else partial(train, model, rank, 3, first=3)
    with pytest.raises(thinwire.TransportError) as error:
        act()
    return error.value.rank, error.value.reason


@pytest.mark.parametrize("call", ["load_state_dict", "gather_state_dict"])
def test_a_call_that_one_rank_makes_alone_is_an_error_that_names_it_and_the_call(call: str) -> None:
    answers = run_ranks(_calls_alone, 3, call, group_timeout_s=_TIMEOUT_S)
    assert [rank for rank, _ in answers] == [1, 1, 1]
    assert f"it is in {call}(), which all ranks must call, and rank 0, 2 has not" in [why for _, why in answers]


class Fails(thinwire.compressors.MinMax):
    broken = False

    def encode(self, *args, **kwargs) -> None:
        if Fails.broken:
            raise ArithmeticError("this compressor is broken")
        super().encode(*args, **kwargs)


def _error_of(call: Callable[[], object]) -> tuple[str, int | None]:
    try:
        call()
    except thinwire.PeerFailedError as error:
        return "peer", error.rank
    except ArithmeticError as error:
        return str(error), None
    return "nothing", None


# What the others meet where a rank fails before it has sent anything. Native all-reduces add zeros for it.
OTHERS: list[tuple[str, dict, str]] = [
    ("ef(minmax(bits=4))", {}, "peer"),
    ("powersgd(rank=2)", {}, "nothing"),
    ("ef(minmax(bits=4))", {"start": 100}, "nothing"),
    ("ef(minmax(bits=4))", {"simulate": True}, "nothing"),
]


class Broken(Substitute):
    when_dense = True

    def make(self, flat: torch.Tensor, layers: BucketLayers, loss_scale: float) -> None:
        raise ArithmeticError("this optimizer is broken")


@on_ranks(3)
def test_others_do_not_wait_for_a_rank_that_fails_before_it_sends(rank: int) -> None:
    for spec, options, kind in OTHERS:
        model = make(rank)
        wire = thinwire.compress(model, spec, skip_if_slower=False, **options)
        train(model, rank, 3)
        wire.engine.substitute = Broken() if rank == _VICTIM else None
        found = _error_of(loss_of(model, batch(rank, 3)).backward)
        theirs = kind, _VICTIM if kind == "peer" else None
        assert found == (("this optimizer is broken", None) if rank == _VICTIM else theirs)
        wire.engine.substitute = None
        model.zero_grad()
        train(model, rank, 2, first=4)
        wire.detach()


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32, sparse=True)
        self.out = nn.Linear(32, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.embed(tokens)).sum()


@on_ranks(2)
def test_what_the_hook_raises_keeps_its_type_also_in_the_first_pass_of_a_static_graph(rank: int) -> None:
    model = nn.parallel.DistributedDataParallel(Sparse())
    model.module.embed.sparse = False
    thinwire.compress(model, "minmax(bits=4)", skip_if_slower=False)
    model.module.embed.sparse = True  # as DDP was told it is
    with pytest.raises(TypeError, match="make the embedding dense"):
        model(torch.arange(8)).backward()
    model = make(rank, static_graph=True)
    thinwire.compress(model, Fails(), skip_if_slower=False)
    Fails.broken = True
    with pytest.raises(ArithmeticError, match="this compressor is broken"):
        loss_of(model, batch(rank, 0)).backward()
