"""Collectives do over memory that ranks share what they do without: tests of other modules, run over it."""

from __future__ import annotations

from functools import partial

import pytest
import test_algorithms
import test_collectives
import test_gathered
from test_algorithms import (  # noqa: F401
    test_all_ranks_end_with_the_same_bytes_and_the_mean,
    test_all_ranks_hear_of_a_failure_and_the_next_step_works,
    test_slices_change_no_bit,
    test_the_halves_of_an_all_reduce,
    test_the_residual_is_kept,
)
from test_collectives import test_not_a_number_reaches_every_rank  # noqa: F401
from test_gathered import (  # noqa: F401
    test_a_size_that_cannot_be_is_refused,
    test_all_ranks_end_with_the_same_bytes_and_the_mean_of_what_was_sent,
    test_all_ranks_hear_of_a_failure_and_the_next_step_works as test_gathering_fails,
    test_counts_inside_a_bounded_message_are_not_believed,
)

import harness
from thinwire.collectives.shared_memory import unavailable

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))


@pytest.fixture(autouse=True, params=[lambda rank: 0, lambda rank: rank // 2], ids=["one node", "nodes of two"])
def _shared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (test_collectives, test_gathered, test_algorithms):
        monkeypatch.setattr(module, "run_threads", partial(harness.run_threads, node_of=request.param))
