"""Ranks that ``thinwire doctor`` starts on this machine, over loopback or over an emulated network."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from thinwire_tools import lab
from thinwire_tools.doctor.examine import LOOPBACK, Request, argv
from thinwire_tools.doctor.watched import DoctorError
from thinwire_tools.lab.units import parse_rates

_STDERR, _LAST_WORDS_S, _POLL_S = 2, 2.0, 0.05


def examine_here(
    request: Request, ranks: int, ranks_per_node: int, rate: str | None, rtt: str | None, timeout: float
) -> dict[str, Any]:
    """Start the ranks on this machine, and return what rank 0 wrote."""
    if ranks < 2:
        raise ValueError(f"--ranks {ranks}: at least 2, or nothing is sent")
    if ranks_per_node < 1:
        raise ValueError(f"--ranks-per-node {ranks_per_node}: at least 1")
    if ranks_per_node != 1 and rate is None and rtt is None:
        raise ValueError("--ranks-per-node is for an emulated network: give --rate or --rtt, too")
    request = replace(request, progress=True)
    sys.stderr.write(f"thinwire doctor: starting {ranks} ranks on this machine\n")
    with tempfile.TemporaryDirectory(prefix="thinwire-doctor-") as folder:
        path = Path(folder) / "answer.json"
        if rate is None and rtt is None:
            code = _on_loopback(replace(request, link=LOOPBACK), ranks, path, timeout)
        else:
            line = min(parse_rates(rate, max(1, ranks // ranks_per_node))) / 8 if rate is not None else None
            asked = replace(request, line_rate=request.line_rate or line, link=f"{rate or 'unshaped'}, +{rtt or '0ms'}")
            shape: dict[str, Any] = {"ranks_per_node": ranks_per_node, "rate": rate, "rtt": rtt}
            code = lab.launch(argv(asked, path), num_ranks=ranks, timeout=timeout, **shape).exit_code
        if code == 128 + signal.SIGINT:
            raise KeyboardInterrupt
        if not path.exists():
            raise DoctorError(f"the ranks ended with exit code {code} and without an answer: see what they said above")
        return json.loads(path.read_text())


def _on_loopback(request: Request, ranks: int, path: Path, timeout: float) -> int:
    """Return the exit code of the first rank that failed, 124 after the timeout, otherwise 0."""
    with lab.Loopback(ranks) as loopback:
        # The script's output is sent to standard error: standard output is for the report.
        started = [loopback.popen(rank, argv(request, path), stdout=_STDERR) for rank in range(ranks)]
        return _wait(started, time.monotonic() + timeout)


def _wait(ranks: Sequence[subprocess.Popen[bytes]], until: float) -> int:
    failed = 0
    while time.monotonic() < until:
        codes = [process.poll() for process in ranks]
        if failed or None not in codes:
            return failed or next(filter(None, codes), 0)
        failed = next(filter(None, codes), 0)
        # Another rank may have the whole error, and is about to print it.
        time.sleep(_LAST_WORDS_S if failed else _POLL_S)
    return lab.TIMED_OUT
