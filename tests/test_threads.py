"""Threads that the interpreter waits for: a process that ends right after its last collective ends well."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import thinwire
from harness import run_ranks
from thinwire.runtime import Follower, ThreadExecutor
from thinwire.threads import Worker

ROOT = Path(thinwire.__file__).parent
# What a busy machine does now and then: the thread is held up in a callback, below C++, when the program ends.
_SLOW = """
import time
import torch
import torch.distributed as dist
from thinwire.runtime import Follower, ThreadExecutor
from thinwire.runtime.executor import Job

class Sleep(Job):
    def __init__(self, seconds, held=None):
        self.seconds, self.held = seconds, held

    def start(self): ...

    def finish(self):
        time.sleep(self.seconds)
        return torch.ones(1)

class Slow:
    def __del__(self):
        time.sleep(0.3)

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""
_FOLLOWER = """
follower = Follower("test")
work = dist.all_reduce(torch.ones(4), async_op=True)
follower.follow(work, lambda: None).then(lambda future, slow=Slow(): future.value()).wait()
"""
_WORKER = """
worker = ThreadExecutor("test")
worker.submit(Sleep(0.1)).then(lambda future, slow=Slow(): future.value()).wait()
"""
_STORE = """
from thinwire.threads import Worker

worker = Worker("thinwire store", within_s=10.0)
worker.submit(lambda: (time.sleep(0.3), print("written", flush=True)))
"""
_STARTS_ANOTHER = """
from thinwire import threads

class Held:
    def __del__(self):
        # As a handle that is dropped by its own thread: what is left to close is closed in a thread of its own.
        threads.start(lambda: (time.sleep(0.3), print("closed", flush=True)), name="release", end=lambda: None)

worker = ThreadExecutor("test")
worker.submit(Sleep(0.1, Held()))
"""
_WAITS_FOR_EVER = """
worker = ThreadExecutor("test")
worker.submit(Sleep(100))
"""


def _ended(script: str) -> subprocess.CompletedProcess[str]:
    code = textwrap.dedent(_SLOW + script)
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "script", [_FOLLOWER, _WORKER, _STORE, _STARTS_ANOTHER], ids=["follower", "worker", "store", "another"]
)
def test_a_program_that_ends_at_once_ends_well(script: str) -> None:
    done = _ended(script)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout == {_STORE: "written\n", _STARTS_ANOTHER: "closed\n"}.get(script, "")


def test_what_waits_for_ever_is_left_behind() -> None:
    started = time.monotonic()
    assert _ended(_WAITS_FOR_EVER).returncode == 0
    assert time.monotonic() - started < 50


def test_a_worker_that_cannot_start_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    worker = Worker("test")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", short)
        with pytest.raises(RuntimeError, match="can't start"):
            worker.submit(lambda: 1)
        with pytest.raises(RuntimeError, match="can't start"):
            ThreadExecutor("test")
    worker.wait()
    assert worker.submit(lambda: 2).result(60.0) == 2


def test_python_never_runs_in_gloos_threads() -> None:
    asking = [path for path in ROOT.rglob("*.py") if "get_future()" in path.read_text()]
    assert [path.name for path in asking] == ["executor.py"]


def _followed(rank: int) -> tuple[list[str], list[float], str]:
    follower, said, group = Follower("test"), [], dist.group.WORLD
    assert group is not None
    x, y = torch.full((3,), float(rank)), torch.full((3,), 2.0 * rank)
    first, second = (follower.mean(z, group) for z in (x, y))
    means = [float(future.wait()[0]) for future in (second, first)]
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    try:
        follower.follow(work, lambda: said[0]).wait()
    except IndexError as error:
        return said, means, str(error)
    return said, means, ""


def test_a_follower_answers_in_order_and_passes_on_what_is_raised() -> None:
    for said, means, error in run_ranks(_followed, 2):
        assert (said, means) == ([], [1.0, 0.5])
        assert "list index out of range" in error
