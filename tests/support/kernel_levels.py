"""The same calls at every instruction-set level, with several threads, and in torch operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from kernel_cases import same
from thinwire import kernels
from thinwire.kernels import native

LEVELS = native.CORE.levels() if native.CORE else ["none"]

needs_native = pytest.mark.skipif(not kernels.HAVE_NATIVE, reason="the native core is not built")


@contextmanager
def at(level: str, threads: int = 1) -> Iterator[None]:
    """Runs at an instruction-set level, or as the ``reference``."""
    core, before, count = native.CORE, native.cpu_level(), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        if level == native.REFERENCE:
            native.CORE = None
        else:
            native.choose(native.core(), level)
        yield
    finally:
        native.CORE = core
        torch.set_num_threads(count)
        if core is not None:
            native.choose(core, before)


def is_same(a: Tensor, b: Tensor) -> bool:
    return same(a, b) if a.is_floating_point() else torch.equal(a, b)


def check(run: Callable[[], dict[str, Tensor]], *, threads: tuple[int, ...] = (1,), about: object = None) -> None:
    """What ``run`` returns has the same bits at every level, with any number of threads, as in the reference."""
    with at(native.REFERENCE):
        wanted = run()
    for level in LEVELS:
        for count in threads:
            with at(level, count):
                got = run()
            wrong = [name for name, value in wanted.items() if not is_same(value, got[name])]
            assert not wrong, f"{wrong} differ at {level}, {count} threads: {about}"
