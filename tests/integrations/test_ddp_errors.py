"""What goes wrong in communication reaches the training loop of a plain DDP model with its own type."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import thinwire
from harness import run_ranks
from nets import batch, loss_of, make, train
from thinwire.integrations import transports
from thinwire_tools.lab import free_port

_VICTIM = 1


def _loses_a_rank(rank: int, spec: str, options: dict) -> tuple[str, int | None, str, bool]:
    model = make(rank)
    wire = thinwire.compress(model, spec, skip_if_slower=False, **options)
    train(model, rank, 3)
    if rank == _VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        train(model, rank, 3, first=3)
    except thinwire.TransportError as error:
        saved = wire.state_dict()
        assert int(saved["step"]) >= 3
        return type(error).__name__, error.rank, str(error), time.monotonic() - started < 10.0
    return "nothing", None, "", False


def _handles_another_error(rank: int) -> bool:
    model = make(rank)
    thinwire.compress(model, skip_if_slower=False)
    try:
        raise RuntimeError("gloo: of another group")
    except RuntimeError as error:
        train(model, rank, 1)
        return hasattr(error, "rank")


def test_an_error_that_the_caller_handles_while_the_model_runs_is_left_alone() -> None:
    assert run_ranks(_handles_another_error, 2) == [False, False]


@pytest.mark.parametrize("start", [0, 100], ids=["compressed", "dense"])
@pytest.mark.parametrize(
    ("spec", "transport", "num_ranks"),
    [("ef(minmax(bits=4))", "shared", 3), ("minmax(bits=4)", "group", 2), ("powersgd(rank=2)", "group", 2)],
)
def test_a_killed_rank_is_a_transport_error(spec: str, transport: str, num_ranks: int, start: int) -> None:
    options = {"network": thinwire.Network(transport=transport), "start": start}
    answers = run_ranks(_loses_a_rank, num_ranks, spec, options, timeout_s=100.0, may_die=True)
    assert answers.pop(_VICTIM) is None
    for kind, blamed, text, soon in answers:
        assert kind == "TransportError"
        assert soon
        assert blamed == _VICTIM, text


def _stuck_after_meeting(rank: int, port: int) -> tuple[int | None, str]:
    dist.destroy_process_group()
    # As torchrun does it: the store of a file words its errors differently.
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=3, timeout=timedelta(seconds=8))
    model = make(rank)
    if rank == _VICTIM:
        stuck = threading.Event()
        transports.gloo_group = lambda *args: stuck.wait(40.0) or os._exit(1)
    with pytest.raises(thinwire.TransportError) as error:
        thinwire.compress(model, "minmax(bits=4)", skip_if_slower=False)
    return error.value.rank, str(error.value)


def test_a_rank_that_is_stuck_before_groups_are_made_is_named() -> None:
    answers = run_ranks(_stuck_after_meeting, 3, free_port(), timeout_s=100.0, may_die=True)
    assert answers.pop(_VICTIM) is None
    for blamed, text in answers:
        assert blamed == _VICTIM, text


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
    answers = run_ranks(_calls_alone, 3, call, group_timeout_s=8.0, timeout_s=100.0)
    assert [rank for rank, _ in answers] == [1, 1, 1]
    assert f"it is in {call}(), which all ranks must call, and rank 0, 2 has not" in [why for _, why in answers]


class Fails(thinwire.compressors.MinMax):
    """Encodes until it is told not to."""

    broken = False

    def encode(self, *args, **kwargs) -> None:
        if Fails.broken:
            raise ArithmeticError("this compressor is broken")
        super().encode(*args, **kwargs)


def _one_rank_fails(rank: int, momentum: bool) -> tuple[str, int | None, list[float]]:
    model = make(rank)
    wire = thinwire.compress(model, Fails(), skip_if_slower=False)
    train(model, rank, 3)
    Fails.broken = rank == _VICTIM
    kind, blamed = "nothing", None
    try:
        loss_of(model, batch(rank, 3)).backward()
    except thinwire.PeerFailedError as error:
        kind, blamed = "peer", error.rank
    except ArithmeticError as error:
        kind = str(error)
    Fails.broken = False
    # The reducer of DDP is of use after it.
    model.zero_grad()
    losses = train(model, rank, 2, first=4)
    assert wire.step == 5
    return kind, blamed, losses


def test_a_rank_that_fails_is_named_and_training_can_go_on() -> None:
    answers = run_ranks(_one_rank_fails, 3, False)
    assert [answer[0] for answer in answers] == ["peer", "this compressor is broken", "peer"]
    assert answers[0][1] == answers[2][1] == _VICTIM
    assert all(len(losses) == 2 for _, _, losses in answers)


def _one_rank_fails_before_it_sends(rank: int, spec: str, options: dict) -> tuple[str, int | None, int]:
    model = make(rank)
    wire = thinwire.compress(model, spec, skip_if_slower=False, **options)
    train(model, rank, 3)
    observe = wire.observe

    def broken(*args, **kwargs) -> None:
        raise ArithmeticError("this policy is broken")

    wire.observe = broken if rank == _VICTIM else observe
    kind, blamed = "nothing", None
    try:
        loss_of(model, batch(rank, 3)).backward()
    except thinwire.PeerFailedError as error:
        kind, blamed = "peer", error.rank
    except ArithmeticError as error:
        kind = str(error)
    wire.observe = observe
    model.zero_grad()
    return kind, blamed, len(train(model, rank, 2, first=4))


@pytest.mark.parametrize(
    ("spec", "options", "others"),
    [
        ("ef(minmax(bits=4))", {}, "peer"),
        ("powersgd(rank=2)", {}, "nothing"),  # added by native all-reduces, as the next two are
        ("ef(minmax(bits=4))", {"start": 100}, "nothing"),
        ("ef(minmax(bits=4))", {"simulate": True}, "nothing"),
    ],
    ids=["compressed", "low rank", "dense", "simulated"],
)
def test_nor_do_others_wait_for_a_rank_that_fails_before_it_sends(spec: str, options: dict, others: str) -> None:
    answers = run_ranks(_one_rank_fails_before_it_sends, 3, spec, options)
    assert [answer[0] for answer in answers] == [others, "this policy is broken", others]
    assert answers[0][1] == answers[2][1] == (None if others == "nothing" else _VICTIM)
    assert [answer[2] for answer in answers] == [2, 2, 2]


class Sparse(nn.Module):
    """A model whose gradients cannot be compressed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32, sparse=True)
        self.out = nn.Linear(32, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.embed(tokens)).sum()


def _sparse(rank: int) -> str:
    model = nn.parallel.DistributedDataParallel(Sparse())
    model.module.embed.sparse = False
    thinwire.compress(model, "minmax(bits=4)", skip_if_slower=False)
    model.module.embed.sparse = True  # as DDP was told it is
    try:
        model(torch.arange(8)).backward()
    except TypeError as error:
        return str(error)
    return "nothing"


def test_what_the_hook_itself_refuses_keeps_its_type() -> None:
    for text in run_ranks(_sparse, 2):
        assert "make the embedding dense" in text


def _static_graph(rank: int) -> str:
    model = make(rank, static_graph=True)
    thinwire.compress(model, Fails(), skip_if_slower=False)
    Fails.broken = True
    try:
        loss_of(model, batch(rank, 0)).backward()
    except ArithmeticError as error:
        return str(error)
    return "nothing"


def test_the_first_pass_of_a_static_graph_too() -> None:
    assert run_ranks(_static_graph, 2) == ["this compressor is broken"] * 2
