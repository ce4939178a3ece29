"""What a pipeline cannot take: a clear error on every rank that can know, never a wrong activation."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

import thinwire
from harness import run_ranks
from pipelines import BATCH, CHUNKS, LENGTH, SAMPLES, Block, Pipe, samples
from thinwire.collectives import MessageError
from thinwire.pipeline.boundary import BoundarySide
from thinwire.pipeline.message import BoundaryTensors, Spec, chunk_sizes
from thinwire.pipeline.options import PipelineOptions, fitted
from thinwire.runtime.checkpoint import sealed

FW3_BW6: dict[str, Any] = {"forward": "delta(maxabs(bits=3))", "backward": "maxabs(bits=6)"}


def error_of(call: Any) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - what it says is tested
        return f"{type(error).__name__}: {error}"
    return "none"


def given_ids(rank: int, case: str) -> Any:
    """An epoch, a step that cannot be, and an epoch after it."""
    store = thinwire.store.Memory(num_samples=SAMPLES)
    pipe = Pipe(rank, 2, **FW3_BW6, store=store)
    x, y = samples()
    pipe.epoch(0, x, y)
    ids: list[int] | None = list(range(BATCH))
    if case == "missing":
        ids = None
    elif case == "too few":
        ids = list(range(BATCH // 2))
    elif case == "one less":
        ids = list(range(BATCH - 1))
    elif case == "unknown":
        ids = [*range(BATCH - 1), 77]
    elif case == "others elsewhere" and rank == 1:
        pipe.stages[0].set_sample_ids([*range(BATCH - 1), 9])
    elif case == "fewer elsewhere" and rank == 1:
        pipe.stages[0].set_sample_ids(range(3))
    found = error_of(lambda: pipe.step(x[:BATCH], y[:BATCH], ids))
    losses = [] if case == "one less" else pipe.epoch(1, x, y)
    return found, losses, pipe.digests()


REFUSED = "ValueError: the first stage cannot take this step:"
CANNOT = "PeerFailedError: another rank of the pipeline cannot take step 2"
FAILED = "PeerFailedError: rank 0 failed in step 2;"


@pytest.mark.parametrize(
    ("case", "first", "second"),
    [
        ("missing", f"{REFUSED} no sample ids: call stage.set_sample_ids", None),
        ("too few", f"{REFUSED} the first micro-batch has 2 samples, not 1 by the 4 ids given", None),
        (
            "one less",
            "ValueError: a stage's output has shapes [(2, 6, 16)], the other side expects [(1, 6, 16)]",
            FAILED,
        ),
        ("unknown", "StoreError: sample 77 is unknown: the store was made for 16 samples", None),
        ("others elsewhere", CANNOT, "sample 7 is 9 here and 7"),
        ("fewer elsewhere", CANNOT, "their numbers differ"),
    ],
    ids=["missing", "too few", "one less", "unknown", "others elsewhere", "fewer elsewhere"],
)
def test_ids_that_cannot_be_are_an_error_on_every_rank(case: str, first: str, second: str | None) -> None:
    answers = run_ranks(given_ids, 2, case)
    assert answers[0][0].startswith(first)
    assert (second or first) in answers[1][0]
    if case != "one less":
        assert answers[1][1][-1] < 3, "the pipeline goes on once the ids are right"
        assert list(answers[0][2].values()) == list(answers[1][2].values())


def given_twice(rank: int, where: int) -> str:
    """The error of each rank, where ``where`` is given an id twice for the very first step."""
    pipe = Pipe(rank, 3, **FW3_BW6)
    if rank == where:
        return error_of(lambda: pipe.stages[0].set_sample_ids([0, 1, 2, 3, 4, 5, 6, 3]))
    x, y = samples()
    return error_of(lambda: pipe.step(x[:BATCH], y[:BATCH], range(BATCH)))


@pytest.mark.parametrize("where", [0, 2])
def test_an_id_given_twice_before_the_first_step_is_an_error_on_every_rank(where: int) -> None:
    for rank, error in enumerate(run_ranks(given_twice, 3, where)):
        expected = "ValueError" if rank == where else f"PeerFailedError: rank {where} on "
        assert error.startswith(expected)
        assert "sample 3 is in the batch twice" in error
        assert "give every sample of a batch an id of its own" in error


def test_one_compressor_or_one_for_each_boundary() -> None:
    options = PipelineOptions(forward=["delta(maxabs(bits=3))", "raw"])
    options.check(3)
    assert [options.keeps_at(boundary) for boundary in (0, 1)] == [True, False]
    with pytest.raises(ValueError, match="forward has 2 compressors for 1 boundaries"):
        options.check(2)


@pytest.mark.parametrize("inner", ["maxabs(bits=2, rounding=stochastic)", "topk(density=0.1) | maxabs(bits=8)"])
def test_what_loses_more_of_changes_than_theorem_3_1_admits_is_warned_of(inner: str) -> None:
    with pytest.warns(UserWarning, match=r"of a Gaussian change, and AQ-SGD converges below 0\.71"):
        PipelineOptions(forward=f"delta({inner})")


@pytest.mark.parametrize("inner", ["maxabs(bits=2)", "gaussian(bits=2)", "topk(density=0.2) | maxabs(bits=8)"])
def test_what_theorem_3_1_admits_is_not_warned_of(inner: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PipelineOptions(forward=f"delta({inner})")
        PipelineOptions(adapt=thinwire.policies.ByLink())


def unlike(rank: int, options: list[dict[str, Any]]) -> str:
    pipe = Pipe(rank, 2, **options[rank])
    x, y = samples()
    return error_of(lambda: pipe.step(x[:BATCH], y[:BATCH], range(BATCH)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"forward": "delta(maxabs(bits=4))"}, "'forward: delta(maxabs(bits=3, bucket=128))'"),
        ({"backward": "maxabs(bits=5)"}, "backward"),
        ({"precision": 8}, "precision"),
        ({"seed": 1}, "seed"),
        ({"store": thinwire.store.Memory(num_samples=20)}, "num_samples"),
        ({"check_every": 7}, "check_every"),
    ],
)
def test_ranks_that_were_given_other_options_all_raise(change: dict[str, Any], message: str) -> None:
    for error in run_ranks(unlike, 2, [FW3_BW6, {**FW3_BW6, **change}]):
        assert error.startswith("DisagreementError")
        assert message in error


def opened(rank: int, folder: Path, case: str) -> str:
    place = thinwire.store.Disk(folder, num_samples=SAMPLES)
    if case == "budget":
        place = thinwire.store.Disk(folder, budget_bytes=100)
    pipe = Pipe(rank, 2, **FW3_BW6, store=place)
    if case == "full" and rank == 1:
        from thinwire.store import manifest

        usage = type(manifest.shutil.disk_usage(folder))(1 << 40, 1 << 40, 1000)
        manifest.shutil.disk_usage = lambda path: usage  # pyright: ignore[reportAttributeAccessIssue]
    if case == "damaged" and rank == 0:
        (folder / "rank0-boundary0-earlier").mkdir()
        (folder / "rank0-boundary0-earlier" / "manifest.json").write_text("{}")
    x, y = samples()
    return error_of(lambda: pipe.step(x[:BATCH], y[:BATCH], range(BATCH)))


@pytest.mark.parametrize(
    ("case", "errors"),
    [
        ("full", ("PeerFailedError", "StoreError: the message store needs")),
        ("damaged", ("StoreError: the message store in", "PeerFailedError")),
        ("budget", ("StoreError: budget_bytes=100 does not hold", "StoreError: budget_bytes=100 does not hold")),
    ],
)
def test_a_store_that_cannot_be_opened_is_an_error_on_every_rank(case: str, errors: Any, tmp_path: Path) -> None:
    for error, expected in zip(run_ranks(opened, 2, tmp_path, case), errors, strict=True):
        assert error.startswith(expected)


class Growing(Block):
    """Its output has another length than its input."""

    extra = 0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return torch.cat([y, y[:, : self.extra]], dim=1)


def of_another_shape(rank: int, forward: str) -> tuple[str, str]:
    pipe = Pipe(rank, 2, forward=forward, backward="maxabs(bits=6)", kind=Growing)
    x, y = samples()
    pipe.step(x[:BATCH], y[:BATCH], range(BATCH))
    if rank == 0:
        pipe.modules[0].extra = 1  # pyright: ignore[reportArgumentType]
    return error_of(lambda: pipe.step(x[:BATCH], y[:BATCH], range(BATCH))), ""


@pytest.mark.parametrize("forward", ["delta(maxabs(bits=3))", "maxabs(bits=3)", "raw"])
def test_an_activation_of_another_shape_is_an_error_on_both_sides(forward: str) -> None:
    first, second = run_ranks(of_another_shape, 2, forward)
    assert "a stage's output has shapes" in first[0]
    assert "pass set_sample_ids()" in first[0]
    assert "PeerFailedError: rank 0 failed" in second[0]


def fails_in_its_forward_pass(rank: int, where: int, num_ranks: int, name: str) -> tuple[str, float, bool]:
    pipe = Pipe(rank, num_ranks, name, **FW3_BW6)
    x, y = samples()
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
    took = time.perf_counter() - started
    pipe.modules[0].forward = forward
    # PyTorch's own keep the losses of a step that was given up.
    pipe.schedule = pipe.new_schedule()
    pipe.epoch(1, x, y)
    return error, took, bool(pipe.digests())


@pytest.mark.parametrize(("where", "name"), [(0, "gpipe"), (1, "gpipe"), (2, "gpipe"), (1, "1f1b"), (0, "interleaved")])
def test_an_error_in_one_stage_ends_the_step_on_all_and_they_can_go_on(where: int, name: str) -> None:
    num_ranks = 2 if name == "interleaved" else 3
    for rank, (error, took, kept) in enumerate(run_ranks(fails_in_its_forward_pass, num_ranks, where, num_ranks, name)):
        assert ("failed to run forward" if rank == where else "PeerFailedError") in error
        assert took < 15
        assert kept


def too_long(rank: int) -> str:
    pipe = Pipe(rank, 2, **FW3_BW6)
    x, y = samples(length=LENGTH)
    longer, target = (torch.cat([t, t], dim=1) for t in (x, y))
    pipe.step(x[:BATCH], y[:BATCH], range(BATCH))
    return error_of(lambda: pipe.step(longer[:BATCH], target[:BATCH], range(BATCH), length=2 * LENGTH))


def test_a_sample_longer_than_what_is_kept() -> None:
    for error in run_ranks(too_long, 2):
        assert f"samples of {2 * LENGTH} positions, and messages are kept of {LENGTH}: pass max_length=" in error


def tampered(rank: int, what: str) -> Any:
    """Change a message on its way: after it was made, before it is read."""
    pipe = Pipe(rank, 2, **FW3_BW6)
    x, y = samples()
    pipe.epoch(0, x, y)
    if rank == 0:
        # The other side raises, so no gradient comes back: this one ends with its link.
        return error_of(lambda: pipe.step(x[:BATCH], y[:BATCH], range(BATCH)))
    unpack = BoundarySide.unpack

    def spoil(side: BoundarySide, direction: Any, chunk: int, message: Tensor, *rest: Any) -> None:
        if what == "noise":
            message.copy_(torch.randint(0, 255, message.shape, dtype=torch.uint8))
        else:
            message[{"payload": 100, "step": 16, "magic": 0}[what]] ^= 1
        unpack(side, direction, chunk, message, *rest)

    BoundarySide.unpack = spoil
    before = pipe.digests()
    with pytest.raises(MessageError) as caught:
        pipe.step(x[:BATCH], y[:BATCH], None)
    return str(caught.value), pipe.digests() == before


@pytest.mark.parametrize(
    ("what", "message"),
    [("payload", "damaged"), ("step", "out of step"), ("magic", "not a thinwire message"), ("noise", "not a thinwire")],
)
def test_a_damaged_message_is_an_error_and_changes_nothing(what: str, message: str) -> None:
    answer = run_ranks(tampered, 2, what, may_die=True)[1]
    assert message in answer[0]
    assert answer[1]


def of_a_state(rank: int, case: str) -> str:
    pipe = Pipe(rank, 2, **FW3_BW6)
    x, y = samples()
    pipe.epoch(0, x, y)
    state = pipe.stages[0].state_dict()
    fresh = Pipe(rank, 2, **{**FW3_BW6, "precision": 8 if case == "precision" else 32, "seed": int(case == "seed")})
    stage = fresh.stages[0]
    if case == "empty":
        state = {}
    elif case == "other stage":
        state = {key.replace("boundary0", "boundary5"): value for key, value in state.items()}
    elif case == "one side" and rank == 1:
        stage.load_state_dict(state)
        state["step"] += 3
    elif case == "run" and rank == 1:
        state["run"] += 1
    if case in ("one side", "run"):
        state = sealed({key: value for key, value in state.items() if key != "checksums"})
    found = error_of(lambda: stage.load_state_dict(state))
    if found != "none":
        return found
    return error_of(lambda: fresh.step(x[:BATCH], y[:BATCH], range(BATCH)))


@pytest.mark.parametrize(
    ("case", "messages"),
    [
        ("none", ("none", "none")),
        ("empty", ("ValueError: this is not the state of a pipeline stage",) * 2),
        ("seed", ("ValueError: the state has seed 0, this stage 1",) * 2),
        ("other stage", ("StoreError: the state has messages of boundary5",) * 2),
        ("precision", ("StoreError: the state's records are (16, 384)",) * 2),
        ("one side", ("PeerFailedError", "ValueError: this rank is at run")),
        ("run", ("PeerFailedError", "ValueError: this rank's state is of run")),
    ],
)
def test_states_that_do_not_fit(case: str, messages: tuple[str, str]) -> None:
    for error, expected in zip(run_ranks(of_a_state, 2, case), messages, strict=True):
        assert error.startswith(expected)


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


def test_chunks_are_those_of_pytorch() -> None:
    for count in range(1, 20):
        for chunks in range(1, 8):
            expected = [len(part) for part in torch.tensor_split(torch.arange(count), chunks)]
            assert chunk_sizes(count, chunks) == expected


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


def of_many(rank: int) -> Any:
    pipe = Pipe(rank, 2, **FW3_BW6, kind=Mixed, loss=lambda out, target: ((out[0] - target) ** 2).mean())
    x, y = samples()
    losses = [loss for epoch in range(3) for loss in pipe.epoch(epoch, x, y)]
    _, index, positive, number = pipe.modules[0].seen  # pyright: ignore[reportGeneralTypeIssues]
    return pipe.digests(), losses, (index, positive, number)


def test_all_tensors_of_a_stage_are_sent_in_one_message() -> None:
    (mine, _, sent), (theirs, losses, received) = run_ranks(of_many, 2)
    assert [t.dtype for t in received] == [torch.int64, torch.bool, torch.int64]
    assert all(torch.equal(a, b) for a, b in zip(sent, received, strict=True))
    assert int(received[2]) == 7
    assert list(mine.values()) == list(theirs.values())
    assert losses[-1] < losses[0]


def test_a_pytorch_that_will_not_tell_what_crosses_is_an_error_at_once() -> None:
    stage = PipelineStage.__new__(PipelineStage)  # as one of PyTorch 2.11, which has no `_stage_meta`
    with pytest.raises(RuntimeError, match=r"pipelines need PyTorch 2\.12 or newer"):
        thinwire.compress_stage(stage)


class Unlike:
    """A stage of another PyTorch."""


def test_a_pytorch_that_does_not_tell_what_crosses_is_an_error() -> None:
    from types import SimpleNamespace

    from thinwire.compat import stage_tensors

    with pytest.raises(RuntimeError, match="does not tell what crosses a stage boundary"):
        stage_tensors(Unlike())
    meta = SimpleNamespace(shape=torch.Size((2, 3)), dtype=torch.float32)
    stage = SimpleNamespace(
        _stage_meta=SimpleNamespace(inputs=None, outputs=(meta,), input_grads=(None, meta), output_grads=())
    )
    one = [((2, 3), torch.float32)]
    assert stage_tensors(stage) == {"inputs": [], "outputs": one, "input_grads": one, "output_grads": []}
    meta.placements = ()
    with pytest.raises(NotImplementedError, match="a DTensor crosses a stage boundary"):
        stage_tensors(stage)


def told_by_pytorch(rank: int) -> Any:
    from thinwire.compat import stage_tensors

    pipe = Pipe(rank, 2, **FW3_BW6)
    x, y = samples()
    pipe.step(x[:BATCH], y[:BATCH], range(BATCH))
    return stage_tensors(pipe.stages[0])


def test_this_pytorch_tells_what_crosses() -> None:
    crossing = [((2, LENGTH, 16), torch.float32)]
    first, last = run_ranks(told_by_pytorch, 2)
    assert first["inputs"] == first["outputs"] == first["output_grads"] == crossing
    assert last["inputs"] == last["outputs"] == last["input_grads"] == crossing


def gradients(rank: int) -> str:
    from torch.nn.parallel import DistributedDataParallel

    return error_of(lambda: thinwire.compress(DistributedDataParallel(nn.Linear(64, 64)), "delta(maxabs(bits=4))"))


def test_gradients_of_parameters_have_no_samples() -> None:
    for error in run_ranks(gradients, 2):
        assert "gradients belong to no sample" in error


def _loses_a_rank(rank: int) -> tuple[str, int | None, str]:
    pipe = Pipe(rank, 3, **FW3_BW6)
    x, y = samples()
    pipe.epoch(0, x, y)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(3):
            pipe.epoch(1, x, y)
    except thinwire.TransportError as error:
        return "TransportError", error.rank, error.reason or ""
    return "nothing", None, ""


def test_a_rank_that_is_killed_is_named_by_both_neighbours() -> None:
    answers = run_ranks(_loses_a_rank, 3, may_die=True)
    for answer in (answers[0], answers[2]):
        assert answer[:2] == ("TransportError", 1), answers
        assert "has ended" in answer[2]
