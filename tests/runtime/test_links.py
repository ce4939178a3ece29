"""What is measured of links, and of steps: the same on every rank, and what is not counted."""

from __future__ import annotations

import time
from statistics import median

import pytest
import torch

from harness import run_threads
from link_probe import probe
from thinwire.runtime.adapt import StepClock
from thinwire.runtime.probe import measure_cores, measure_links, measure_pairs, shared_part
from thinwire_tools import lab
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


def test_a_clock_of_steps() -> None:
    clock, flat = StepClock(1.0), torch.zeros(64)
    for _ in range(3):
        clock.end()
        clock.begin(compressed=False)
        clock.ready(flat, LAYERS)
        time.sleep(0.01)
        clock.ready(flat, (("late", (64,)),))
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        clock.arriving(future)
        time.sleep(0.02)
        future.set_result(flat)
        time.sleep(0.005)
    clock.end()
    assert len(clock.steps) == 3
    step = clock.steps[0]
    assert [bucket.layers for bucket in step.pace.buckets] == [LAYERS, (("late", (64,)),)]
    # Of 35 ms, 20 were waited for the last bucket.
    assert step.seconds >= 0.035
    assert step.seconds - step.pace.compute_s >= 0.02
    assert step.pace.compute_s >= 0.015
    # Steps of another kind begin anew.
    clock.begin(compressed=True)
    assert not clock.steps
