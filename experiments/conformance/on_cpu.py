"""PyTorch's tests of communication hooks, which ask for a GPU on each rank, run with tensors of the CPU.

Nothing in their bodies needs a GPU but where they put tensors. So what asks for a device gets the CPU.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed import distributed_test

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
