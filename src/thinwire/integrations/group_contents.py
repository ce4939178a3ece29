"""Choice of the buffers that a process group compresses, by their sizes, dtypes and the registered layers."""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.arguments import warn_caller
from thinwire.collectives import Layer
from thinwire.compat import ddp_ready_order
from thinwire.compressors import GRADIENT_DTYPES, Coded, Compressor, Raw, Summed, UnsuitedError
from thinwire.integrations.group_options import GroupBuffer, ProcessGroupOptions, stateless
from thinwire.integrations.transports import replicated
from thinwire.plan import Filter, Plan, Rules, named_parameters, parameter_names
from thinwire.runtime import Contents, GroupStats, Kind, dense_bytes

NamedShape = tuple[str, tuple[int, ...]]
"""A layer's name and shape."""
_PATIENCE = 100
"""Number of unknown buffers, where a model is registered, before a warning says that none of its were found."""


class BufferContents:
    """Finds the layers in the buffers of a process group. The results depend on the sequence of buffers alone, so they
    are the same on all ranks."""

    def __init__(self, options: ProcessGroupOptions, world_size: int) -> None:
        self.options = options
        self._world_size = world_size
        self._walks: dict[torch.dtype, LayerCursor] = {}
        """Registered layers, by the dtype of their gradients."""
        self._compressors: dict[str, Compressor] = {}
        self._contents: dict[tuple[NamedShape, ...], Contents] = {}
        self._version = 0
        self._lock = threading.Lock()
        self._seen: set[Kind] = set()
        """Kinds of collectives of which a buffer was compressed, or a warning said that one was not."""

    def register_model(self, model: nn.Module, rules: Rules | None) -> dict[str, str]:
        """Register the layers of a model; see `ProcessGroup.register_model`. Returns what ranks must agree on."""
        walks, layers = _walks(model)
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        asked = self.options.get_compressor("all_reduce") if rules is None else rules
        for spec in asked.values() if isinstance(asked, Mapping) else (asked,):
            stateless("rules", spec)
        exclude = tuple(self.options.exclude)
        keep = Filter(min_numel=self.options.min_numel, exclude=exclude, names=parameter_names(inner))
        self._compressors.update(Plan.build(dict(layers), asked, keep).layers)
        self._walks = walks
        self._contents.clear()
        self._version += 1
        return {f"layer {name}": f"{shape} {self._compressors[name]}" for name, shape in layers}

    def find(
        self, buffer: GroupBuffer, tensors: Sequence[Tensor], stats: GroupStats, *, compressible: bool
    ) -> Contents | None:
        """Return the layers in a buffer, or in each rank's part of it; None if it is to be sent exactly.

        Args:
            buffer: the buffer's properties, apart from ``registered``.
            tensors: all tensors that the collective reads and writes.
            stats: counts the buffer.
            compressible: whether the operation of the collective allows compression.
        """
        first, kind = tensors[0], buffer.kind
        with self._lock:
            if (
                compressible
                and self._world_size > 1
                and all(_compressible(x) and (x.dtype, x.device) == (first.dtype, first.device) for x in tensors)
            ):
                walk = self._walks.get(first.dtype) if kind == "all_reduce" and first.dim() == 1 else None
                run = walk.find(buffer.numel) if walk is not None else None
                contents = self._matched(run) if run else self._uniform(kind, buffer.numel)
                stats.matched += run is not None
                buffer = buffer._replace(registered=run is not None)
                if contents is not None and self.options.where(buffer):
                    self._seen.add(kind)
                    stats.compressed += 1
                    stats.uniform += run is None
                    return contents
                if contents is not None:
                    stats.unknown += 1
                    if stats.unknown >= (_PATIENCE if self._version else 1):
                        self._warn_of(buffer)
            stats.passed += 1
            stats.passed_bytes += dense_bytes(kind, buffer.numel * first.element_size(), self._world_size)
        return None

    def _warn_of(self, buffer: GroupBuffer) -> None:
        """Warn once for each kind of collective of which no buffer was compressed, unless the options say which are."""
        if buffer.kind in self._seen or self.options.where is not ProcessGroupOptions.where:
            return
        self._seen.add(buffer.kind)
        what = f"{buffer.kind.replace('_', '-')} of {buffer.numel:,} values"
        warn_caller(
            f"a process group of backend thinwire sends this exactly, and others like it: {what}. It is not known to "
            "hold gradients or weights. For DistributedDataParallel, register the model: "
            "thinwire.register_model(model). For other buffers, pass ProcessGroupOptions(where=...), which chooses "
            "those to compress"
        )

    def _matched(self, run: tuple[NamedShape, ...]) -> Contents | None:
        if run not in self._contents:
            layers, start = [], 0
            for name, shape in run:
                compressor = self._compressors.get(name, Raw())
                assert isinstance(compressor, Coded | Summed)
                layers.append(Layer(name, start, shape, compressor))
                start += layers[-1].numel
            self._contents[run] = Contents((self._version, run), tuple(layers))
        contents = self._contents[run]
        return None if all(isinstance(layer.compressor, Raw) for layer in contents.layers) else contents

    def _uniform(self, kind: Kind, numel: int) -> Contents | None:
        if numel < self.options.min_numel:
            return None
        try:
            compressor = self.options.get_compressor(kind).fit((numel,))
        except UnsuitedError:
            return None
        if isinstance(compressor, Raw) or not isinstance(compressor, Coded | Summed):
            return None
        return Contents(numel, (Layer(f"{kind} of {numel}", 0, (numel,), compressor),))


class LayerCursor:
    """The trained layers of a model, and a cursor that finds those in a buffer of a backward pass by its size alone.

    DistributedDataParallel's first pass, or its first two with a static graph, sends all layers in one buffer in their
    registered order. Then it forms buckets in the order in which gradients were ready, which is the registered order
    backwards for most models; ``bucket_order`` returns the true one, by names, once it is known; until then it is
    called whenever a pass begins. With ``find_unused_parameters`` DDP never rebuilds its buckets (``rebuilds=False``):
    they come last layers first, and inside a bucket layers keep their registered order.
    """

    def __init__(
        self,
        layers: Sequence[NamedShape],
        *,
        whole_passes: int = 1,
        rebuilds: bool = True,
        bucket_order: Callable[[], Sequence[str] | None] | None = None,
    ) -> None:
        self._layers = tuple((name, tuple(shape)) for name, shape in layers if math.prod(shape))
        self._whole_passes, self._rebuilds, self._bucket_order = whole_passes, rebuilds, bucket_order
        self._walk_over(self._layers[::-1])

    def find(self, numel: int) -> tuple[NamedShape, ...] | None:
        """Return the layers of a buffer of ``numel`` elements: a run that begins at the cursor and fills it exactly.

        If there is none, a new pass may have begun: then a run that begins at the start. None if there is no such run
        either, and the cursor stays.
        """
        if self._at == 0 and self._bucket_order is not None and (names := self._bucket_order()):
            shapes = dict(self._layers)
            self._walk_over([(name, shapes[name]) for name in names if name in shapes])
            self._bucket_order = None
        if self._whole_passes and self._ends and numel == self._ends[-1]:
            self._whole_passes -= 1
            self._at = 0
            return self._layers
        for begin in dict.fromkeys((self._at, 0)):
            run = self._run(begin, numel)
            if run:
                self._at = (begin + len(run)) % len(self._order)
                return run if self._rebuilds else run[::-1]
        return None

    def _run(self, begin: int, numel: int) -> tuple[NamedShape, ...] | None:
        before = self._ends[begin - 1] if begin else 0
        last = bisect_left(self._ends, before + numel)
        if last == len(self._ends) or self._ends[last] != before + numel:
            return None
        return self._order[begin : last + 1]

    def _walk_over(self, order: Sequence[NamedShape]) -> None:
        self._order = tuple(order)
        self._ends = list(accumulate(math.prod(shape) for _, shape in self._order))
        self._at = 0


def _walks(model: nn.Module) -> tuple[dict[torch.dtype, LayerCursor], list[NamedShape]]:
    from torch.distributed.tensor import DTensor  # imported here because it takes a second

    ddp = model if isinstance(model, DistributedDataParallel) else None
    parameters = replicated(ddp) if ddp else named_parameters(model)
    trained = [(n, p) for n, p in parameters.items() if p.requires_grad]
    if any(isinstance(p, DTensor) for _, p in trained):
        raise TypeError("this model is sharded, and its buffers interleave shards: no run of layers is in them")
    rebuilds = ddp is None or not ddp.find_unused_parameters or ddp.static_graph
    bucket_order = _BucketOrder(ddp, [name for name, _ in trained]) if ddp is not None and rebuilds else None
    walks = {}
    for dtype in dict.fromkeys(p.dtype for _, p in trained):
        layers = [(name, tuple(p.shape)) for name, p in trained if p.dtype == dtype]
        whole_passes = 2 if ddp is not None and ddp.static_graph else 1
        walks[dtype] = LayerCursor(layers, whole_passes=whole_passes, rebuilds=rebuilds, bucket_order=bucket_order)
    return walks, [(name, tuple(p.shape)) for name, p in trained]


class _BucketOrder:
    """The order of the layers in the buckets of a DDP model, which is read before each forward pass until it is known.

    It must not be read while backward runs, because the reducer holds a lock then.
    """

    def __init__(self, model: DistributedDataParallel, names: Sequence[str]) -> None:
        self._names = names
        self._order: Sequence[str] | None = None
        self._hook = model.register_forward_pre_hook(self._ask)

    def __call__(self) -> Sequence[str] | None:
        return self._order

    def _ask(self, model: nn.Module, inputs: object) -> None:
        order = ddp_ready_order(model)
        if order:
            self._hook.remove()
            self._order = [self._names[i] for i in order] if len(order) == len(self._names) else None


def _compressible(x: Tensor) -> bool:
    """Return whether a tensor can be compressed at all. Other threads cannot write to tensors of inference mode, and
    PyTorch hands complex numbers over as pairs of real ones."""
    return (
        x.dtype in GRADIENT_DTYPES
        and x.layout == torch.strided
        and x.device.type in ("cpu", "cuda")
        and x.numel() > 0
        and x.is_contiguous()
        and not (x.dim() > 1 and x.shape[-1] == 2)
        and not x.is_inference()
    )
