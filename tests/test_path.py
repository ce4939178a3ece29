"""How many Python files a message goes through, counted by tracing calls; docs/how-it-works.md walks the same files.

A path is made of the files on the call stacks from the hook down to C++: those that have control while a message is
made, and through which an error comes back. Files of which only a helper is called, which returns at once, are counted
by themselves.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from harness import run_ranks
from pipelines import BATCH, Pipe, samples
from sharded import build, compress
from thinwire.local import DiLoCo

NATIVE = "thinwire.kernels._native"
CODES = ("encode", "decode", "reduce")
ROOT = Path(thinwire.__file__).parent
PAGE = Path(__file__).parents[1] / "docs" / "how-it-works.md"


class Calls:
    """What is called in the library, in any thread that starts after it."""

    def __init__(self) -> None:
        self.touched: dict[str, None] = {}
        """The files whose functions are called, in order."""
        self.stacks: dict[str, None] = {}
        """Those of them that are on the stack when a message is handed to an executor, and when C++ codes one."""
        self.kernels: set[str] = set()
        self._on = False
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: Any, event: str, argument: Any) -> None:
        if not self._on:
            return
        if event == "call" and (file := _file(frame)) is not None:
            self.touched.setdefault(file)
            if frame.f_code.co_name == "submit" and file == "runtime/executor.py":
                self._stack(frame)
        elif event == "c_call" and _is_kernel(argument):
            self.kernels.add(argument.__name__)
            self._stack(frame)

    def _stack(self, frame: Any) -> None:
        files = []
        while frame is not None:
            if (file := _file(frame)) is not None:
                files.append(file)
            frame = frame.f_back
        for file in reversed(files):
            self.stacks.setdefault(file)

    def during(self, run: Callable[[], object]) -> Calls:
        self._on = True
        run()
        self._on = False
        sys.setprofile(None)
        threading.setprofile(None)
        return self


def _file(frame: Any) -> str | None:
    name = frame.f_code.co_filename
    return str(Path(name).relative_to(ROOT)) if ROOT in Path(name).parents else None


def _is_kernel(function: Any) -> bool:
    return getattr(function, "__module__", None) == NATIVE and function.__name__ in CODES


def _bucket(rank: int) -> Calls:
    calls = Calls()
    model = DistributedDataParallel(nn.Linear(256, 256, bias=False))
    thinwire.compress(model, "minmax(bits=4)", skip_if_slower=False)
    x = torch.randn(8, 256)
    for _ in range(4):
        model(x).sum().backward()
    loss = model(x).sum()
    return calls.during(loss.backward)


def _gather(rank: int) -> Calls:
    calls = Calls()
    model = build()
    compress(model, "minmax(bits=4, bucket=64)")
    with torch.no_grad():
        for _ in range(2):
            model(torch.randn(4, 7))
        return calls.during(lambda: model(torch.randn(4, 7)))


def _activation(rank: int) -> Calls:
    calls = Calls()
    x, y = samples()
    pipe = Pipe(rank, 2, forward="delta(maxabs(bits=4))", backward="maxabs(bits=8)")
    pipe.epoch(0, x, y)
    return calls.during(lambda: pipe.step(x[:BATCH], y[:BATCH], range(BATCH)))


def _outer_step(rank: int) -> Calls:
    calls = Calls()
    model = nn.Linear(256, 256, bias=False)
    local = DiLoCo(
        model, torch.optim.SGD(model.parameters(), lr=0.1), every=1, compressor="minmax(bits=4)", feedback=False
    )
    local.step()
    return calls.during(local.step)


CODED = {"threads.py", "compressors/_core/bucketed.py", "kernels/ops.py"}
CHANNEL = {"runtime/channel.py", "runtime/executor.py"} | CODED
REDUCTION = {"collectives/reduction.py", "collectives/message.py"} | CHANNEL
OUTER = {"local/diloco.py", "runtime/bucket_engine.py", "collectives/allgather.py"}  # two workers gather
STAGE = {f"pipeline/{name}.py" for name in ("boundary", "message", "pipeline")}
PATHS = {
    "bucket": (_bucket, {"integrations/ddp.py", "runtime/bucket_engine.py"} | REDUCTION, CODES, 22),
    "gather": (_gather, {"integrations/fsdp.py", "runtime/sharded_engine.py"} | REDUCTION, ("encode", "decode"), 22),
    "activation": (_activation, STAGE | CODED, ("encode", "decode"), 26),
    "outer step": (_outer_step, OUTER | CHANNEL, ("encode",), 24),
}
"""By path: what runs it, the files on the stack, the kernels, and the most files that it touches."""


@pytest.mark.parametrize("name", PATHS)
def test_a_message_goes_through_at_most_nine_files(name: str) -> None:
    run, stacks, kernels, most = PATHS[name]
    page = PAGE.read_text()
    for calls in run_ranks(run, 2):
        assert calls.kernels == set(kernels)
        assert set(calls.stacks) == stacks
        assert len(calls.stacks) <= 9
        assert set(calls.stacks) <= set(calls.touched)
        assert len(calls.touched) <= most, "\n".join(calls.touched)
        for file in calls.stacks:
            assert f"`{file}`" in page, f"{PAGE.name} does not mention {file}"
