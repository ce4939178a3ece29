"""The same with torchft itself: a lighthouse, a manager in each of several processes, one killed and one joining."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from thinwire_tools import lab
from thinwire_tools.lab.network import address

coordination = pytest.importorskip("torchft.coordination", reason="takes torchft: pip install torchft")

MISSING = lab.unavailable()
# torchft addresses its servers by host name: in the lab each node's name is its address.
NAMED = ("unshare", "--uts", "sh", "-c", 'echo 10.77.0.$((RANK + 1)) > /proc/sys/kernel/hostname && exec "$@"', "sh")
SERVE = """
import time
from torchft.coordination import LighthouseServer
server = LighthouseServer(bind="[::]:29510", min_replicas=2, join_timeout_ms=5000, heartbeat_timeout_ms=1500)
time.sleep(600)
"""
SCRIPT = Path(__file__).parents[2] / "examples" / "torchft_local.py"
LINE = re.compile(r"step (\d+): loss ([\d.]+), (\d+) workers, weights (\w+)")


class Worker:
    def __init__(self, lighthouse: str, *more: str, start: Callable[..., Any] = subprocess.Popen) -> None:
        # The test ends them: on a busy machine a worker starts for longer than any number of steps takes the others.
        options = ["--lighthouse", lighthouse, "--steps", "1000000", "--every", "20", "--step-seconds", "0.02", *more]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = start([sys.executable, str(SCRIPT), *options], env=environment, **pipes)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line)

    @property
    def exchanges(self) -> dict[int, tuple[float, int, str]]:
        """Loss, number of workers and checksum by step."""
        found = [LINE.search(line) for line in list(self.lines)]
        return {int(m[1]): (float(m[2]), int(m[3]), m[4]) for m in found if m}

    def wait_for(self, done, what: str, seconds: float = 90.0) -> None:
        end = time.monotonic() + seconds
        while not done(self):
            assert time.monotonic() < end, f"{what} did not come: {''.join(self.lines)[-3000:]}"
            assert self.process.poll() is None, "".join(self.lines)[-3000:]
            time.sleep(0.05)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        self._reader.join(10)
        self.process.stdout.close()


@pytest.mark.timeout(400)
def test_a_worker_is_killed_and_another_joins() -> None:
    lighthouse = coordination.LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=10_000, heartbeat_timeout_ms=1_500
    )
    workers = [Worker(lighthouse.address()) for _ in range(3)]
    try:
        a, b, c = workers
        a.wait_for(lambda w: any(n == 3 for _, n, _ in w.exchanges.values()), "three workers")
        c.process.kill()
        a.wait_for(lambda w: w.exchanges and list(w.exchanges.values())[-1][1] == 2, "an exchange of two")
        workers.append(d := Worker(lighthouse.address()))
        a.wait_for(lambda w: list(w.exchanges.values())[-1][1] == 3, "the fourth worker")
        joined_at = max(a.exchanges)
        for worker in (a, b, d):
            worker.wait_for(lambda w: w.exchanges and max(w.exchanges) >= joined_at + 100, "five more exchanges")
        # Whoever counts an exchange has the same weights after it.
        for step in set().union(*(w.exchanges for w in workers)):
            assert len({w.exchanges[step][2] for w in workers if step in w.exchanges}) == 1, f"they differ at {step}"
        assert len(a.exchanges.keys() & b.exchanges.keys() & d.exchanges.keys()) >= 3
        assert a.exchanges[max(a.exchanges)][0] < 0.8 * a.exchanges[min(a.exchanges)][0]
        assert sum("left: its residual is dropped" in line for line in a.lines) == 1
        assert int(re.search(r"joins at step (\d+)", "".join(d.lines))[1]) > 20
    finally:
        for worker in workers:
            worker.end()
        lighthouse.shutdown()


@pytest.mark.network
@pytest.mark.skipif(MISSING is not None, reason=MISSING or "")
@pytest.mark.skipif(shutil.which("unshare") is None, reason="takes unshare of util-linux")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("together", [False, True], ids=["later", "at once"])
def test_a_worker_that_nobody_can_connect_to_is_refused_with_words(together: bool) -> None:
    """Whether it comes to workers that train already, or all of them start at the same time."""
    workers: list[Worker] = []
    with lab.Network(4, rate="100mbit", nat=[1]) as network:

        def begin(rank: int) -> Worker:
            def start(argv: list[str], **options: Any) -> Any:
                return network.popen(rank, [*NAMED, *argv], **options)

            workers.append(worker := Worker(f"http://{address(0)}:29510", "--timeout", "5", start=start))
            return worker

        try:
            network.popen(0, [*NAMED, sys.executable, "-c", SERVE])
            if together:
                behind_nat = begin(1)
            a, b = begin(2), begin(3)
            if not together:
                a.wait_for(lambda w: any(n == 2 for _, n, _ in w.exchanges.values()), "two workers")
                behind_nat = begin(1)
            assert behind_nat.process.wait(200.0) == 1
            behind_nat.end()
            said = "".join(behind_nat.lines)
            assert re.search(r"could not join the others in \d attempts", said)
            assert "none may be behind NAT" in said
            seen = max(a.exchanges, default=0)
            for worker in (a, b):
                worker.wait_for(lambda w: max(w.exchanges, default=0) >= seen + 60, "exchanges of the others")
        finally:
            for worker in workers:
                worker.end()
