"""``python -m experiments bench gpu``: bytes and launches of the kernels in Triton, counted in its interpreter."""

# Triton is not installed everywhere.
# pyright: reportMissingImports=false
from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from experiments.framework.pages import show
from thinwire import kernels
from thinwire.collectives import (
    CollectiveCall,
    DeviceBuffers,
    DeviceLoopbackTransport,
    Layer,
    Layout,
    LoopbackTransport,
    device_all_reduce,
)
from thinwire.compressors import Coded, State, parse
from thinwire.kernels import Format, Residual, Table
from thinwire_tools.results import OutputFile, Results

FORMATS = {
    "minmax(bits=4)": Format(4, 128),
    "minmax(bits=8, bucket=1024)": Format(8, 1024),
    "maxabs(bits=4)": Format(4, 128, "maxabs"),
    "qsgd(bits=4)": Format(4, 128, "norm"),
    "minmax(bits=4, bucket=100)": Format(4, 100),
}
SIZES = (2**14, 512, 2**12, 1000)
RANKS = 4
_H100 = 3.35e12
"""Bytes a second of an H100's memory."""
_SECTOR = 32
"""Bytes that a GPU's memory moves at least."""


class Counter(TorchDispatchMode):
    """Counts what the device would do inside: launches, and bytes between its memory and its multiprocessors.

    A program moves each sector that it touches once, as its first-level cache keeps what it reads. ``asked`` counts a
    sector again for each load and store of a program. With ``dry``, no kernel runs.
    """

    def __init__(self, *, dry: bool = False) -> None:
        super().__init__()
        self._dry = dry
        self.launches = self.asked = self._by_torch = 0
        self._interpreting = False
        self._sectors: dict[Any, list[np.ndarray]] = defaultdict(list)
        self._patches = ExitStack()

    def __enter__(self) -> Counter:
        from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

        def wrap(name: str, pointer: int, mask: int, *kinds: str) -> None:
            access = getattr(InterpreterBuilder, name)

            def counted(builder, *args):
                sectors = np.unique(args[pointer].data[args[mask].data] // _SECTOR)
                for kind in kinds:
                    self._sectors[self.launches, builder.grid_idx, kind].append(sectors)
                    self.asked += _SECTOR * len(sectors)
                return access(builder, *args)

            self._patches.enter_context(patch.object(InterpreterBuilder, name, counted))

        wrap("create_masked_load", 0, 1, "read")
        wrap("create_masked_store", 0, 2, "written")
        wrap("create_atomic_rmw", 1, 3, "read", "written")
        launch = GridExecutor.__call__

        def counted_launch(*args, **options):
            self.launches += 1
            self._interpreting = True
            try:
                if not self._dry:
                    launch(*args, **options)
            finally:
                self._interpreting = False

        self._patches.enter_context(patch.object(GridExecutor, "__call__", counted_launch))
        self._patches.enter_context(patch("thinwire.kernels.native.asynchronous", lambda tensor: True))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not (self._interpreting or func.is_view or "empty" in func.__name__):
            tensors = {t.data_ptr(): t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)}
            num_bytes = sum(t.numel() * t.element_size() for t in tensors.values())
            self.launches, self.asked = self.launches + 1, self.asked + num_bytes
            self._by_torch += num_bytes
        return result

    @property
    def moved(self) -> int:
        """Number of bytes that programs and PyTorch's own operations move."""
        sectors = sum(len(np.unique(np.concatenate(touched))) for touched in self._sectors.values())
        return _SECTOR * sectors + self._by_torch


class Count(NamedTuple):
    """One operation on some values: its launches, and its bytes."""

    launches: int
    floor: int
    """Bytes of its arguments and of its results, each once."""
    moved: int
    asked: int


def count(run: Callable[[], object], floor: int) -> Count:
    """Count a call of ``run`` in the steady state: tables are on the device already."""
    with Counter(dry=True):
        run()
    with Counter() as counter:
        run()
    return Count(counter.launches, floor, counter.moved, counter.asked)


def operations(form: Format, sizes: Sequence[int], num_messages: int) -> Iterator[tuple[str, Count]]:
    """Count each operation of a format on layers of these sizes; sums and means are of so many messages."""
    payloads = [kernels.bucketed_bytes(size, form) for size in sizes]
    starts, places = np.cumsum([0, *sizes]), np.cumsum([0, *payloads])
    rows = [(int(starts[i]), size, 0, int(places[i]), i) for i, size in enumerate(sizes)]
    table, coded = Table(torch.tensor(rows, dtype=torch.int64, device="cpu")), sum(payloads)
    x, y, now, then = (torch.randn(sum(sizes), dtype=torch.float32, device="cpu") for _ in range(4))
    got, values = torch.zeros(num_messages + 1, coded, dtype=torch.uint8, device="cpu"), 4 * sum(sizes)
    sent, *received = got
    fed = Residual(now, then)

    def encode(residual: Residual | None = None) -> None:
        kernels.bucketed_encode(x, table, sent, form, key=1, residual=residual)

    def reduce(residual: Residual | None = None) -> None:
        scale = 1 / (num_messages + 1)
        kernels.bucketed_reduce(received, x, table, sent, y, form, scale=scale, key=1, residual=residual)

    yield "encode", count(encode, values + coded)
    yield "encode with a residual", count(lambda: encode(fed), 3 * values + coded)
    yield "decode", count(lambda: kernels.bucketed_decode(sent, table, y, form), values + coded)
    yield "decode, add", count(lambda: kernels.bucketed_decode(sent, table, y, form, add=True), 2 * values + coded)
    read = num_messages * coded
    yield "mean", count(lambda: kernels.bucketed_sum(received, None, table, y, form, scale=0.25), values + read)
    yield "sum", count(lambda: kernels.bucketed_sum(received, x, table, y, form), 2 * values + read)
    yield "reduce", count(reduce, 2 * values + read + coded)
    yield "reduce with a residual", count(lambda: reduce(fed), 4 * values + read + coded)


def bucket_launches(spec: str, sizes: Sequence[int], num_ranks: int) -> int:
    """Return the launches of a rank for a DDP bucket of such layers, the collectives of NCCL among them."""
    compressor = parse(spec)
    assert isinstance(compressor, Coded)
    layers = [Layer(f"layer{i}", sum(sizes[:i]), (size,), compressor) for i, size in enumerate(sizes)]
    layout, device = Layout.build(layers, num_ranks, torch.float32), torch.device("cpu")
    transport = DeviceLoopbackTransport.world(LoopbackTransport.world(num_ranks), device)[0]
    x = torch.randn(layout.numel, dtype=torch.float32, device=device)
    buffers = DeviceBuffers.allocate(layout, 0, device)
    shapes = {layer.name: layer.shape for layer in layers}
    state = State.fresh(layout.slots, layout.numel, 1.0, shapes, device=device) if layout.slots else None
    call = CollectiveCall(seed=0, step=0, state=state)
    with patch("thinwire.collectives.loopback._Rendezvous.share") as collective:  # sends nothing
        found = count(lambda: device_all_reduce(x, layout, transport, buffers, call), 0)
    return found.launches + collective.call_count // 2


def gpu(*, json: OutputFile = None) -> int:
    """Count bytes and launches of the kernels of buckets on a GPU, beside the least that they could be.

    Nothing is measured, and no GPU is needed: Triton's interpreter runs the kernels, and what each load and store
    touches under its mask is counted. Takes a few minutes.

    Examples:
      python -m experiments bench gpu --json benchmarks/speed/gpu.json

    Args:
        json: write the figures to this file.
    """
    os.environ["TRITON_INTERPRET"] = "1"  # Triton looks at it when it is imported, which the first kernel does
    about = {"ranks": RANKS, "layers": list(SIZES), "bytes_per_second": _H100}
    results = Results("python -m experiments bench gpu", about=about)
    for spec, form in FORMATS.items():
        for name, found in operations(form, SIZES, RANKS - 1):
            results.add(f"{spec}/{name}", found.moved / found.floor, "", **found._asdict())
        results.add(f"launches/{spec}", bucket_launches(spec, SIZES, RANKS), "")
        if json is not None:
            results.write(json)
    show("gpu", results, json)
    return 0
