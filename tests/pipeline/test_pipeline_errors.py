"""What a pipeline cannot take: a clear error on every rank that can know, never a wrong activation."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

import thinwire
from harness import on_ranks, run_ranks
from pipelines import BATCH, CHUNKS, LENGTH, SAMPLES, Block, Pipe, check_sides, needs_pipelines, samples
from ranks import alike, of_ranks
from thinwire.collectives import MessageError
from thinwire.compat import stage_tensors
from thinwire.pipeline.boundary import BoundarySide
from thinwire.pipeline.message import BoundaryTensors, Spec
from thinwire.pipeline.options import PipelineOptions, fitted
from thinwire.runtime.checkpoint import sealed
from thinwire.store import files

pytestmark = needs_pipelines

FW3_BW6: dict[str, Any] = {"forward": "delta(maxabs(bits=3))", "backward": "maxabs(bits=6)"}


def error_of(call: Any) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - what it says is tested
        return f"{type(error).__name__}: {error}"
    return "none"


REFUSED = "ValueError: the first stage cannot take this step:"
CANNOT = "PeerFailedError: another rank of the pipeline cannot take step"
UNKNOWN = "StoreError: sample 77 is unknown: the store was made for 16 samples"
WRONG_IDS: dict[str, tuple[list[int] | None, str, str]] = {
    "missing": (None, f"{REFUSED} no sample ids: call stage.set_sample_ids", ""),
    "too few": (
        list(range(BATCH // 2)),
        f"{REFUSED} the first micro-batch has 2 samples, not 1 by the 4 ids given",
        "",
    ),
    "unknown": ([*range(BATCH - 1), 77], UNKNOWN, UNKNOWN),
    "others elsewhere": (list(range(BATCH)), CANNOT, "sample 7 is 9 here and 7"),
    "fewer elsewhere": (list(range(BATCH)), CANNOT, "their numbers differ"),
}
"""What the first stage is given, and the errors of both ranks."""


@on_ranks(2)
def test_ids_that_cannot_be_are_an_error_on_every_rank(rank: int) -> None:
    """An epoch, a step that cannot be, and an epoch after it."""
    x, y = samples()
    for case, (ids, first, second) in WRONG_IDS.items():
        pipe = Pipe(rank, 2, **FW3_BW6, store=thinwire.store.Memory(num_samples=SAMPLES))
        pipe.epoch(0, x, y)
        if rank == 1 and case.endswith("elsewhere"):
            pipe.stages[0].set_sample_ids([*range(BATCH - 1), 9] if case == "others elsewhere" else range(3))
        found = error_of(lambda pipe=pipe, ids=ids: pipe.step(x[:BATCH], y[:BATCH], ids))
        assert found.startswith(first) if rank == 0 else (second or first) in found, found
        losses = pipe.epoch(1, x, y)
        assert not losses or losses[-1] < 3, "the pipeline goes on once the ids are right"
        check_sides(of_ranks(pipe.digests()), [0])


@on_ranks(3)
def test_an_id_given_twice_before_the_first_step_is_an_error_on_every_rank(rank: int) -> None:
    """An id that one rank is given twice for the very first step."""
    x, y = samples()
    for where in (0, 2):
        pipe = Pipe(rank, 3, **FW3_BW6)
        if rank == where:
            error = error_of(lambda pipe=pipe: pipe.stages[0].set_sample_ids([0, 1, 2, 3, 4, 5, 6, 3]))
        else:
            error = error_of(lambda pipe=pipe: pipe.step(x[:BATCH], y[:BATCH], range(BATCH)))
        assert error.startswith("ValueError" if rank == where else f"PeerFailedError: rank {where} on ")
        assert "sample 3 is in the batch twice" in error
        assert "give every sample of a batch an id of its own" in error


def test_one_compressor_or_one_for_each_boundary() -> None:
    options = PipelineOptions(forward=["delta(maxabs(bits=3))", "raw"])
    options.check(3)
    assert [options.keeps_at(boundary) for boundary in (0, 1)] == [True, False]
    with pytest.raises(ValueError, match="forward has 2 compressors for 1 boundaries"):
        options.check(2)


def test_what_loses_more_of_changes_than_theorem_3_1_admits_is_warned_of() -> None:
    for inner in ("maxabs(bits=2, rounding=stochastic)", "topk(density=0.1) | maxabs(bits=8)"):
        with pytest.warns(UserWarning, match=r"of a Gaussian change, and AQ-SGD converges below 0\.71"):
            PipelineOptions(forward=f"delta({inner})")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for inner in ("maxabs(bits=2)", "gaussian(bits=2)", "topk(density=0.2) | maxabs(bits=8)"):
            PipelineOptions(forward=f"delta({inner})")
        PipelineOptions(adapt=thinwire.policies.ByLink())


UNOPENED = {
    "full": ("PeerFailedError", "StoreError: the message store needs"),
    "damaged": ("StoreError: the message store in", "PeerFailedError"),
    "budget": ("StoreError: budget_bytes=100 does not hold", "StoreError: budget_bytes=100 does not hold"),
}
"""What keeps a store from being opened, and the errors of both ranks."""


@on_ranks(2)
def test_a_store_that_cannot_be_opened_is_an_error_on_every_rank(rank: int, tmp_path: Path) -> None:
    x, y = samples()
    usage = files.shutil.disk_usage
    for case, errors in UNOPENED.items():
        mine = tmp_path / case
        size = {"budget_bytes": 100} if case == "budget" else {"num_samples": SAMPLES}
        pipe = Pipe(rank, 2, **FW3_BW6, store=thinwire.store.Disk(mine, **size))
        if case == "full" and rank == 1:
            full = type(usage(tmp_path))(1 << 40, 1 << 40, 1000)
            files.shutil.disk_usage = lambda path, full=full: full  # pyright: ignore[reportAttributeAccessIssue]
        if case == "damaged" and rank == 0:
            (mine / "rank0-boundary0-earlier").mkdir(parents=True)
            (mine / "rank0-boundary0-earlier" / "manifest.json").write_text("{}")
        found = error_of(lambda pipe=pipe: pipe.step(x[:BATCH], y[:BATCH], range(BATCH)))
        files.shutil.disk_usage = usage
        assert found.startswith(errors[rank])


class Growing(Block):
    """Its output has another length than its input."""

    extra = 0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return torch.cat([y, y[:, : self.extra]], dim=1)


@on_ranks(2)
def test_an_activation_of_another_shape_is_an_error_on_both_sides(rank: int) -> None:
    x, y = samples()
    for forward in ("delta(maxabs(bits=3))", "raw"):
        pipe = Pipe(rank, 2, forward=forward, backward="maxabs(bits=6)", kind=Growing)
        pipe.step(x[:BATCH], y[:BATCH], range(BATCH))
        if rank == 0:
            pipe.modules[0].extra = 1  # pyright: ignore[reportArgumentType]
        found = error_of(lambda pipe=pipe: pipe.step(x[:BATCH], y[:BATCH], range(BATCH)))
        assert ("pass set_sample_ids()" if rank == 0 else "PeerFailedError: rank 0 failed") in found


def fails_in_its_forward_pass(rank: int, where: int, name: str) -> None:
    x, y = samples()
    pipe = Pipe(rank, dist.get_world_size(), name, **FW3_BW6)
    pipe.epoch(0, x, y)
    forward = pipe.modules[0].forward
    if rank == where:
        calls = iter(range(CHUNKS))

        def fail(x: Tensor) -> Tensor:
            if next(calls) == 2:
                raise ArithmeticError("no such number")
            return forward(x)

        pipe.modules[0].forward = fail
    started = time.perf_counter()
    error = error_of(lambda: pipe.step(x[:BATCH], y[:BATCH], range(BATCH)))
    assert time.perf_counter() - started < 15
    assert ("failed to run forward" if rank == where else "PeerFailedError") in error
    pipe.modules[0].forward = forward
    # PyTorch's own keep the losses of a step that was given up.
    pipe.schedule = pipe.new_schedule()
    pipe.epoch(1, x, y)
    assert pipe.digests()


@pytest.mark.parametrize(("where", "name"), [(0, "gpipe"), (2, "gpipe"), (1, "1f1b"), (0, "interleaved")])
def test_an_error_in_one_stage_ends_the_step_on_all_and_they_can_go_on(where: int, name: str) -> None:
    run_ranks(fails_in_its_forward_pass, 2 if name == "interleaved" else 3, where, name)


@on_ranks(2)
def test_a_sample_longer_than_what_is_kept(rank: int) -> None:
    pipe = Pipe(rank, 2, **FW3_BW6)
    x, y = samples()
    pipe.step(x[:BATCH], y[:BATCH], range(BATCH))
    x, y = (torch.cat([t, t], dim=1)[:BATCH] for t in (x, y))
    with pytest.raises(ValueError, match="samples of 12 positions, and messages are kept of 6: pass max_length="):
        pipe.step(x, y, range(BATCH), length=2 * LENGTH)


def tampered(rank: int, what: str) -> Any:
    """Change a message on its way: after it was made, before it is read."""
    pipe = Pipe(rank, 2, **FW3_BW6)
    x, y = samples()
    pipe.epoch(0, x, y)
    if rank == 0:
        # The other side raises, so no gradient comes back: this one ends with its link.
        return error_of(lambda: pipe.step(x[:BATCH], y[:BATCH], range(BATCH)))
    unpack = BoundarySide.unpack

    def spoil(side: BoundarySide, chunk: int, message: Tensor, *rest: Any) -> list[Tensor]:
        message[{"payload": 100, "step": 16, "magic": 0}[what]] ^= 1
        return unpack(side, chunk, message, *rest)

    BoundarySide.unpack = spoil
    before = pipe.digests()
    with pytest.raises(MessageError) as caught:
        pipe.step(x[:BATCH], y[:BATCH], None)
    return str(caught.value), pipe.digests() == before


@pytest.mark.parametrize(
    ("what", "message"), [("payload", "damaged"), ("step", "out of step"), ("magic", "not a thinwire message")]
)
def test_a_damaged_message_is_an_error_and_changes_nothing(what: str, message: str) -> None:
    answer = run_ranks(tampered, 2, what, may_die=True)[1]
    assert message in answer[0]
    assert answer[1]


UNFIT = {
    "none": ("none", "none"),
    "empty": ("ValueError: this is not the state of a pipeline stage",) * 2,
    "seed": ("ValueError: the state has seed 0, not 1",) * 2,
    "other stage": ("StoreError: the state has messages of boundary5",) * 2,
    "precision": ("StoreError: the state's records are (16, 384)",) * 2,
    "one side": ("PeerFailedError", "ValueError: this rank is at run"),
    "run": ("PeerFailedError", "ValueError: this rank's state is of run"),
}
"""What is wrong with a state, and the errors of both ranks."""


@on_ranks(2)
def test_states_that_do_not_fit(rank: int) -> None:
    trained = Pipe(rank, 2, **FW3_BW6)
    x, y = samples()
    trained.epoch(0, x, y)
    for case, errors in UNFIT.items():
        state = trained.stages[0].state_dict()
        fresh = Pipe(
            rank,
            2,
            **FW3_BW6,
            group=dist.new_group(),
            precision=8 if case == "precision" else 32,
            seed=int(case == "seed"),
        )
        stage = fresh.stages[0]
        if case == "empty":
            state = {}
        elif case == "other stage":
            state = {key.replace("boundary0", "boundary5"): value for key, value in state.items()}
        elif case == "one side" and rank == 1:
            stage.load_state_dict(state)
            state["step"] = state["step"] + 3
        elif case == "run" and rank == 1:
            state["run"] = state["run"] + 1
        if case in ("one side", "run"):
            state = sealed({key: value for key, value in state.items() if key != "checksums"})
        found = error_of(lambda stage=stage, state=state: stage.load_state_dict(state))
        if found == "none":
            found = error_of(lambda fresh=fresh: fresh.step(x[:BATCH], y[:BATCH], range(BATCH)))
        assert found.startswith(errors[rank]), (case, found)


def test_what_crosses_is_checked() -> None:
    fine = Spec((2, 3, 4), torch.float32)
    with pytest.raises(TypeError, match="float64 crosses a stage boundary"):
        BoundaryTensors((fine, Spec((2, 3), torch.float64)))
    with pytest.raises(TypeError, match="complex64"):
        BoundaryTensors((Spec((2, 3), torch.complex64),))
    with pytest.raises(ValueError, match="first dimension of each must be the batch"):
        BoundaryTensors((fine, Spec((3, 3), torch.float32)))
    mixed = BoundaryTensors((Spec((2, 5), torch.int64), fine, Spec((), torch.int32), Spec((2, 7), torch.bfloat16)))
    assert mixed.dtype == torch.float32
    assert mixed.shapes(1, 9) == [(1, 5), (1, 9, 4), (), (1, 7)]
    assert fitted(thinwire.compressors.MaxAbs(bits=4, scale="row"), mixed) == (
        thinwire.compressors.MaxAbs(bits=4, bucket=4),
        thinwire.compressors.MaxAbs(bits=4, bucket=7),
    )


class Mixed(nn.Module):
    """Several tensors cross: activations of two dtypes, integers, a bool and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        if not rest:
            index = torch.arange(len(x))[:, None].expand(len(x), 3).contiguous()
            rest = (x.sum(1), index, x[:, :, 0] > 0, torch.tensor(7))
        summed, index, positive, number = rest
        self.seen = rest
        return self.block(x) + summed[:, None] * 0.01, summed * 1.5, index, positive, number


@on_ranks(2)
def test_all_tensors_of_a_stage_are_sent_in_one_message(rank: int) -> None:
    pipe = Pipe(rank, 2, **FW3_BW6, kind=Mixed, loss=lambda out, target: ((out[0] - target) ** 2).mean())
    losses = [loss for epoch in range(3) for loss in pipe.epoch(epoch, *samples())]
    check_sides(of_ranks(pipe.digests()), [0])
    assert not losses or losses[-1] < losses[0]
    index, positive, number = received = pipe.modules[0].seen[1:]  # pyright: ignore[reportIndexIssue]
    assert [t.dtype for t in received] == [torch.int64, torch.bool, torch.int64]
    assert alike(of_ranks([index, positive, number])[0], received)
    assert int(number) == 7


def test_a_pytorch_that_will_not_tell_what_crosses_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch.distributed.pipelining.stage._StageMeta", raising=False)  # as in PyTorch 2.11
    with pytest.raises(RuntimeError, match=r"pipelines need PyTorch 2\.12 or newer"):
        thinwire.compress_stage(PipelineStage.__new__(PipelineStage))


def test_a_pytorch_that_does_not_tell_what_crosses_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="does not tell what crosses a stage boundary"):
        stage_tensors(object())
    meta = SimpleNamespace(shape=torch.Size((2, 3)), dtype=torch.float32)
    stage = SimpleNamespace(
        _stage_meta=SimpleNamespace(inputs=None, outputs=(meta,), input_grads=(None, meta), output_grads=())
    )
    one = [((2, 3), torch.float32)]
    assert stage_tensors(stage) == {"inputs": [], "outputs": one, "input_grads": one, "output_grads": []}
    meta.placements = ()
    with pytest.raises(NotImplementedError, match="a DTensor crosses a stage boundary"):
        stage_tensors(stage)


def loses_a_rank(rank: int) -> bool:
    pipe = Pipe(rank, 3, **FW3_BW6)
    x, y = samples()
    pipe.epoch(0, x, y)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(thinwire.TransportError) as error:
        pipe.epoch(1, torch.cat([x] * 3), torch.cat([y] * 3))
    assert "has ended" in (error.value.reason or "")
    return error.value.rank == 1


def test_a_rank_that_is_killed_is_named_by_both_neighbors() -> None:
    assert run_ranks(loses_a_rank, 3, may_die=True) == [True, None, True]


@on_ranks(2, timeout_s=60)
def test_stages_that_were_closed_go_on_if_they_are_on_all_ranks_and_others_are_told(rank: int, tmp_path: Path) -> None:
    pipe = Pipe(rank, 2, **FW3_BW6, store=thinwire.store.Disk(tmp_path, num_samples=SAMPLES))
    x, y = samples()
    pipe.epoch(0, x, y)
    state, kept = pipe.stages[0].state_dict(), pipe.digests()
    pipe.stages[0].close()
    pipe.epoch(1, x, y)
    check_sides(of_ranks(pipe.digests()), [0])
    pipe.stages[0].load_state_dict(state)
    assert pipe.digests() == kept, "a state from before is still there"
    if rank == 1:
        pipe.stages[0].close()
    else:
        found = error_of(lambda: pipe.step(x[:BATCH], y[:BATCH], range(BATCH)))
        assert found.startswith("TransportError: rank 1 on ")
        assert "the pipeline's stages were closed there" in found
    of_ranks(None)
