"""``python -m experiments soak``: a very long training of four ranks, whose memory, threads and files must not grow."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import socket
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from experiments.framework.pages import show
from experiments.validation.chaos import PRELOADED
from thinwire_tools.results import OutputFile, Results

_WIDTH, _MARKS = 48, 10
_processes = multiprocessing.get_context("forkserver")


def soak(
    *,
    steps: int = 100_000,
    ranks: int = 4,
    compressor: str = "ef(minmax(bits=4))",
    transport: str = "auto",
    json: OutputFile = None,
) -> int:
    """Train a small model for very many steps, and compare each process with what it was after a tenth of them.

    Examples:
      python -m experiments soak --json benchmarks/validation/soak.json
      python -m experiments soak --steps 2000 --transport group

    Args:
        steps: of the optimizer.
        ranks: number of processes.
        compressor: its spec.
        transport: auto, group or shared.
        json: write the figures to this file.
    """
    _processes.set_forkserver_preload(PRELOADED)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    pipes: list[Connection] = []
    for rank in range(ranks):
        mine, theirs = _processes.Pipe(duplex=False)
        _processes.Process(
            target=_rank, args=(rank, ranks, port, steps, compressor, transport, theirs), daemon=True
        ).start()
        theirs.close()
        pipes.append(mine)
    rows: list[dict[str, Any]] = []
    results, same = Results("python -m experiments soak"), True
    for _ in range(_MARKS):
        marks = [pipe.recv() for pipe in pipes]
        alike = len({mark["digest"] for mark in marks}) == 1
        same &= alike
        row = {
            name: max(mark[name] for mark in marks) for name in ("step", "memory_bytes", "threads", "files", "seconds")
        }
        rows.append({**row, "alike": alike})
        about = {"steps": row["step"], "ranks": ranks, "compressor": compressor, "transport": transport}
        results = _results({**about, "marks": rows}, same=same)
        if json:
            # After every tenth, so that a run that is stopped has the figures of the steps that it did.
            results.write(json)
    show("soak", results, json)
    first, last = rows[0], rows[-1]
    return 0 if same and last["threads"] <= first["threads"] and last["files"] <= first["files"] else 1


def _results(about: dict[str, Any], *, same: bool) -> Results:
    first, last = about["marks"][0], about["marks"][-1]
    results = Results("python -m experiments soak", about=about)
    results.add("steps", last["step"], "")
    results.add("memory_growth", last["memory_bytes"] - first["memory_bytes"], "B")
    results.add("threads_growth", last["threads"] - first["threads"], "")
    results.add("files_growth", last["files"] - first["files"], "")
    results.add("replicas_alike", float(same), "")
    return results


def _rank(rank: int, ranks: int, port: int, steps: int, compressor: str, transport: Any, pipe: Connection) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks, timeout=timedelta(seconds=300))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, _WIDTH)))
    network = thinwire.Network(transport=transport)
    thinwire.compress(model, compressor, skip_if_slower=False, network=network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    started = time.monotonic()
    for step in range(1, steps + 1):
        x = torch.randn(4, _WIDTH, generator=generator)
        (model(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % (steps // _MARKS) == 0:
            digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
            pipe.send(
                {
                    "step": step,
                    "memory_bytes": _resident_bytes(),
                    "threads": len(os.listdir("/proc/self/task")),
                    "files": len(os.listdir("/proc/self/fd")),
                    "digest": digest,
                    "seconds": round(time.monotonic() - started, 1),
                }
            )
    os._exit(0)


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
