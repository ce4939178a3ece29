"""For all tests."""

from __future__ import annotations

import functools
import os
import re
import signal
from collections.abc import Generator, Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from thinwire_tools import lab

# PyTorch's stores ask for the names of addresses to write them into logs, and wait 5 s for each answer that is lost.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# How long an example takes, to make or to run, says more of what else the machine does.
settings.register_profile("thinwire", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("thinwire")

SLOW = Path(__file__).parent / "slow.txt"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regenerate", action="store_true", help="rewrite the files of tests/golden and print changes")


def pytest_configure() -> None:
    """Processes that tests start can be interrupted, also where pytest itself runs in the background: a shell makes
    those ignore Ctrl-C, and whoever ignores it hands that on."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Thirty files ask whether networks can be made, which makes one: the answer to the first is that to all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lab, "unavailable", functools.cache(lab.unavailable))
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what slow.txt lists, which is measured (tools/slow_tests.py), not judged.

    Of slow experiments the framework's and one paper's belong to every change. The small versions of the others
    (``smoke``) are for who changes them; their recorded runs are judged anew with every change.
    """
    slow = {line for line in SLOW.read_text().splitlines() if line and not line.startswith("#")}
    for item in items:
        function = item.nodeid.partition("[")[0]
        if function in slow or function.partition("::")[0] in slow:
            experiment = re.match(r"tests/experiments/test_(bench_|repro_(?!aqsgd))", function)
            item.add_marker(pytest.mark.smoke if experiment else pytest.mark.slow)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """PyTorch draws its own first seed: a failure could not be repeated."""
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """One thread but where a test says otherwise: those of small tensors only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _fork_server() -> None:
    """The one that all ranks come from has loaded what they need, whichever test is the first to start one."""
    import harness  # noqa: F401 - says what that is

    with pytest.MonkeyPatch.context() as patch:
        # Read when PyTorch is loaded, and ranks share what cores there are.
        patch.setenv("OMP_NUM_THREADS", "1")
        forkserver.ensure_running()
