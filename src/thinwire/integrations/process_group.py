"""A process group of backend ``thinwire``, over which unmodified DDP, FSDP2 and mesh dimensions communicate compressed.

It sees flat buffers rather than layers, like QNCCL, which the thesis compares with its layer-wise method (sections 3.4
and 3.5.4). What it does not compress is sent by gloo, or by NCCL from a GPU.
"""

# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.arguments import check_type
from thinwire.collectives import (
    DeviceGroupTransport,
    FailureDetector,
    ProcessGroupTransport,
    Transport,
    parse_algorithm,
    with_shared_memory,
)
from thinwire.compat import (
    collective_options,
    gloo_backend,
    gloo_group,
    nccl_backend,
    prefixed,
    premul_factor,
    premul_factors,
    register_backends,
)
from thinwire.compressors import State
from thinwire.integrations.group_contents import BufferContents
from thinwire.integrations.group_options import GroupBuffer, ProcessGroupOptions
from thinwire.integrations.transports import check_device
from thinwire.plan import Rules
from thinwire.runtime import Channel, Contents, Exchange, Follower, GroupStats, Route, Work, group_seed

_EXACT = (
    *("broadcast", "barrier", "send", "recv", "recv_anysource", "reduce", "gather", "scatter", "alltoall"),
    *("all_to_all_single", "all_gather_single_coalesced", "reduce_scatter_single_coalesced"),
    # Their names before PyTorch 2.13.
    *("alltoall_base", "allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"),
)
"""Collectives that are passed through. PyTorch holds the GIL when it calls those that a subclass lacks, and a thread of
gloo that releases the last reference to a tensor waits for the GIL, under a lock that the call needs."""


class ProcessGroup(dist.ProcessGroup):
    """A process group that compresses CPU tensors, and CUDA tensors on the stream that is current.

    It is returned by ``dist.new_group(backend="thinwire", pg_options=ProcessGroupOptions(...))``.

    It compresses contiguous fp32, bf16 and fp16 tensors of at least ``min_numel`` elements that are known to be
    gradients or weights: all-reduces that sum and that registered layers fill (`register_model`), all-reduces and
    reduce-scatters that average (AVG, PREMUL_SUM), as FSDP2's do, and all-gathers in place, as FSDP2's are. All ranks
    end with the same bytes.

    Everything else is exact: sums of other buffers, which may be counts, statistics or the denominators of a softmax;
    all-gathers into another tensor; other operations and dtypes, complex numbers and what may be complex numbers (the
    last of several dimensions is 2); small and sparse tensors, broadcasts, objects, point-to-point messages, and
    all-gathers and reduce-scatters of functional collectives (``DTensor.full_tensor()`` among them). `stats` counts
    what could have been compressed as ``unknown``, and a warning says so where a group is told nothing of its buffers.
    ``ProcessGroupOptions(where=...)`` chooses otherwise.

    It knows buffers by size, dtype and operation alone: a sum of another tensor that has the size of a bucket of a
    registered model, and an average that is none of gradients, are compressed.

    A random draw depends on the seed, the ranks of the group, the number of its compressed collectives so far, the
    layers of the buffer and the element. That number starts at 0 with the group and is in no checkpoint: a resumed
    training repeats the draws of a new one, which changes no expectation.
    """

    def __init__(self, creation: Any, options: ProcessGroupOptions | None) -> None:
        """Create it for ``torch.distributed``; ``creation`` has the store, the ranks and the timeout.

        Raises:
            TypeError: the options are not `ProcessGroupOptions`.
            DisagreementError: ranks gave different options.
            SharedMemoryError: the transport is ``shared``, and ranks cannot share memory.
            TransportError: a rank did not come within the timeout, or is gone.
        """
        rank, size = creation.group_rank, creation.group_size
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue] - of the subclasses that Python may make
        self.options = _checked(options)
        self._store, self._timeout = creation.store, self.options.timeout or creation.timeout
        self._ranks = tuple(creation.global_ranks_in_group)
        # The detector comes before gloo's groups, which wait for a missing rank without naming it.
        self._detector = None
        if size > 1:
            among = self._ranks or range(size)
            self._detector = FailureDetector.connect(self._store, "failures", among, rank, self._timeout)
        at = prefixed("exact", self._store), rank, size, self._timeout
        self._gloo, nccl = gloo_backend(*at), nccl_backend(*at)
        # A second process group over the same backends: calls on this object would return to the methods below.
        self._exact: Any = dist.ProcessGroup(self._store, rank, size)
        for group in (self, self._exact):
            register_backends(group, self._gloo, nccl)
        for name in _EXACT:
            # A partial, not a function, because torch.compile would trace a function.
            if hasattr(self._exact, name):
                setattr(self, name, partial(getattr(self._exact, name)))
        self._contents = BufferContents(self.options, size)
        self._follower = Follower("thinwire exact")
        self._stats = GroupStats()
        self._channels: dict[torch.device | None, Channel[GroupStats]] | None = {}
        self._channel_of(torch.empty(0, dtype=torch.uint8, device="cpu"))

    def _channel_of(self, x: Tensor) -> Channel[GroupStats]:
        """Return the channel of the tensors on a device, which its first one makes, on all ranks."""
        channels, device = self._running(), device_of(x)
        if device not in channels:
            if device is not None and self.options.transport == "shared":
                raise ValueError("transport='shared' is memory of the host, and a GPU sends over NCCL: use 'auto'")
            if x.is_cuda:
                check_device({x.device: "a tensor"}, "cuda:nccl")
            name, timeout = prefixed(f"messages {len(channels)}", self._store), self._timeout
            messages = gloo_group(name, self.rank(), self.size(), timeout, threads_of=self._gloo)
            transport: Transport = ProcessGroupTransport(messages, timeout, detector=self._detector)
            try:
                if device is None:
                    transport = with_shared_memory(transport, timeout, self.options.transport)
                else:
                    transport = DeviceGroupTransport(transport, device, self._exact, timeout)
                channels[device] = Channel.connect(
                    transport,
                    self._stats,
                    algorithm=parse_algorithm(self.options.algorithm),
                    seed=group_seed(self.options.seed, self._ranks),
                    record=self.options.record(),
                )
            except Exception:
                transport.close()
                raise
        return channels[device]

    @property
    def stats(self) -> GroupStats:
        """A copy of the totals so far."""
        channels, totals = self._running().values(), replace(self._stats)
        for channel in channels:
            channel.add_to(totals)
        return totals

    def register_model(self, model: nn.Module, *, rules: Rules | None = None) -> None:
        """Find the layers of a model's gradients in the buffers of all-reduces, by their sizes alone.

        Call it once DistributedDataParallel has wrapped the model, before the first backward pass: DDP sums its
        buckets, and this is how a group knows that such a sum is of gradients. A 1-D buffer that holds exactly a run of
        layers is compressed layer by layer, with biases, norms and small layers raw. Sums of other buffers are exact.
        The order of layers in DDP's buckets is known after two or three passes. Until then the order of registration is
        assumed; where the model uses layers in another order, some buckets are exact in these passes. `stats` counts
        all kinds.

        Args:
            model: a model on all ranks of the group.
            rules: compressors by name pattern, in place of that of the options.

        Raises:
            TypeError: the model is sharded: its buffers interleave shards.
            ValueError: a pattern matches no layer, or a compressor needs state.
        """
        self._running()[None].agree(self._contents.register_model(model, rules))

    # Called by torch.distributed. C++ callers (DDP's reducer, functional collectives) reach the names that PyTorch's
    # trampoline has; Python callers reach all of them.

    def allreduce(self, tensors: Any, opts: Any = None, **overload: Any) -> Any:
        given = _listed(tensors)
        if len(given) > 1:
            # There is one tensor for each device of this rank, and all are added. A rank here has one device.
            return self._exact.allreduce(given, _options("Allreduce", opts, overload))
        return self._all_reduce(given, opts, overload, "Allreduce", self._exact.allreduce)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        return self._all_reduce(_listed(tensors), opts, {}, "AllreduceCoalesced", self._exact.allreduce_coalesced)

    def reduce_scatter(self, output_tensors: Any, input_tensor: Any, opts: Any = None, **overload: Any) -> Any:
        opts = _options("ReduceScatter", opts, overload)
        outputs = _listed(output_tensors)
        inputs = [input_tensor] if isinstance(output_tensors, Tensor) else list(input_tensor)
        if len(outputs) == len(inputs) == 1 and len(inputs[0]) == self.size():
            work = self._reduce_scatter(outputs[0], list(inputs[0]), opts)
            if work is not None:
                return work
        if _is_premul(opts.reduceOp):
            inputs = [_scaled(parts, opts) for parts in inputs]
            opts = _summing("ReduceScatter")
        return self._exact.reduce_scatter(outputs, inputs, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        opts = _options("ReduceScatter", opts, {})
        work = None
        if input.numel() == output.numel() * self.size() and input.is_contiguous():
            work = self._reduce_scatter(output, input, opts)
        if work is not None:
            return work
        if _is_premul(opts.reduceOp):
            (input,), opts = _scaled([input], opts), _summing("ReduceScatter")
        return _named(self._exact, "reduce_scatter_single", "_reduce_scatter_base")(output, input, opts)

    def allgather(self, output_tensors: Any, input_tensor: Any, opts: Any = None, **overload: Any) -> Any:
        opts = _options("Allgather", opts, overload)
        inputs = _listed(input_tensor)
        outputs = (
            [list(output_tensors)] if isinstance(input_tensor, Tensor) else [list(outs) for outs in output_tensors]
        )
        if len(inputs) == len(outputs) == 1 and len(outputs[0]) == self.size():
            work = self._all_gather(list(outputs[0]), inputs[0])
            if work is not None:
                return work
        return self._exact.allgather(outputs, inputs, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        opts = _options("Allgather", opts, {})
        if output.numel() == input.numel() * self.size() and output.is_contiguous():
            work = self._all_gather(output, input)
            if work is not None:
                return work
        return _named(self._exact, "all_gather_single", "_allgather_base")(output, input, opts)

    # These are their names before PyTorch 2.13.
    _reduce_scatter_base = reduce_scatter_single  # pyright: ignore[reportAssignmentType]
    _allgather_base = all_gather_single

    def split_group(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError('a thinwire group cannot be split: use dist.new_group(ranks, backend="thinwire")')

    def shutdown(self) -> None:
        """Finish pending collectives, then end threads and connections, for ``dist.destroy_process_group``."""
        channels, self._channels = self._channels or {}, None
        for channel in channels.values():
            channel.close()
        super().shutdown()

    # Compression of each kind of collective.

    def _all_reduce(
        self, tensors: list[Tensor], opts: Any, overload: Mapping[str, Any], kind: str, exact: Callable[..., Any]
    ) -> Any:
        futures, passed, opts = [], [], _options(kind, opts, overload)
        scale = self._scale(opts.reduceOp)
        for x in tensors:
            contents = self._choose(
                GroupBuffer("all_reduce", x.numel(), x.dtype, _find_name(opts.reduceOp)), [x], scale
            )
            if contents is None or scale is None:
                passed.append(x)
                continue
            flat = x.detach().view(-1)
            exchange = _AllReduce(kind="all_reduce", contents=contents, dtype=x.dtype, scale=scale, mine=flat)
            futures.append(self._channel_of(x).submit(exchange))
        if passed and _is_premul(opts.reduceOp):
            for x, scaled in zip(passed, _scaled(passed, opts), strict=True):
                x.detach().copy_(scaled)
            opts = _summing(kind)
        if not futures:
            return exact(passed, opts)
        if passed:
            futures.append(self._follower.follow(exact(passed, opts), lambda: None, on_host=not passed[0].is_cuda))
        return Work(futures, tensors)

    def _reduce_scatter(self, output: Tensor, inputs: Tensor | list[Tensor], opts: Any) -> Work | None:
        scale = self._scale(opts.reduceOp)
        given = [output, *inputs] if isinstance(inputs, list) else [output, inputs]
        alike = isinstance(inputs, Tensor) or all(part.numel() == output.numel() for part in inputs)
        buffer = GroupBuffer("reduce_scatter", output.numel(), output.dtype, _find_name(opts.reduceOp))
        contents = self._choose(buffer, given, scale if alike else None)
        if contents is None or scale is None:
            return None
        flat = output.detach().view(-1)
        exchange = _ReduceScatter(
            kind="reduce_scatter",
            contents=contents,
            dtype=output.dtype,
            scale=scale,
            out=flat,
            mine=flat,
            inputs=inputs,
        )
        return Work([self._channel_of(output).submit(exchange)], [output])

    def _all_gather(self, outputs: Tensor | list[Tensor], input: Tensor) -> Work | None:
        given = [input, *outputs] if isinstance(outputs, list) else [input, outputs]
        alike = isinstance(outputs, Tensor) or all(out.numel() == input.numel() for out in outputs)
        in_place = (
            isinstance(outputs, Tensor)
            and outputs.is_contiguous()
            and _part(outputs, input, self.rank()).data_ptr() == input.data_ptr()
        )
        buffer = GroupBuffer("all_gather", input.numel(), input.dtype, in_place=in_place)
        contents = self._choose(buffer, given, 1.0 if alike else None)
        if contents is None:
            return None
        exchange = _AllGather(
            kind="all_gather",
            contents=contents,
            dtype=input.dtype,
            scale=1.0,
            outputs=outputs,
            mine=input.detach().view(-1),
            rank=self.rank(),
        )
        return Work([self._channel_of(input).submit(exchange)], [outputs])

    def _scale(self, op: Any) -> float | None:
        """Return the factor of the sum; None if the operation is not a sum, or has a tensor of factors."""
        if op == dist.ReduceOp.SUM:
            return 1.0
        if op == dist.ReduceOp.AVG:
            return 1.0 / self.size()
        return premul_factor(op) if _is_premul(op) else None

    def _choose(self, buffer: GroupBuffer, tensors: Sequence[Tensor], scale: float | None) -> Contents | None:
        return self._contents.find(buffer, tensors, self._stats, compressible=scale is not None)

    def _running(self) -> dict[torch.device | None, Channel[GroupStats]]:
        if self._channels is None:
            raise RuntimeError("this process group was destroyed")
        return self._channels


@dataclass(kw_only=True)
class _AllReduce(Exchange):
    mine: Tensor
    """Flat tensor on the device whose streams wait for the future."""

    def start(self, route: Route) -> tuple[Tensor, State | None]:
        return self.mine, None

    @property
    def result(self) -> Tensor:
        return self.mine


@dataclass(kw_only=True)
class _ReduceScatter(_AllReduce):
    inputs: Tensor | list[Tensor]

    def start(self, route: Route) -> tuple[Tensor, State | None]:
        if isinstance(self.inputs, Tensor):
            return self.inputs.detach().view(-1), None
        return torch.cat([part.detach().view(-1) for part in self.inputs]), None


@dataclass(kw_only=True)
class _AllGather(_AllReduce):
    outputs: Tensor | list[Tensor]
    rank: int

    def start(self, route: Route) -> tuple[Tensor, State | None]:
        if isinstance(self.outputs, Tensor):
            flat = self.outputs.detach().view(-1)
        else:
            flat = torch.empty(len(self.outputs) * self.mine.numel(), dtype=self.dtype, device=self.mine.device)
        part = _part(flat, self.mine, self.rank)
        if part.data_ptr() != self.mine.data_ptr():
            part.copy_(self.mine)
        return flat, None

    def finish(self, x: Tensor, route: Route) -> None:
        if not isinstance(self.outputs, Tensor):
            for out, part in zip(self.outputs, x.view(len(self.outputs), -1), strict=True):
                out.detach().view(-1).copy_(part)


def device_of(x: Tensor) -> torch.device | None:
    """Return the device of a tensor that is sent without going over the host; None if it is on the host."""
    return x.device if x.is_cuda else None


def register_model(model: nn.Module, group: dist.ProcessGroup | None = None, *, rules: Rules | None = None) -> None:
    """Tell a process group of backend ``thinwire`` the layers of a model; see `ProcessGroup.register_model`.

    The default ``group`` is that of a DistributedDataParallel model, or else the default process group.

    Raises:
        TypeError: the group is of another backend, or the model is sharded.
    """
    if group is None:
        group = model.process_group if isinstance(model, DistributedDataParallel) else dist.group.WORLD  # pyright: ignore[reportAssignmentType]
    if not isinstance(group, ProcessGroup):
        raise TypeError(
            "this process group does not compress: make it with backend='thinwire' and hand it to "
            "DistributedDataParallel(model, process_group=group)"
        )
    group.register_model(model, rules=rules)


def _checked(options: Any) -> ProcessGroupOptions:
    if options is None:
        default = dist.group.WORLD
        return default.options if isinstance(default, ProcessGroup) else ProcessGroupOptions()
    check_type("pg_options", options, ProcessGroupOptions, "thinwire.ProcessGroupOptions(...)")
    return options


def _part(gathered: Tensor, mine: Tensor, rank: int) -> Tensor:
    """Return the view of a gathered tensor that is for a rank's part."""
    return gathered.detach().view(-1)[rank * mine.numel() : (rank + 1) * mine.numel()]


def _find_name(op: Any) -> Literal["sum", "avg", "premul_sum"]:
    """Return the name of an operation that `ProcessGroup._scale` knows."""
    return "avg" if op == dist.ReduceOp.AVG else "premul_sum" if _is_premul(op) else "sum"


def _is_premul(op: Any) -> bool:
    return bool(op == dist.ReduceOp.PREMUL_SUM)


def _scaled(tensors: Sequence[Tensor], opts: Any) -> list[Tensor]:
    """Return the terms that PREMUL_SUM, which gloo lacks, adds up."""
    factor = premul_factors(opts.reduceOp)
    return [x.detach() * factor for x in tensors]


def _summing(kind: str) -> Any:
    opts = collective_options(kind)
    opts.reduceOp = dist.ReduceOp.SUM
    return opts


def _listed(tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _options(kind: str, opts: Any, overload: Mapping[str, Any]) -> Any:
    """Return the options of a call; some overloads of PyTorch give the operation alone."""
    made = collective_options(kind)
    if isinstance(opts, type(made)):
        return opts
    op = overload.get("op", opts)
    if op is not None:
        made.reduceOp = op
    return made


def _named(group: Any, *names: str) -> Callable[..., Any]:
    return next(getattr(group, name) for name in names if hasattr(group, name))
