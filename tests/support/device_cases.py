"""What the tests of the way through a device share: buckets of layers, and the CPU's way to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness import run_threads
from thinwire import parse
from thinwire.collectives import (
    CollectiveCall,
    DeviceBuffers,
    DeviceGroupTransport,
    DeviceLoopbackTransport,
    DeviceTransport,
    Layer,
    Layout,
    LoopbackTransport,
    ProcessGroupTransport,
    Shard,
    Transport,
    World,
    all_gather,
    complete,
    device_all_gather,
    device_all_reduce,
    device_reduce_scatter,
    parse_algorithm,
    reduce_scatter,
    sharded_layout,
)
from thinwire.compressors import Coded, Raw, State, Summed
from thinwire.runtime.channel import HostRoute, Turn

CPU = torch.device("cpu")
SHAPES = ((70, 50), (3,), (40, 100), (0,), (9, 11), (1300,), (64,))
MIXED = (
    *("minmax(bits=4)", "raw", "ef(minmax(bits=2))", "ef(topk(density=0.1))", "raw"),
    *("maxabs(bits=3)", "ef(randk(density=0.2))", "cast(bf16)", "ef(onebit)", "topk(density=0.2) | minmax(bits=8)"),
)
"""A compressor of each kind, for layers side by side in one bucket."""


def layers_of(specs: Sequence[str], shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Layer]:
    """Layers end to end, their compressors from ``specs`` by turns, with a raw one where a shape does not suit."""
    layers, start = [], 0
    for i, shape in enumerate(shapes):
        try:
            compressor = parse(specs[i % len(specs)]).fit(shape)
        except ValueError:
            compressor = parse("raw")
        assert isinstance(compressor, Coded | Summed)
        layers.append(Layer(f"layer{i}", start, shape, compressor))
        start += layers[-1].numel
    return layers


def gradients(layout: Layout, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(layout.numel, generator=generator).to(layout.dtype)


def first_state(layout: Layout, device: torch.device) -> State | None:
    if not layout.slots:
        return None
    shapes = {layer.name: layer.shape for layer in layout.layers}
    return State.fresh(layout.slots, layout.numel, 2.0, shapes, device=device)


def through_the_host(transport: Transport, layout: Layout, steps: int, poison: int = -1) -> list[Tensor]:
    """What a rank has after each of some steps, by way of messages on the CPU."""
    route = HostRoute("all_reduce", layout, transport, Turn())

    def reduce(x: Tensor, call: CollectiveCall) -> None:
        for collective in route.collectives(x, transport, call, None):
            complete(collective)

    return _of_steps(transport, layout, steps, poison, reduce)


def through_the_device(transport: DeviceTransport, layout: Layout, steps: int, poison: int = -1) -> list[Tensor]:
    """The same by way of the device."""
    buffers, before = DeviceBuffers.allocate(layout, transport.rank, transport.device), transport.sent_bytes
    found = _of_steps(
        transport, layout, steps, poison, lambda x, call: device_all_reduce(x, layout, transport, buffers, call)
    )
    assert transport.sent_bytes - before == steps * buffers.sent_bytes
    return found


def _of_steps(transport: Transport, layout: Layout, steps: int, poison: int, reduce: Any) -> list[Tensor]:
    state, outputs = first_state(layout, transport.device), []
    for step in range(steps):
        outputs.append(_input(layout, transport.rank, step, poison).to(transport.device))
        reduce(outputs[-1], CollectiveCall(seed=5, step=step, state=state))
        state = state.swapped() if state else None
    return outputs


def check_the_default_group(device: torch.device = CPU) -> DeviceGroupTransport:
    """Over the default group a rank ends with the bits of the CPU's own way; the transport that it went by."""
    group, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    assert isinstance(gloo, dist.ProcessGroup)
    host = ProcessGroupTransport(gloo, timedelta(seconds=120))
    transport = DeviceGroupTransport(host, device, group, timedelta(seconds=120))
    layers = layers_of(MIXED, (*SHAPES, *SHAPES, (3000, 10)))
    for dtype, name in (
        (torch.float32, "sra"),
        (torch.float16, "sra"),
        (torch.float32, "tree"),
        (torch.bfloat16, "ring"),
    ):
        layout = Layout.build(layers, dist.get_world_size(), dtype, parse_algorithm(name))
        there, here = through_the_device(transport, layout, 3), through_the_host(host, layout, 3)
        assert all(same(a, b) for a, b in zip(there, here, strict=True))
    return transport


PART_NUMEL = 3000


def sharded_case(spec: str, num_ranks: int, algorithm: str = "sra") -> Layout:
    """A buffer with a part for each rank, whose shards of a layer differ in size, with gaps between them."""
    compressor, parts = parse(spec), []
    assert isinstance(compressor, Coded)
    for rank in range(num_ranks):
        first = Shard("w", 0, 2000 - 400 * rank, 2048 * rank, compressor)
        parts.append([first, Shard("v", 2048, 700, 768 * rank, Raw())])
    world = World(num_ranks, tuple(rank // 2 for rank in range(num_ranks)))
    return sharded_layout(parts, PART_NUMEL, torch.float32, world, parse_algorithm(algorithm))


def shards_through_the_host(transport: Transport, layout: Layout, x: Tensor) -> list[Tensor]:
    """This rank's part of the sum of all ranks' ``x``, and all parts of theirs, by way of messages on the CPU."""
    up, down = (transport.open(layout.reduction_traffic(up=is_up, down=not is_up)) for is_up in (True, False))
    return _of_shards(
        transport,
        layout,
        x,
        lambda x, out, call: complete(reduce_scatter(x, layout, transport, up, call, out=out)),
        lambda x, call, kept: complete(all_gather(x, layout, transport, down, call, kept=kept)),
    )


def shards_through_the_device(transport: DeviceTransport, layout: Layout, x: Tensor) -> list[Tensor]:
    """The same by way of the device."""
    rank, device = transport.rank, transport.device
    up, down = (DeviceBuffers.allocate(layout, rank, device, up=is_up, down=not is_up) for is_up in (True, False))
    return _of_shards(
        transport,
        layout,
        x,
        lambda x, out, call: device_reduce_scatter(x, out, layout, transport, up, call),
        lambda x, call, kept: device_all_gather(x, layout, transport, down, call, kept=kept),
    )


def _of_shards(transport: Transport, layout: Layout, x: Tensor, reduce: Any, gather: Any) -> list[Tensor]:
    """A rank's part, and what it gathers of new values, of the same as they were sent, and of one that changed."""
    rank, size, device = transport.rank, transport.world_size, transport.device
    state = State.fresh(layout.slots, x.numel(), device=device) if layout.slots else None
    calls = [CollectiveCall(seed=1, step=9 + draw, scale=0.5, state=state, draw=draw) for draw in range(3)]
    gathered, kept, found = torch.zeros(size * PART_NUMEL), {}, [torch.zeros(PART_NUMEL, device=device)]
    for start, numel in ((0, 2000 - 400 * rank), (2048, 700)):
        gathered.view(size, -1)[rank, start : start + numel] = x.view(size, -1)[rank, start : start + numel]
    gathered = gathered.to(device)
    reduce(x.clone().to(device), found[0], calls[0])
    for number, call in enumerate(calls):
        gathered[rank * PART_NUMEL] += 4.0 * (number == 2)
        gather(gathered, call, kept)
        found.append(gathered.clone())
    assert [same(a, b) for a, b in pairwise(found[1:])] == [True, False]
    return found


def _input(layout: Layout, rank: int, step: int, poison: int) -> Tensor:
    x = gradients(layout, rank, step)
    if poison >= 0 and rank == layout.world_size - 1:
        x[poison] = torch.inf
    return x


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, whatever they hold."""
    kind = {4: torch.int32, 2: torch.int16}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.cpu().view(kind), b.cpu().view(kind))


def over_devices(
    function: Callable[[DeviceTransport], list[Tensor]],
    num_ranks: int,
    device: torch.device = CPU,
    begin: Callable[[], None] = lambda: None,
) -> list[list[Tensor]]:
    """``function`` of each rank's transport, in threads, each of which calls ``begin`` and has a stream of its own."""
    devices = DeviceLoopbackTransport.world(LoopbackTransport.world(num_ranks), device, timeout_s=300.0)

    def run(transport: Transport) -> list[Tensor]:
        begin()
        if device.type == "cpu":
            return function(devices[transport.rank])
        with torch.cuda.stream(torch.cuda.Stream(device)):
            found = function(devices[transport.rank])
            torch.cuda.current_stream(device).synchronize()
            return found

    return run_threads(run, num_ranks, timeout_s=400.0)


def check_ways_alike(
    layout: Layout, steps: int, device: torch.device = CPU, begin: Callable[[], None] = lambda: None, poison: int = -1
) -> None:
    """By way of the device all ranks end with the same bits, which are those of the CPU's own way."""
    ranks = layout.world_size
    there = over_devices(lambda t: through_the_device(t, layout, steps, poison), ranks, device, begin)
    here = run_threads(lambda t: through_the_host(t, layout, steps, poison), ranks)
    for mine, theirs in zip(there, here, strict=True):
        assert all(same(*three[:2]) and same(*three[1:]) for three in zip(theirs, mine, there[0], strict=True))


def check_shards_alike(
    spec: str,
    num_ranks: int,
    device: torch.device = CPU,
    begin: Callable[[], None] = lambda: None,
    algorithm: str = "sra",
) -> None:
    """The same of both halves."""
    layout = sharded_case(spec, num_ranks, algorithm)
    x = [torch.randn(num_ranks * PART_NUMEL, generator=torch.Generator().manual_seed(r)) for r in range(num_ranks)]
    there = over_devices(lambda t: shards_through_the_device(t, layout, x[t.rank]), num_ranks, device, begin)
    here = run_threads(lambda t: shards_through_the_host(t, layout, x[t.rank]), num_ranks)
    for mine, theirs in zip(there, here, strict=True):
        assert all(same(*pair) for pair in zip(mine, theirs, strict=True))
