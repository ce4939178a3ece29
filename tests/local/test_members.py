"""Workers that come and go, with a stand-in for torchft (tests/support/members.py)."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from members import Group, Lighthouse, Manager
from ranks import alike
from thinwire.collectives import owned_parts
from thinwire.compressors import Coded, parse
from thinwire.local import ManagedDiLoCo, Nesterov
from thinwire.runtime.checkpoint import sealed
from thinwire.runtime.slots import moved_residual

AVERAGING = Nesterov(lr=1.0, momentum=0.0)


class Worker:
    """Learns a linear map; its gradients depend on its name and its step alone where ``constant`` says so."""

    def __init__(
        self, lighthouse: Lighthouse, name: str, *, constant: bool = False, momentum: float = 0.0, **options
    ) -> None:
        torch.manual_seed(ord(name))
        self.name, self.constant = name, constant
        self.model = nn.Sequential(nn.Linear(16, 128), nn.BatchNorm1d(128), nn.Linear(128, 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=momentum)
        self.group = Group()
        self.manager = Manager(lighthouse, name, self.group)
        self.options = {"every": 5, "outer": Nesterov(lr=1.0, momentum=0.5)} | options
        self.shared: dict[int, torch.Tensor] = {}

    def begin(self) -> None:
        self.local = ManagedDiLoCo(self.model, self.optimizer, self.manager, self.group, **self.options)

    def train(self, until: int) -> None:
        generator = torch.Generator().manual_seed(1000 * ord(self.name) + self.local.steps)
        while self.local.steps < until:
            self.optimizer.zero_grad()
            if self.constant:
                for p in self.model.parameters():
                    p.grad = torch.full_like(p, float(ord(self.name) - ord("a") + 1))
            else:
                x = torch.randn(32, 16, generator=generator)
                (self.model(x) - x[:, :4]).square().mean().backward()
            self.optimizer.step()
            counted = self.manager.exchanges
            self.local.step()
            if self.manager.exchanges > counted:
                self.shared[self.local.steps] = self.anchor()

    def anchor(self) -> torch.Tensor:
        with self.local.shared_weights():
            values = [v for v in self.model.state_dict().values() if v.is_floating_point()]
            return torch.cat([v.detach().flatten().double() for v in values])

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


def _together(*jobs: Callable[[], object]) -> None:
    """Run jobs in threads, and raise what one of them raised."""
    errors: list[BaseException] = []

    def run(job: Callable[[], object]) -> None:
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive(), "a worker did not end"
    if errors:
        raise errors[0]


def _until(step: int, *workers: Worker) -> None:
    _together(*(lambda w=w: w.train(step) for w in workers))


def _begun(names: str, later: str = "", **options: Any) -> tuple[Any, ...]:
    """A lighthouse, workers that have begun, and others that will."""
    lighthouse = Lighthouse(*names)
    workers = [Worker(lighthouse, name, **options) for name in names + later]
    _together(*(w.begin for w in workers[: len(names)]))
    return lighthouse, *workers


def _assert_same(*workers: Worker) -> None:
    first, *others = workers
    for other in others:
        for step in first.shared.keys() & other.shared.keys():
            assert torch.equal(first.shared[step], other.shared[step]), f"{other.name} differs at step {step}"
        assert torch.equal(first.anchor(), other.anchor())


@pytest.mark.parametrize("compressor", ["gaussian(bits=2)", "powersgd(rank=2)"])
def test_a_worker_leaves_and_another_joins(compressor: str) -> None:
    lighthouse, a, b, c, d = _begun("abc", "d", compressor=compressor)
    assert torch.equal(a.weights(), b.weights())
    _until(10, a, b, c)
    lighthouse.remove("c")
    assert str(a.local.wire.algorithm) == "sra"
    _until(20, a, b)
    assert (a.local.members.left, b.local.members.left) == (1, 1)
    assert str(a.local.wire.algorithm) == "allgather"
    lighthouse.add("d")
    # The new worker waits in its constructor for the others' next exchange, and then has the same weights and steps.
    _together(lambda: a.train(25), lambda: b.train(25), d.begin)
    assert d.local.steps == 25
    assert torch.equal(d.weights(), a.weights())
    _until(40, a, b, d)
    _together(a.local.finish, b.local.finish, d.local.finish)
    assert (a.local.members.came, d.local.members.came, len(a.local.members.names)) == (1, 0, 3)
    _assert_same(a, b, d)
    assert sorted(c.shared) == [5, 10]
    assert all(torch.equal(c.shared[step], a.shared[step]) for step in (5, 10))
    assert torch.isfinite(a.anchor()).all()


def test_a_damaged_state_leaves_the_worker_as_it_was() -> None:
    _, a = _begun("a")
    a.train(5)
    state = a.local.state_dict()
    a.train(13)
    before, weights, last = a.local.state_dict(), a.weights(), "momentum/2.bias"
    rest = {key: value for key, value in state.items() if key not in ("checksums", last)}
    damages = state | {last: state[last] + 1.0}, sealed(rest), sealed(rest | {last: torch.zeros(3)})
    for damaged, load in itertools.product(damages, (a.local.load_state_dict, a.manager.load)):
        with pytest.raises(ValueError, match="state"):
            load(damaged)
        assert torch.equal(a.weights(), weights)
        assert alike(a.local.state_dict(), before)
    a.local.load_state_dict(state)
    assert a.local.steps == 5
    assert torch.equal(a.anchor(), a.shared[5])


def test_a_worker_whose_first_exchange_fails_counts_the_others_steps() -> None:
    """It has the shared state from then on, and the others have trained further when it joins."""
    lighthouse, a, b, c = _begun("ab", "c")
    _until(5, a, b)
    lighthouse.add("c")
    c.manager.break_after[0] = 0
    _together(lambda: a.train(15), lambda: b.train(15), c.begin)
    assert c.local.members.failed == 1
    assert c.local.steps == 15
    _until(20, a, b, c)
    _assert_same(a, b, c)


def test_a_joining_worker_has_no_say_before_it_has_trained() -> None:
    """The exchange in which it joins moves the shared weights as if it were not there."""

    def trained(joins: bool) -> torch.Tensor:
        lighthouse, a, b, c = _begun("ab", "c", compressor="raw", constant=True)
        _until(5, a, b)
        if joins:
            lighthouse.add("c")
        _together(lambda: a.train(10), lambda: b.train(10), *([c.begin] if joins else []))
        _assert_same(a, b)
        return a.anchor()

    torch.testing.assert_close(trained(joins=True), trained(joins=False), rtol=1e-5, atol=1e-6)


def test_an_exchange_every_step_is_training_on_the_mean_gradient() -> None:
    """SGD with momentum is linear in its gradients, so that the mean of the workers' updates is that of their mean."""
    _, *workers = _begun("ab", every=1, outer=AVERAGING, compressor="raw", constant=True, momentum=0.9)
    expected = [p.detach().clone().requires_grad_() for p in workers[0].model.parameters()]
    synchronous = torch.optim.SGD(expected, lr=0.05, momentum=0.9)
    _until(12, *workers)
    for _ in range(12):
        for p in expected:
            p.grad = torch.full_like(p, 1.5)
        synchronous.step()
    torch.testing.assert_close(workers[0].weights(), torch.cat([p.detach().flatten() for p in expected]))
    assert torch.equal(workers[0].weights(), workers[1].weights())


def test_an_exchange_that_breaks_changes_nothing() -> None:
    _, *workers = _begun("abc")
    a, _, c = workers
    _until(10, *workers)
    before = [w.local.state_dict() for w in workers]
    residuals = [w.local.wire.state_dict() for w in workers]
    c.manager.break_after[c.manager.exchanges] = 1
    _until(15, *workers)
    for w, shared, own in zip(workers, before, residuals, strict=True):
        assert w.local.members.failed == 1
        after = w.local.state_dict()
        for key in [key for key in shared if key.startswith(("anchor", "momentum"))] + ["rounds", "exchange"]:
            assert torch.equal(after[key], shared[key]), f"{w.name}: {key} is half applied"
        w.local.members.wire.engine.discard_step()
        engine = w.local.members.wire.engine
        for key, value in own.items():
            if key.startswith("rank") and key.endswith(".weight"):
                slot, name = key.split("/", 1)[1].split("/", 1)[0], key.rsplit("/", 1)[1]
                kept = engine.slots.value(name, next(s for s in engine.plan[name].slots if s.name == slot), value.shape)
                assert torch.equal(kept, value.flatten()), f"{w.name}: the residual of {name} has moved"
    _until(25, *workers)
    _assert_same(*workers)
    assert a.local.members.left == 0


def test_progress_is_counted_once_whatever_fails() -> None:
    """With constant gradients and raw exchanges, plain averages end where undisturbed ones do.

    ``doubtful``: the exchange succeeds on the others, and one worker does not hear of it.
    """

    def trained(trouble: str) -> torch.Tensor:
        _, *workers = _begun("abc", compressor="raw", outer=AVERAGING, constant=True)
        *_, c = workers
        _until(5, *workers)
        if trouble == "doubtful":
            c.manager.doubtful.add(c.manager.exchanges)
        elif trouble == "broken":
            c.manager.break_after[c.manager.exchanges] = 1
        _until(20, *workers)
        _assert_same(*workers)
        assert c.local.members.failed == bool(trouble)
        return workers[0].weights()

    undisturbed = trained("")
    for trouble in ("doubtful", "broken"):
        torch.testing.assert_close(trained(trouble), undisturbed, rtol=1e-5, atol=1e-5)


def test_a_late_worker_goes_on_from_the_shared_weights() -> None:
    """It was away for several exchanges: what it had learned is dropped, and the next exchange takes it in again."""
    lighthouse, *workers = _begun("abc", compressor="raw", constant=True)
    a, b, c = workers
    _until(5, *workers)
    lighthouse.remove("c")
    _until(20, a, b)
    lighthouse.add("c")
    _together(lambda: a.train(25), lambda: b.train(25), lambda: c.train(10))
    assert c.local.steps == 25
    _assert_same(*workers)
    assert torch.equal(c.weights(), a.weights())


def test_a_single_worker_goes_on_alone() -> None:
    lighthouse, a, b = _begun("ab")
    _until(10, a, b)
    lighthouse.remove("b")
    start = a.anchor()
    _until(20, a)
    assert not torch.equal(a.anchor(), start)
    assert repr(a.local).startswith("ManagedDiLoCo of one worker, which sends nothing: exchange of the model every ")
    lighthouse.add("b")
    _until(30, a, b)
    _until(40, a, b)
    _assert_same(a, b)


def test_a_residual_keeps_its_part_of_the_mean() -> None:
    compressor, name, numel = parse("ef(minmax(bits=4))"), "layer", 1000
    assert isinstance(compressor, Coded)

    def owned(rank: int, num_ranks: int) -> torch.Tensor:
        mask = torch.zeros(numel, dtype=torch.bool)
        for owner, begin, end in owned_parts(name, compressor, numel, (1,) * num_ranks):
            mask[begin:end] |= owner == rank
        return mask

    for before, after in ((4, 3), (3, 4), (2, 1), (1, 2)):
        value, rank = torch.randn(numel), min(before, after) - 1
        moved = moved_residual(value, compressor, name, (rank, (1,) * before), (rank, (1,) * after))
        was, now = owned(rank, before), owned(rank, after)
        assert torch.equal(moved[was == now], value[was == now])
        torch.testing.assert_close(moved[was & ~now], value[was & ~now] * after)
        torch.testing.assert_close(moved[~was & now], value[~was & now] / after)


def test_arguments_are_checked_before_others_are_waited_for() -> None:
    model, manager = nn.Linear(4, 4), Manager(Lighthouse("a"), "a", Group())
    whole, part = (torch.optim.SGD(given, lr=0.1) for given in (model.parameters(), [model.weight]))
    with pytest.raises(TypeError, match="ProcessGroupGloo"):
        ManagedDiLoCo(model, whole, manager, None)
    with pytest.raises(ValueError, match="every"):
        ManagedDiLoCo(model, whole, manager, Group(), every=0)
    with pytest.raises(ValueError, match="does not hold bias"):
        ManagedDiLoCo(model, part, manager, Group())


def test_torchft_is_not_imported() -> None:
    code = "import sys, thinwire.local.members; sys.exit('torchft' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
