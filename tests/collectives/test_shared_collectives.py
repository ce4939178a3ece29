"""Collectives do over memory that ranks share what they do without: tests of other modules, run over it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import test_algorithms as algorithms
import test_gathered as gathered

import harness
from thinwire.collectives.shared_memory import unavailable

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

CASES: list[tuple[Callable[..., None], tuple[object, ...]]] = [
    (algorithms.test_all_ranks_end_with_the_same_bytes_and_the_mean, ("sra",)),
    (algorithms.test_all_ranks_end_with_the_same_bytes_and_the_mean, ("tree",)),
    (algorithms.test_all_ranks_end_with_the_same_bytes_and_the_mean, ("hierarchical(inside=same, across=slices)",)),
    (algorithms.test_all_ranks_end_with_the_same_bytes_and_the_mean, ("hierarchical(inside=dense, across=leaders)",)),
    (algorithms.test_all_ranks_hear_of_a_failure_and_the_next_step_works, ("ring", 3)),
    (algorithms.test_all_ranks_hear_of_a_failure_and_the_next_step_works, ("hierarchical", 0)),
    (algorithms.test_the_halves_of_an_all_reduce, ("sra",)),
    (algorithms.test_the_residual_is_kept, ("ring",)),
    (algorithms.test_the_residual_is_kept, ("hierarchical(inside=dense, across=slices)",)),
    (gathered.test_all_ranks_end_with_the_same_bytes_and_the_mean_of_what_was_sent, (gathered.FIXED, 5)),
    (gathered.test_all_ranks_end_with_the_same_bytes_and_the_mean_of_what_was_sent, (gathered.BOUNDED, 3)),
    (gathered.test_all_ranks_hear_of_a_failure_and_the_next_step_works, (gathered.BOUNDED, 2)),
]


@pytest.fixture(params=[lambda rank: 0, lambda rank: rank // 2], ids=["one node", "nodes of two"])
def _shared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gathered, algorithms):
        monkeypatch.setattr(module, "run_threads", partial(harness.run_threads, node_of=request.param))


@pytest.mark.usefixtures("_shared")
@pytest.mark.parametrize(("test", "arguments"), CASES)
def test_over_shared_memory(test: Callable[..., None], arguments: tuple[object, ...]) -> None:
    test(*arguments)


@pytest.mark.usefixtures("_shared")
@pytest.mark.parametrize(
    "test", [algorithms.test_slices_change_no_bit, gathered.test_counts_inside_a_bounded_message_are_not_believed]
)
def test_over_shared_memory_with_changes(test: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    test(monkeypatch)
