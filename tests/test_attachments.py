"""Every attachment, held to every law: what must be true wherever thinwire compresses. A new one joins by being listed.

What only one attachment does is tested beside it.
"""

from __future__ import annotations

import copy
import io
import re
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import thinwire
from attachments import ATTACHMENTS, Training
from harness import run_ranks
from pipelines import needs_pipelines
from ranks import settled

STEPS = 3
COUNTERS = r"(^|/)(step|steps|seen|versions|exchanges|sent_at/\d+|seed|plan|checksums)$"
"""Entries of states that move with every step."""


def begin(rank: int, name: str, steps: int = STEPS) -> Training:
    """A training that is compressed from its first step on, after so many."""
    training = ATTACHMENTS[name](rank)
    training.attach()
    for step in range(steps):
        training.step(step)
    return training


def slots(training: Training) -> dict[str, Tensor]:
    """What compressors, policies and optimizers have learned or left out on this rank."""
    return {k: v.clone() for k, v in training.wire.state_dict().items() if not re.search(COUNTERS, k)}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether all tensors are the same to the bit; what was not measured yet is NaN in both."""
    return a.keys() == b.keys() and all(torch.equal(a[key].nan_to_num(), b[key].nan_to_num()) for key in a)


def assert_alike(training: Training) -> None:
    """All ranks that have a tensor of a name have the same."""
    everyone: list[Any] = [None] * training.size
    dist.all_gather_object(everyone, training.weights())
    first: dict[str, Tensor] = {}
    for weights in everyone:
        for name, tensor in weights.items():
            assert torch.equal(first.setdefault(name, tensor), tensor), name


def load(rank: int, name: str, file: str | io.BytesIO) -> Training:
    state = torch.load(file, weights_only=True)
    training = begin(rank, name, 0)
    training.step(17)  # from somewhere else
    training.load(state["training"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # another number of workers: tune the outer optimizer anew
        training.wire.load_state_dict(state["wire"])
    return training


def alike(rank: int, name: str) -> None:
    training = begin(rank, name)
    assert_alike(training)
    assert 0 < training.sent_bytes() < training.share * training.dense_bytes(), "little was compressed"


def resumed(rank: int, name: str) -> None:
    training = begin(rank, name)
    files = []
    for way in ("state_dict", "gather_state_dict"):
        if hasattr(training.wire, way):
            files.append(io.BytesIO())
            torch.save({"training": training.state(), "wire": getattr(training.wire, way)()}, files[-1])
    for step in range(STEPS, 2 * STEPS):
        training.step(step)
    for file in files:
        file.seek(0)
        again = load(rank, name, file)
        for step in range(STEPS, 2 * STEPS):
            again.step(step)
        assert same(again.weights(), training.weights())
        assert same(slots(again), slots(training))


def detached(rank: int, name: str) -> None:
    training, stock = begin(rank, name), ATTACHMENTS[name](rank)
    training.detach()
    stock.load(copy.deepcopy(training.state()))
    for each in (training, stock):
        each.step(STEPS)
    assert_alike(training)
    assert same(training.weights(), stock.weights()) or not training.becomes_stock, "it is not as it was"
    training.attach()
    training.step(STEPS + 1)
    stock.step(STEPS + 1)
    assert_alike(training)
    assert not same(training.weights(), stock.weights()), "nothing is compressed again"


def not_finite(rank: int, name: str) -> None:
    training = begin(rank, name)
    before = slots(training) if training.keeps_nothing_of_nan else {}
    assert not all(bool(t.isfinite().all()) for t in training.poisoned_step(STEPS)), "it was laundered"
    assert same(slots(training) if before else {}, before), "it is kept"
    training.step(STEPS + 1)
    assert_alike(training)
    assert all(bool(t.isfinite().all()) for t in training.weights().values())


def in_a_closure(rank: int, name: str) -> None:
    """Forward and backward may be the closure of the optimizer's step, as Lightning has them."""
    plain, enclosed = (begin(rank, name, 0) for _ in range(2))
    take, enclosed.optimizer.step = enclosed.optimizer.step, lambda: None  # type: ignore[method-assign]
    for step in range(2 * STEPS):
        plain.step(step)
        take(lambda step=step: enclosed.step(step))
    assert same(enclosed.weights(), plain.weights())
    assert same(slots(enclosed), slots(plain))


def dropped(rank: int, name: str) -> None:
    """A loop may drop a gradient that is too long: nothing of it is kept."""
    training: Any = begin(rank, name)
    before = slots(training) if training.keeps_nothing_of_nan else {}
    training.optimizer.zero_grad()
    training.backward(STEPS, 1000.0)
    training.wire.discard_step()
    training.optimizer.zero_grad()
    assert same(slots(training) if before else {}, before), "it is kept"
    training.step(STEPS + 1)
    assert_alike(training)


def wrong_state(rank: int, name: str) -> None:
    training = begin(rank, name)
    state, before = training.wire.state_dict(), slots(training)
    key = next(key for key, value in state.items() if "residual" in key or "moment" in key)
    damaged = state | {key: state[key] + 1}
    for wrong in (damaged, {k: v for k, v in state.items() if k != key}):
        with pytest.raises((ValueError, thinwire.PeerFailedError), match=r"load_state_dict|checksum|lacks") as error:
            training.wire.load_state_dict(wrong if rank == 1 else state)
        assert rank == 1 or "rank 1" in str(error.value)
    assert same(slots(training), before), "what was refused was taken"
    training.wire.load_state_dict(state)
    training.step(STEPS)
    assert_alike(training)


def bytes_foreseen(rank: int, name: str) -> None:
    training = begin(rank, name)
    before = training.sent_bytes()
    for step in range(STEPS, 2 * STEPS):
        training.step(step)
    assert training.sent_bytes() - before == STEPS * training.planned_bytes()


def memory_told(rank: int, name: str) -> None:
    training = begin(rank, name, 0)
    told, _ = training.memory()
    for step in range(STEPS):
        training.step(step)
    _, held = training.memory()
    assert told <= held <= 1.02 * told, "slots of raw layers in a bucket come on top"


def nothing_left(rank: int, name: str) -> None:
    models, counts = [], []
    for cycle in range(3):
        training = begin(rank, name, 2)
        training.detach()
        models.append(weakref.ref(training))
        del training
        if cycle > 0:
            counts.append(settled(counts[0] if counts else None))
    assert all(late <= early for early, late in zip(*counts, strict=True)), counts
    assert not [model for model in models if model() is not None]


def independent_of_defaults(rank: int, name: str) -> None:
    """`torch.set_default_dtype` and `torch.set_default_device` are the user's."""
    found = []
    # What is kept for the process must not be of the dtype that the first training happens to have.
    for dtype, device in ((torch.bfloat16, "meta"), (torch.float32, None)):
        training = ATTACHMENTS[name](rank)
        torch.set_default_dtype(dtype)
        torch.set_default_device(device)
        try:
            training.attach()
            for step in range(STEPS):
                training.step(step)
        finally:
            torch.set_default_dtype(torch.float32)
            torch.set_default_device(None)
        found.append(training.weights())
        training.detach()
    assert all(same(each, found[-1]) for each in found)


LAWS = [alike, resumed, detached, not_finite, wrong_state, bytes_foreseen, memory_told]
LAWS += [in_a_closure, dropped, independent_of_defaults, nothing_left]


def keeps_all_laws(rank: int, name: str) -> None:
    for law in LAWS:
        if law.__name__ not in ATTACHMENTS[name].without:
            try:
                law(rank, name)
            except Exception as error:
                raise AssertionError(f"{law.__name__} does not hold") from error


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=needs_pipelines) if n == "pipeline" else n for n in ATTACHMENTS]
)
def test_laws(name: str) -> None:
    run_ranks(keeps_all_laws, ATTACHMENTS[name].worlds[0], name, backend=ATTACHMENTS[name].backend)


def saved(rank: int, name: str, path: str) -> None:
    training = begin(rank, name)
    state = {"training": training.state(), "wire": training.wire.gather_state_dict()}
    if rank == 0:
        torch.save(state, path)


def passed_on(rank: int, name: str, path: str, onward: str) -> None:
    training = load(rank, name, path)
    state = {"training": training.state(), "wire": training.wire.gather_state_dict()}
    if rank == 0:
        torch.save(state, onward)
    training.step(STEPS)
    assert_alike(training)


def loaded(rank: int, name: str, *paths: str) -> list[dict[str, Tensor]]:
    found = (slots(load(rank, name, path)).items() for path in paths)
    return [{key: value for key, value in items if value.is_floating_point()} for items in found]


@pytest.mark.parametrize(
    "name", [n for n, attachment in ATTACHMENTS.items() if "another_world" not in attachment.without]
)
def test_another_number_of_ranks_owes_the_same(name: str, tmp_path: Any) -> None:
    """Ranks owe as much from a checkpoint as from one that another number of ranks passed on."""
    ranks, others, last = ATTACHMENTS[name].worlds
    path, onward = str(tmp_path / "of some"), str(tmp_path / "of others")
    run_ranks(saved, ranks, name, path)
    run_ranks(passed_on, others, name, path, onward)
    owed = run_ranks(loaded, last, name, path, onward)
    assert any(bool(value.any()) for value in owed[0][0].values()), "nothing is owed"
    for mine, theirs in owed:
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_the_page_says_which_laws_apply() -> None:
    laws = (
        "bytes_foreseen",
        "alike",
        "resumed",
        "another_world",
        "not_finite",
        "in_a_closure",
        "wrong_state",
        "detached",
    )
    page = (Path(__file__).parents[1] / "docs/trainers.md").read_text()
    for name, attachment in ATTACHMENTS.items():
        cells = ["" if law in attachment.without else "yes" for law in laws]
        assert f"| {name} | {' | '.join(cells)} |" in page
