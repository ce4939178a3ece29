"""How a lab ends: what `thinwire lab` returns, and that nothing is left behind however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tyro

from aggregation import wait_until
from thinwire_tools import lab
from thinwire_tools.cli import main
from thinwire_tools.exits import UNAVAILABLE, USAGE
from thinwire_tools.lab.command import lab as lab_command

MISSING = lab.unavailable()
pytestmark = [pytest.mark.network, pytest.mark.skipif(MISSING is not None, reason=MISSING or "")]

PYTHON = [sys.executable, "-I", "-S", "-c"]
# A rank whose grandchild has a session of its own, as data loaders and servers may.
STRAYING = ["sh", "-c", "setsid sleep 300 & exec sleep 300"]


PARENT = f"""
import os, time
from thinwire_tools import lab
network = lab.Network(2, rate='100mbit', rtt='5ms')
ranks = [network.popen(rank, {STRAYING!r}) for rank in range(2)]
namespaces = [f"/proc/{{pid}}/ns/net" for pid in (os.getpid(), *(rank.pid for rank in ranks))]
while len({{os.stat(path).st_ino for path in namespaces}}) < 3:
    time.sleep(0.01)
print(network._keeper.pid, *(rank.pid for rank in ranks), flush=True)
time.sleep(300)
"""


def namespace(pid: int) -> int | None:
    """Inode of a process's network namespace, None when there is no such process (or it is a zombie)."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return None


def inside(namespaces: set[int]) -> list[int]:
    """Processes in any of ``namespaces``. A namespace here has no name, so without a process it does not exist."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and namespace(int(name)) in namespaces]


def links() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir()}


@pytest.fixture
def outside() -> Iterator[None]:
    """The machine's own network is as it was."""
    before, own = links(), namespace(os.getpid())
    yield
    assert links() == before
    assert namespace(os.getpid()) == own


def stray(network: lab.Network) -> set[int]:
    """Start processes in every rank; the namespaces of the network, once they are all inside."""
    own = namespace(os.getpid())
    ranks = [network.popen(rank, STRAYING) for rank in range(network.num_ranks)]
    wait_until(lambda: all(namespace(rank.pid) not in (own, None) for rank in ranks))
    found = {namespace(rank.pid) for rank in ranks} | {namespace(network.keeper_pid)}
    namespaces = {inode for inode in found if inode is not None}
    assert len(namespaces) == network.num_ranks + 1
    wait_until(lambda: len(inside(namespaces)) >= 2 * network.num_ranks + 1)
    return namespaces


def children(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def kill_at_once(pids: list[int]) -> None:
    """They are stopped first, so that none sees another one end."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, number)


def test_close_and_an_exception_leave_nothing(outside: None) -> None:
    for error in (None, ZeroDivisionError):
        namespaces = set()
        with contextlib.suppress(ZeroDivisionError), lab.Network(2, rate="100mbit", rtt="2ms") as network:
            namespaces = stray(network)
            if error:
                raise error
        assert len(namespaces) == 3
        assert inside(namespaces) == []


@pytest.mark.parametrize("killed", ["parent", "keeper", "keeper guard", "parent keeper guard", "all"])
def test_nothing_is_left_whatever_is_killed_at_once(outside: None, killed: str) -> None:
    """Ranks and their grandchildren end, before anybody closes the network."""
    if ("guard" in killed or killed == "all") and os.geteuid() != 0:
        pytest.skip("processes can be started in a PID namespace by root only")
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    keeper, *ranks = map(int, parent.stdout.readline().split())
    namespaces = {inode for inode in map(namespace, (keeper, *ranks)) if inode is not None}
    assert len(namespaces) == 3
    assert namespace(os.getpid()) not in namespaces
    # Two ranks and their grandchildren, the keeper, its guard and the first process of the PID namespace, the relay.
    wait_until(lambda: len(inside(namespaces)) == (8 if os.geteuid() == 0 else 7))
    guard, *first = children(keeper)
    pids = {"parent": parent.pid, "keeper": keeper, "guard": guard}
    kill_at_once([*pids.values(), *first[:1]] if killed == "all" else [pids[name] for name in killed.split()])
    # Without a guard the relay ends with its parent only.
    wait_until(lambda: len(inside(namespaces)) == (killed == "keeper guard"))
    parent.kill()
    parent.wait()
    wait_until(lambda: not inside(namespaces))
    parent.stdout.close()


def test_a_network_outlives_the_thread_that_made_it(outside: None) -> None:
    made: list[lab.Network] = []
    maker = threading.Thread(target=lambda: made.append(lab.Network(1)))
    maker.start()
    maker.join()
    time.sleep(0.1)
    with made[0] as network:
        assert network.popen(0, ["true"]).wait() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_and_leaves_nothing(outside: None, number: signal.Signals) -> None:
    rank = (
        "import os, signal, sys, time\n"
        "def stop(number, frame):\n"
        "    print('told to stop by', number)\n"
        "    sys.exit(3)\n"
        "signal.signal(signal.SIGINT, stop), signal.signal(signal.SIGTERM, stop)\n"
        "print(os.stat('/proc/self/ns/net').st_ino, flush=True)\n"
        "time.sleep(300)\n"
    )
    argv = [sys.executable, "-m", "thinwire", "lab", "--rate", "100mbit", "--", *PYTHON, rank]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(argv, **pipes, start_new_session=True)
    assert process.stdout is not None
    namespaces = {int(process.stdout.readline().split(" ")[1]) for _ in range(2)}
    assert len(namespaces) == 2
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=100)
    assert process.returncode == 128 + number
    assert {f"[{rank}] told to stop by {int(number)}" for rank in range(2)} == set(stdout.splitlines())
    assert f"{number.name}: passed on to all ranks" in stderr
    assert inside(namespaces) == []


def test_output_has_its_rank_before_it_and_bytes_are_reported(capfd: pytest.CaptureFixture[str]) -> None:
    rank = "import os, sys; print('out', os.environ['RANK'], end='\\r'); print('now'); print('err', file=sys.stderr)"
    assert lab.launch([*PYTHON, rank], num_ranks=2, rate="100mbit").exit_code == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[0] now", "[1] now"]
    lines = err.splitlines()
    assert lines[0].startswith("2 ranks: 100 Mbit/s each way")
    assert sorted(line for line in lines if line.startswith("[")) == ["[0] err", "[1] err"]
    assert [line.split(":")[0] for line in lines[-2:]] == ["rank 0", "rank 1"]


def test_a_failing_rank_gives_the_code_and_the_others_end_by_themselves_or_are_ended(
    capfd: pytest.CaptureFixture[str],
) -> None:
    rank = "import os, sys, time; os.environ['RANK'] == '1' and sys.exit(7); time.sleep(300)"
    start = time.monotonic()
    assert lab.launch([*PYTHON, rank], num_ranks=3, grace_s=0.5).exit_code == 7
    assert 0.5 <= time.monotonic() - start < 30
    assert "rank 1 failed with exit code 7" in capfd.readouterr().err
    rank = "import os, time; os.environ['RANK'] == '0' and os.kill(os.getpid(), 11); time.sleep(0.3); print('done')"
    assert lab.launch([*PYTHON, rank], num_ranks=2, grace_s=20.0).exit_code == 128 + signal.SIGSEGV
    assert "[1] done" in capfd.readouterr().out


def test_a_rank_that_hears_nothing_is_killed_after_a_timeout(capfd: pytest.CaptureFixture[str]) -> None:
    rank = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(300)"
    )
    start = time.monotonic()
    assert lab.launch([*PYTHON, rank], num_ranks=1, timeout=1.0).exit_code == 124
    assert time.monotonic() - start < 40
    out, err = capfd.readouterr()
    assert "[0] deaf" in out
    assert "not done after 1 s" in err


TORCHRUN_STYLE = """
import argparse
import torch, torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--elements", type=int)
elements = parser.parse_args().elements
dist.init_process_group("gloo")
values = torch.full((elements,), float(dist.get_rank() + 1))
dist.all_reduce(values)
assert torch.equal(values, torch.full((elements,), 3.0)), values
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {values[0].item()}")
dist.destroy_process_group()
"""


def test_the_command_runs_a_torchrun_style_script_unmodified(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script, figures = tmp_path / "train.py", tmp_path / "figures.json"
    script.write_text(TORCHRUN_STYLE)
    options = ["--rate", "200mbit", "--json", str(figures)]
    train = ["--", sys.executable, str(script), "--elements", "500000"]
    assert tyro.cli(lab_command, args=[*options, *train]) == 0
    out = capfd.readouterr().out
    assert sorted(out.splitlines()) == [f"[{r}] rank {r} of 2: 3.0" for r in range(2)]
    written = json.loads(figures.read_text())
    assert written["about"]["command"] == train[1:]
    values = {row["name"]: row["value"] for row in written["results"]}
    assert values["exit_code"] == 0
    # Two ranks all-reduce 2 MB: each sends and receives 2 MB, and 5 % of headers; some is the rendezvous.
    for rank in range(2):
        for way in ("sent", "received"):
            assert 2_000_000 * 1514 / 1448 < values[f"{way}_bytes/rank{rank}"] < 2_300_000


def test_what_cannot_be_done_is_said_and_is_no_exception(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["lab", "--rate", "fast", "--", "true"]) == USAGE
    assert main(["lab", "--"]) == USAGE
    assert main(["lab", "--", "no-such-command"]) == USAGE
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr("thinwire_tools.lab.tools.SYSTEM_DIRECTORIES", ())
    assert main(["lab", "--", "true"]) == UNAVAILABLE
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("thinwire lab: ")]
    assert len(errors) == 4
    for error, words in zip(errors, ("is not a rate", "two dashes", "no-such-command", "is missing"), strict=True):
        assert words in error
