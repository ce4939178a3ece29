"""Processes that are forked off a server: what goes in and out, how they end, and the nodes that they run on."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import echo
from aggregation import wait_until
from thinwire_tools import lab
from thinwire_tools.lab import Loopback, NodeNamespaces
from thinwire_tools.ranks import ForkedProcess

UNAVAILABLE = lab.unavailable()
Fork = Callable[[NodeNamespaces], ForkedProcess]


@pytest.fixture
def fork(tmp_path: Path) -> Iterator[Fork]:
    started: list[ForkedProcess] = []

    def forked(namespaces: NodeNamespaces) -> ForkedProcess:
        started.append(ForkedProcess(echo.main, namespaces, tmp_path / f"log{len(started)}"))
        return started[-1]

    yield forked
    for process in started:
        process.close()
        process.close()
        assert process.poll() is not None


def ask(process: ForkedProcess, line: str) -> dict[str, Any]:
    process.stdin.write(line.encode() + b"\n")
    answer = b""
    while not answer.endswith(b"\n"):
        more = process.stdout.read(65536)
        assert more
        answer += more
    return json.loads(answer)


def ended(process: ForkedProcess) -> int | None:
    wait_until(lambda: process.poll() is not None, timeout_s=60.0)
    return process.poll()


PARENT = """
import signal, sys, time
from multiprocessing import forkserver
from pathlib import Path
import echo
from thinwire_tools.lab import Loopback
from thinwire_tools.ranks import ForkedProcess
folder = Path(sys.argv[1])
def wait(process):
    while process.poll() is None:
        time.sleep(0.01)
    return process.poll()
print(wait(ForkedProcess(echo.main, Loopback(1).namespaces(0), folder / "gone" / "log")))
print(forkserver._forkserver._forkserver_pid, signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
process = ForkedProcess(echo.main, Loopback(1).namespaces(0), folder / "log")
process.stdin.write(b"sleep\\n")
print(process.pid, flush=True)
wait(process)
"""


def test_around_a_server_in_a_process_of_its_own(tmp_path: Path) -> None:
    """Here another test may have started the server already.

    What starts after its parent cleaned up, as after Ctrl-C while PyTorch is loaded, ends without a word. Ctrl-C in a
    terminal is left to the parent. What reads no input, as a rank in the middle of a training, ends with a parent that
    is killed.
    """
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1] / "support")}
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    with (
        (tmp_path / "errors").open("w") as errors,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True) as parent,
    ):
        assert parent.stdout is not None
        assert parent.stdout.readline() == "1\n"
        server, masked_here = parent.stdout.readline().split()
        assert masked_here == "False"
        status = Path(f"/proc/{server}/status").read_text()
        (masked,) = (int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigBlk:"))
        assert masked & 1 << (signal.SIGINT - 1)
        rank = os.pidfd_open(int(parent.stdout.readline()))
        try:
            log = tmp_path / "log"
            wait_until(lambda: log.exists() and "asleep" in log.read_text(), timeout_s=60.0)
            assert not select.select([rank], [], [], 0.2)[0]
            assert (tmp_path / "errors").read_text() == ""
            parent.kill()
            assert select.select([rank], [], [], 60.0)[0]
        finally:
            os.close(rank)
    assert parent.returncode == -signal.SIGKILL


def test_how_it_ends_is_its_exit_code_and_what_it_raises_is_in_its_log(tmp_path: Path, fork: Fork) -> None:
    for number in (signal.SIGKILL, signal.SIGTERM):
        process = fork(Loopback(4).namespaces(0))
        ask(process, "there?")
        process.send_signal(number)
        assert ended(process) == -number
        assert process.stdout.read(1) == b""
    raising = fork(Loopback(4).namespaces(0))
    raising.stdin.write(b"raise\n")
    assert ended(raising) == 1
    assert "ValueError: as it was told" in (tmp_path / "log2").read_text()
    assert ended(fork(NodeNamespaces((("/proc/self/no-such-namespace", 0),), {}))) == 1
    assert "no-such-namespace" in (tmp_path / "log3").read_text()


def test_it_has_the_variables_of_its_namespaces_and_no_others(fork: Fork, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    process = fork(Loopback(4).namespaces(3))
    first = ask(process, "who?")
    assert (first["line"], first["rank"], first["threads"]) == ("who?\n", "3", "5")
    assert first["pid"] == first["session"] == process.pid != os.getpid()
    second = ask(fork(NodeNamespaces((), {"OMP_NUM_THREADS": "2"})), "who?")
    assert (second["rank"], second["threads"]) == (None, "2")


@pytest.mark.network
@pytest.mark.skipif(UNAVAILABLE is not None, reason=UNAVAILABLE or "")
def test_it_runs_on_the_node_of_its_rank_until_the_network_closes(fork: Fork) -> None:
    with lab.Network(4, ranks_per_node=2, rate="100mbit") as network:
        started = [fork(network.namespaces(rank)) for rank in range(4)]
        found = [ask(process, "where?") for process in started]
        namespaces = [of["net"] for of in found]
        assert namespaces[0] == namespaces[1] != namespaces[2] == namespaces[3]
        assert os.readlink("/proc/self/ns/net") not in namespaces
        assert [of["rank"] for of in found] == ["0", "1", "2", "3"]
    assert [ended(process) for process in started] == 4 * [-signal.SIGKILL]
    with pytest.raises(RuntimeError, match="closed"):
        network.namespaces(0)
