"""Start a module as every rank of a small world, over an emulated network or loopback, and read rank 0's answer."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from thinwire import lab


def run_ranks(module: str, args: Sequence[str], num_ranks: int, network: lab.Network | None) -> dict[str, Any]:
    """Run ``python -m module args`` as each rank; the JSON object that rank 0 printed last.

    Raises:
        RuntimeError: a rank failed; with the end of what the ranks logged.
    """
    argv = [sys.executable, "-m", module, *args]
    port = str(_free_port())
    with tempfile.TemporaryFile() as log:
        processes = []
        try:
            for rank in range(num_ranks):
                out = subprocess.PIPE if rank == 0 else log
                if network is not None:
                    processes.append(network.popen(rank, argv, stdout=out, stderr=log))
                else:
                    env = {**os.environ, **_loopback(rank, num_ranks, port)}
                    processes.append(subprocess.Popen(argv, stdout=out, stderr=log, env=env))
            out, _ = processes[0].communicate()
            codes = [process.wait() for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            log.seek(0)
            tail = log.read().decode(errors="replace")[-2000:]
            raise RuntimeError(f"a rank ended with exit code {max(codes, key=abs)}:\n{tail}")
    return json.loads(out.splitlines()[-1])


def _loopback(rank: int, num_ranks: int, port: str) -> dict[str, str]:
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
