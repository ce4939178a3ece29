"""``python -m experiments soak``: a very long training of four ranks, whose memory, threads and files must not grow."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from experiments.framework.pages import show
from thinwire_tools.compare.train import digest
from thinwire_tools.ranks import Channel, launch_ranks
from thinwire_tools.results import OutputFile, Results

_WIDTH, _MARKS = 48, 10
_MARKED = ("step", "memory_bytes", "threads", "files", "seconds")


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
    about: dict[str, Any] = {"ranks": ranks, "compressor": compressor, "transport": transport, "marks": []}
    marks: dict[int, list[dict[str, Any]]] = {}

    def on_event(_: int, mark: dict[str, Any]) -> None:
        together = marks.setdefault(mark["step"], [])
        together.append(mark)
        if len(together) == ranks:
            row = {name: max(mark[name] for mark in together) for name in _MARKED}
            about["marks"].append({**row, "alike": len({mark["digest"] for mark in together}) == 1})
            if json:
                # After every tenth, so that a run that is stopped has the figures of the steps that it did.
                _results(about).write(json)

    with launch_ranks(_Rank, ranks, None, timeout_s=300) as (processes, _):
        processes.silence_s = None
        processes.run(_Rank.train, {"steps": steps, "compressor": compressor, "transport": transport}, on_event)
    results, rows = _results(about), about["marks"]
    show("soak", results, json)
    first, last, same = rows[0], rows[-1], all(row["alike"] for row in rows)
    return 0 if same and last["threads"] <= first["threads"] and last["files"] <= first["files"] else 1


def _results(about: dict[str, Any]) -> Results:
    first, last = about["marks"][0], about["marks"][-1]
    results = Results("python -m experiments soak", about={"steps": last["step"], **about})
    results.add("steps", last["step"], "")
    results.add("memory_growth", last["memory_bytes"] - first["memory_bytes"], "B")
    results.add("threads_growth", last["threads"] - first["threads"], "")
    results.add("files_growth", last["files"] - first["files"], "")
    results.add("replicas_alike", float(all(row["alike"] for row in about["marks"])), "")
    return results


class _Rank:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def train(self, steps: int, compressor: str, transport: Any) -> dict[str, Any]:
        """Train, and tell of this process after every tenth of the steps."""
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, _WIDTH)))
        thinwire.compress(model, compressor, skip_if_slower=False, network=thinwire.Network(transport=transport))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(dist.get_rank())
        started = time.monotonic()
        for step in range(1, steps + 1):
            x = torch.randn(4, _WIDTH, generator=generator)
            (model(x) - x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % (steps // _MARKS) == 0:
                mark = {"memory_bytes": _resident_bytes(), "threads": len(os.listdir("/proc/self/task"))}
                mark |= {"files": len(os.listdir("/proc/self/fd")), "seconds": round(time.monotonic() - started, 1)}
                self._channel.send("mark", step=step, digest=digest(model.parameters()), **mark)
        return {}


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
