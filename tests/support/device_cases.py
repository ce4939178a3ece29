"""What the tests of the way through a device share: buckets of layers, and the CPU's way to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

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
    all_reduce,
    complete,
    device_all_gather,
    device_all_reduce,
    device_reduce_scatter,
    gather_buffers,
    gather_mean,
    parse_algorithm,
    reduce_scatter,
    sharded_layout,
    sum_buffers,
    summed_all_reduce,
)
from thinwire.compressors import Coded, Raw, State, Summed

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
    state, outputs = first_state(layout, torch.device("cpu")), []
    owned = transport.open(layout.reduction_traffic())
    gathered = gather_buffers(layout, transport) if layout.gathered else None
    sums = sum_buffers(layout)
    for step in range(steps):
        x = _input(layout, transport.rank, step, poison)
        call = CollectiveCall(seed=5, step=step, state=state)
        complete(summed_all_reduce(x, layout, transport, sums, call))
        if layout.chunks:
            complete(all_reduce(x, layout, transport, owned, call))
        if gathered is not None:
            complete(gather_mean(x, layout, transport, gathered, call))
        outputs.append(x)
        state = state.swapped() if state else None
    return outputs


def through_the_device(transport: DeviceTransport, layout: Layout, steps: int, poison: int = -1) -> list[Tensor]:
    """The same by way of the device."""
    device = transport.device
    state, outputs = first_state(layout, device), []
    buffers = DeviceBuffers.allocate(layout, transport.rank, device)
    before = transport.sent_bytes
    for step in range(steps):
        x = _input(layout, transport.rank, step, poison).to(device)
        device_all_reduce(x, layout, transport, buffers, CollectiveCall(seed=5, step=step, state=state))
        outputs.append(x)
        state = state.swapped() if state else None
    assert transport.sent_bytes - before == steps * buffers.sent_bytes
    return outputs


def check_the_default_group(device: torch.device = CPU) -> DeviceGroupTransport:
    """Over the default group a rank ends with the bits of the CPU's own way; the transport that it went by."""
    group, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    assert isinstance(gloo, dist.ProcessGroup)
    host = ProcessGroupTransport(gloo, timedelta(seconds=120))
    transport = DeviceGroupTransport(host, device, group, timedelta(seconds=120))
    for dtype in (torch.float32, torch.float16):
        layout = Layout.build(layers_of(MIXED, (*SHAPES, *SHAPES, (3000, 10))), dist.get_world_size(), dtype)
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


def shards_through_the_host(transport: Transport, layout: Layout, x: Tensor) -> tuple[Tensor, ...]:
    """This rank's part of the sum of all ranks' ``x``, and all parts of theirs, by way of messages on the CPU."""
    reduced, gathered, state = _of_shards(transport, layout, x, torch.device("cpu"))
    up, down = (transport.open(layout.reduction_traffic(up=is_up, down=not is_up)) for is_up in (True, False))
    calls = [CollectiveCall(seed=1, step=9 + draw, scale=0.5, state=state, draw=draw) for draw in range(3)]
    complete(reduce_scatter(x.clone(), layout, transport, up, calls[0], out=reduced))

    def gather(call: CollectiveCall, kept: dict[int, Tensor]) -> None:
        complete(all_gather(gathered, layout, transport, down, call, kept=kept))

    return reduced, *_gather_again(gather, gathered, transport.rank, calls)


def shards_through_the_device(transport: DeviceTransport, layout: Layout, x: Tensor) -> tuple[Tensor, ...]:
    """The same by way of the device."""
    device = transport.device
    reduced, gathered, state = _of_shards(transport, layout, x, device)
    up, down = (
        DeviceBuffers.allocate(layout, transport.rank, device, up=is_up, down=not is_up) for is_up in (True, False)
    )
    calls = [CollectiveCall(seed=1, step=9 + draw, scale=0.5, state=state, draw=draw) for draw in range(3)]
    device_reduce_scatter(x.clone().to(device), reduced, layout, transport, up, calls[0])

    def gather(call: CollectiveCall, kept: dict[int, Tensor]) -> None:
        device_all_gather(gathered, layout, transport, down, call, kept=kept)

    return reduced, *_gather_again(gather, gathered, transport.rank, calls)


def _gather_again(
    gather: Callable[[CollectiveCall, dict[int, Tensor]], None],
    gathered: Tensor,
    rank: int,
    calls: Sequence[CollectiveCall],
) -> list[Tensor]:
    """What comes of gathers with other draws: of new values, of the same that were sent, and of one that changed."""
    kept, found = dict[int, Tensor](), []
    for number, call in enumerate(calls):
        gathered[rank * PART_NUMEL] += 4.0 * (number == 2)
        gather(call, kept)
        found.append(gathered.clone())
    assert torch.equal(*found[:2])
    assert not torch.equal(*found[1:])
    return found


def _of_shards(
    transport: Transport, layout: Layout, x: Tensor, device: torch.device
) -> tuple[Tensor, Tensor, State | None]:
    rank, size = transport.rank, transport.world_size
    state = State.fresh(layout.slots, x.numel(), device=device) if layout.slots else None
    gathered = torch.zeros(size * PART_NUMEL)
    for start, numel in ((0, 2000 - 400 * rank), (2048, 700)):
        gathered.view(size, -1)[rank, start : start + numel] = x.view(size, -1)[rank, start : start + numel]
    return torch.zeros(PART_NUMEL, device=device), gathered.to(device), state


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
    there = over_devices(lambda t: [*shards_through_the_device(t, layout, x[t.rank])], num_ranks, device, begin)
    here = run_threads(lambda t: shards_through_the_host(t, layout, x[t.rank]), num_ranks)
    for mine, theirs in zip(there, here, strict=True):
        assert all(same(*pair) for pair in zip(mine, theirs, strict=True))
