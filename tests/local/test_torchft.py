"""The same with torchft itself: a lighthouse, a manager in each of several processes, one killed and one joining."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

coordination = pytest.importorskip("torchft.coordination", reason="takes torchft: pip install torchft_nightly")

SCRIPT = Path(__file__).parents[2] / "examples" / "torchft_local.py"
LINE = re.compile(r"step (\d+): loss ([\d.]+), (\d+) workers, weights (\w+)")


class Worker:
    def __init__(self, lighthouse: str) -> None:
        options = ["--lighthouse", lighthouse, "--steps", "600", "--every", "20", "--step-seconds", "0.02"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = subprocess.Popen([sys.executable, str(SCRIPT), *options], env=environment, **pipes)
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
            assert self.process.poll() in (None, 0), "".join(self.lines)[-3000:]
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
        for worker in (a, b, d):
            worker.wait_for(lambda w: w.process.poll() is not None, "the end")
            worker.end()
        # Whoever counts an exchange has the same weights after it.
        for step in set().union(*(w.exchanges for w in workers)):
            assert len({w.exchanges[step][2] for w in workers if step in w.exchanges}) == 1, f"they differ at {step}"
        assert a.exchanges[600][2] == b.exchanges[600][2] == d.exchanges[600][2]
        assert a.exchanges[600][0] < 0.8 * a.exchanges[20][0]
        assert sum("left: its residual is dropped" in line for line in a.lines) == 1
        assert int(re.search(r"joins at step (\d+)", "".join(d.lines))[1]) > 20
    finally:
        for worker in workers:
            worker.end()
        lighthouse.shutdown()
