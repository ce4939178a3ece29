"""Ranks that are killed, stand still and join in a lab, and links that break."""

from __future__ import annotations

import itertools
import re
import sys

import pytest

from thinwire_tools import lab
from thinwire_tools.lab.schedule import Event, check_schedule, late_ranks, read_schedule

MISSING = lab.unavailable()
PYTHON = [sys.executable, "-I", "-S", "-u", "-c"]
# Each rank prints the seconds since rank 0 was started, ten times a second for two seconds, as long as it lives.
CLOCK = """
import time
for _ in range(20):
    print("tick", time.monotonic(), flush=True)
    time.sleep(0.1)
"""


def test_events_are_read_as_they_are_written() -> None:
    assert Event.parse("kill", "1@60s") == Event("kill", 1, 60.0)
    assert Event.parse("cut", "0@500ms..2s") == Event("cut", 0, 0.5, 2.0)
    lines = ["# a worker dies", "kill 1@60s", "", "join 1@90s  # and comes back"]
    assert read_schedule(lines) == [Event("kill", 1, 60.0), Event("join", 1, 90.0)]


def test_a_rank_joins_only_while_it_does_not_run() -> None:
    kill, again, late = Event("kill", 0, 1.0), Event("join", 0, 2.0), Event("join", 1, 3.0)
    assert check_schedule([late, again, kill], 2) == [kill, again, late]
    assert late_ranks([late, again, kill]) == {1}


@pytest.mark.network
@pytest.mark.skipif(MISSING is not None, reason=MISSING or "")
class TestInTheLab:
    def test_a_killed_rank_is_no_failure_and_comes_back(self, capfd: pytest.CaptureFixture[str]) -> None:
        events = [Event("kill", 1, 1.4), Event("join", 1, 1.8), Event("join", 2, 1.6)]
        outcome = lab.launch([*PYTHON, CLOCK], num_ranks=3, events=events, timeout=60.0)
        printed = capfd.readouterr()
        assert outcome.exit_code == 0
        ticks = {rank: printed.out.count(f"[{rank}] tick") for rank in range(3)}
        assert ticks[0] == ticks[2] == 20
        assert ticks[1] > 20, "it printed before it was killed, and all of it again"
        for line in ("at 1.4 s: kill, rank 1", "at 1.6 s: join, rank 2", "at 1.8 s: join, rank 1"):
            assert line in printed.err

    def test_a_paused_rank_stands_still_and_goes_on(self, capfd: pytest.CaptureFixture[str]) -> None:
        events = [Event("pause", 0, 1.3, 2.5)]
        assert lab.launch([*PYTHON, CLOCK], num_ranks=2, events=events, timeout=60.0).exit_code == 0
        times = [float(t) for t in re.findall(r"\[0\] tick ([\d.]+)", capfd.readouterr().out)]
        assert len(times) == 20
        assert max(b - a for a, b in itertools.pairwise(times)) > 0.8

    def test_goodput_is_what_ranks_have_kept_of_what_they_could(self, capfd: pytest.CaptureFixture[str]) -> None:
        keep = "import time; [print('kept 50 tokens') or time.sleep(0.1) for _ in range(10)]"
        outcome = lab.launch(
            [*PYTHON, keep], num_ranks=2, events=[Event("join", 1, 0.5)], count=r"kept (\d+) tokens", possible=1000.0
        )
        assert outcome.counted == 1000
        assert 1.0 < outcome.rank_seconds < 2 * outcome.seconds
        assert outcome.goodput["of_all_ranks"] == pytest.approx(1 / (2 * outcome.seconds))
        assert outcome.goodput["of_present_ranks"] == pytest.approx(1 / outcome.rank_seconds)
        assert f"goodput {outcome.goodput['of_all_ranks']:.1%} of what all ranks could" in capfd.readouterr().err
