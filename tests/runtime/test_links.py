"""What is measured of links, and of steps: the same on every rank, and what is not counted."""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

import pytest
import torch

from harness import run_threads
from link_probe import probe
from thinwire.runtime.adapt import StepClock
from thinwire.runtime.probe import measure_cores, measure_links, measure_pairs, shared_part
from thinwire_tools import lab
from thinwire_tools.doctor.watched import Step
from thinwire_tools.ranks import run_ranks

UNAVAILABLE = lab.unavailable()
LAYERS = (("w", (64, 32)), ("b", (32,)))


def test_links_are_the_same_on_every_rank() -> None:
    def run(transport):
        with transport.uncounted():
            links = measure_links(transport, long_s=0.002)
        moved = transport.sent_bytes
        return links, measure_pairs(transport), measure_cores(transport), moved, transport.sent_bytes

    first, *others = run_threads(run, 3)
    links, pairs, cores, moved, after = first
    assert all(other[:3] == (links, pairs, cores) for other in others)
    assert [(pair.first, pair.second) for pair in pairs] == [(0, 1), (0, 2), (1, 2)]
    assert all(pair.bandwidth > 0 and pair.latency_s >= 0 for pair in pairs)
    assert links.num_ranks == 3
    # A machine that is slow at the time measures no more than the first size.
    sizes = [size for size, _ in links.native.points]
    assert sizes == [pytest.approx(4 / 3 * 4096 * 4**i, abs=8) for i in range(len(sizes))] != []
    assert moved == 0 < after


@pytest.mark.alone
@pytest.mark.network
@pytest.mark.skipif(UNAVAILABLE is not None, reason=UNAVAILABLE or "")
def test_a_long_link_is_as_fast_as_it_is() -> None:
    """What TCP sends in the first round trips says little of the rate."""
    with lab.Network(2, rate="50mbit", rtt="20ms") as network:
        found = [pair for _ in range(3) for pair in run_ranks(probe, {}, 2, network)]
    # Of what the first round trips carry alone, a tenth of the rate would follow; other work may slow one probe.
    assert 0.3 < median(pair["bandwidth"] for pair in found) / (50e6 / 8) < 1.1
    assert 0.009 < median(pair["latency_s"] for pair in found) < 0.2


@pytest.mark.parametrize(
    ("cores", "threads", "part"), [(1, 1, 1.0), (2, 1, 0.0), (1.5, 1, 0.5), (8, 2, 0.0), (0.5, 1, 1.0)]
)
def test_what_backward_loses_of_its_cores(cores: float, threads: int, part: float) -> None:
    assert shared_part(cores, threads) == part


class Mark(NamedTuple):
    """A mark of a fake device, whose seconds are not known before it has come there."""

    at: int
    done: list[int]

    def since(self, earlier: Mark) -> int:
        assert self.done, "the host would wait"
        return self.at - earlier.at


def test_a_clock_of_steps() -> None:
    now, done, flat = 0, list[int](), torch.zeros(64)
    clock = StepClock(1.0, lambda: Mark(now, done))
    for now in (0, 100, 200):
        clock.end()
        clock.begin(compressed=False)
        clock.ready(flat, LAYERS)
        now += 10
        clock.ready(flat, (("late", (64,)),))
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        clock.arriving(future)
        now += 20
        future.set_result(flat)
    now = 300
    clock.end()
    done.append(now)
    assert len(clock.steps) == 3
    step = clock.steps[0]
    assert [(bucket.ready_s, bucket.layers) for bucket in step.pace.buckets] == [(0, LAYERS), (10, (("late", (64,)),))]
    assert (step.seconds, step.pace.compute_s) == (100, 80)
    # Steps of another kind begin anew.
    clock.begin(compressed=True)
    assert not clock.steps
    ends = [Mark(at, done) for at in (0, 10, 15, 20, 50, 60)]
    watched = Step(ends[0], serial=True, moves=[(ends[1], ends[2]), (ends[3], ends[4])], ended=ends[5])
    assert (watched.ready, watched.took, watched.seconds, watched.compute_s) == ([10, 15], [5, 30], 60, 25)
