"""PyTorch's tests of its process groups, one after another, on gloo or, in its place, on thinwire.

They are in PyTorch's wheel, and read ``BACKEND`` and ``WORLD_SIZE`` when they are imported. Many are skipped where the
backend has a name that they do not know: so they are told that it is gloo, and get process groups of thinwire. Ranks
are forked, because importing PyTorch twice for each of 300 tests takes an hour. Tests of communication hooks ask for a
GPU on each rank, and need it for nothing but where they put tensors: what asks for a device gets the CPU."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import sys
import unittest
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed import distributed_test
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

import thinwire

HOOK_TESTS = (
    "test_ddp_broadcast_buffer_via_hook",
    "test_ddp_buffer_hook_allreduce",
    "test_ddp_buffer_hook_allreduce_return_future",
    "test_ddp_comm_hook_logging",
    "test_ddp_hook_parity_allreduce",
    "test_ddp_hook_parity_post_localSGD",
    "test_ddp_hook_parity_powerSGD",
)
"""Those that are skipped for lack of GPUs alone."""
_TESTS = distributed_test.DistributedTest._DistTestBase


def on_cpu(name: str) -> Callable[[Any], None]:
    """The body of a test of PyTorch's, without the decorators that ask for GPUs, on the CPU."""
    body = inspect.unwrap(getattr(_TESTS, name))

    def run(self: Any) -> None:
        with _cpu_for_gpu():
            body(self)

    run.__name__ = name
    return run


class _CpuForGpu(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.cuda or (func is Tensor.to and isinstance(args[1], int)):
            return args[0]
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@contextlib.contextmanager
def _cpu_for_gpu() -> Iterator[None]:
    ddp, to = nn.parallel.DistributedDataParallel, nn.Module.to

    def wrapped(module: nn.Module, device_ids: Any = None, **options: Any) -> nn.Module:
        return ddp(module, **options)

    def moved(module: nn.Module, *args: Any, **options: Any) -> nn.Module:
        return module if args and isinstance(args[0], int) else to(module, *args, **options)

    with contextlib.ExitStack() as stack:
        for name in ("set_device", "manual_seed", "synchronize"):
            stack.enter_context(mock.patch.object(torch.cuda, name))
        stack.enter_context(mock.patch.object(nn.parallel, "DistributedDataParallel", wrapped))
        stack.enter_context(mock.patch.object(nn.Module, "to", moved))
        stack.enter_context(mock.patch.object(nn.Module, "cuda", lambda module, *_: module))
        stack.enter_context(_CpuForGpu())
        yield


SPEC = "THINWIRE_CONFORMANCE_SPEC"
"""The compressor of every buffer, of one element on; ``default`` for thinwire's options without any; gloo itself where
it is not set."""
STATS = "THINWIRE_CONFORMANCE_STATS"
"""A folder, where every rank writes how many compressed collectives its process groups ran."""


class Suite(TestDistBackend, DistributedTest._DistTestBase):
    """The suite, with ranks that are forked."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    @classmethod
    def _run(cls, rank: int, test_name: str, *args: Any, **kwargs: Any) -> NoReturn:
        spec = os.environ.get(SPEC)
        if spec:
            options = thinwire.ProcessGroupOptions()
            if spec != "default":
                options = thinwire.ProcessGroupOptions(spec, min_numel=1, where=lambda _: True)
            dist.init_process_group = partial(_init_thinwire, dist.init_process_group, options)
        super()._run(rank, test_name, *args, **kwargs)

    def run_test(self, test_name: str, parent_pipe: Any) -> None:
        super().run_test(test_name, parent_pipe)
        groups = [group for group in distributed_c10d._world.pg_map if isinstance(group, thinwire.ProcessGroup)]
        compressed = sum(group.stats.compressed for group in groups)
        Path(os.environ[STATS], f"{test_name}.{self.rank}").write_text(str(compressed))


for _name in HOOK_TESTS:
    setattr(Suite, _name, on_cpu(_name))


def _init_thinwire(init: Callable[..., None], options: thinwire.ProcessGroupOptions, **arguments: Any) -> None:
    init(**{**arguments, "backend": "thinwire", "pg_options": options})


class _Lines(unittest.TestResult):
    """Writes a line of JSON for each test that has ended."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file.open("a")

    def _write(self, test: unittest.TestCase, result: str, why: str = "") -> None:
        name = test.id().split(".")[-1]
        compressed = sum(int(file.read_text()) for file in Path(os.environ[STATS]).glob(f"{name}.*"))
        row = {"test": name, "result": result, "why": why, "compressed": compressed}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._write(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._write(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._write(test, "failed", self._exc_info_to_string(err, test))  # pyright: ignore[reportAttributeAccessIssue]

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        # A rank that exits with a code that means "skipped" arrives here as an error of the unittest that is so named.
        self.addFailure(test, err)


def main(file: Path, names: list[str]) -> None:
    """Run the tests of these names, or all, and add a line for each to ``file``, if it has none yet."""
    done = {json.loads(line)["test"] for line in file.read_text().splitlines()} if file.exists() else set()
    known = unittest.TestLoader().getTestCaseNames(Suite)
    suite = unittest.TestSuite(Suite(name) for name in known if name not in done and (not names or name in names))
    suite.run(_Lines(file))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
