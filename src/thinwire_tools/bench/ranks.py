"""Run a measurement on a few ranks, over an emulated network or loopback."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from thinwire_tools import lab
from thinwire_tools.compare.forked import ForkedProcess


def run_ranks(module: str, config: dict[str, Any], num_ranks: int, network: lab.Network | None) -> Any:
    """Run ``main()`` of ``module``, which calls `bench.rank.serve`, on each rank, and return rank 0's answer.

    Raises:
        RuntimeError: A rank failed. The message has the end of its log.
    """
    link = network or lab.Loopback(num_ranks)
    with tempfile.TemporaryDirectory(prefix="thinwire-bench-") as folder:
        logs = [Path(folder, f"rank{rank}.log") for rank in range(num_ranks)]
        ranks: list[ForkedProcess] = []
        try:
            for rank, log in enumerate(logs):
                ranks.append(ForkedProcess(module, link.namespaces(rank), log))
            for rank in ranks:
                rank.send(config)
            answer = ranks[0].stdout.readall()
            codes = [rank.wait() for rank in ranks]
        finally:
            for rank in ranks:
                rank.close()
        for code, log in zip(codes, logs, strict=True):
            if code:
                end = log.read_text(errors="replace")[-2000:] if log.exists() else "it ended before it had a log"
                raise RuntimeError(f"a rank ended with exit code {code}:\n{end}")
    return json.loads(answer)
