"""Messages sent in parts, over several process groups: the same bytes, results and errors as over one."""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import sharded
import thinwire
from harness import on_ranks, run_ranks
from ranks import alike
from thinwire.collectives import (
    CollectiveCall,
    Layer,
    Layout,
    PeerFailedError,
    ProcessGroupTransport,
    all_reduce,
    complete,
)
from thinwire.compressors import parse

TIMEOUT = timedelta(seconds=20)


class _Work:
    def wait(self) -> None:
        return


class _Group:
    """Notes what is sent and received over it."""

    def __init__(self) -> None:
        self.messages: list[Tensor] = []

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> _Work:
        assert (peer, tag) == (1, 7)
        self.messages += tensors
        return _Work()

    recv = send


@pytest.mark.parametrize("way", ["send", "receive"])
def test_each_group_gets_a_part_of_a_message_that_is_large_enough(way: str) -> None:
    """Sender and receiver divide it alike, and no byte is left out."""
    for num_bytes, parts in ((1, 1), (16384, 1), (32768, 2), (70_001, 3), (10_000_000, 3)):
        groups = [_Group() for _ in range(3)]
        transport = ProcessGroupTransport(groups[0], TIMEOUT)  # pyright: ignore[reportArgumentType]
        transport.add_streams(groups[1:])  # pyright: ignore[reportArgumentType]
        message = torch.arange(num_bytes, dtype=torch.int64).to(torch.uint8)
        getattr(transport, way)(message, 1, 7).wait()
        found = [part for group in groups for part in group.messages]
        assert [len(group.messages) for group in groups] == [1] * parts + [0] * (3 - parts)
        assert torch.equal(torch.cat(found), message)
        assert max(map(len, found)) - min(map(len, found)) < parts
        assert transport.sent_bytes + transport.received_bytes == num_bytes


@on_ranks(3)
def test_means_and_bytes_are_those_of_one_stream(rank: int) -> None:
    """Also after exchanges that fail on one rank."""
    compressor, found = parse("minmax(bits=4)"), []
    for streams in (4, 1):
        first, *others = [dist.new_group(timeout=TIMEOUT) for _ in range(streams)]
        transport, means = ProcessGroupTransport(first, TIMEOUT, owned=True), []  # pyright: ignore[reportArgumentType]
        transport.add_streams(others)  # pyright: ignore[reportArgumentType]
        for numel in (100, 300_000):
            layout = Layout.build([Layer("w", 0, (numel,), compressor)], 3, torch.float32)  # pyright: ignore[reportArgumentType]
            buffers = transport.open(layout.reduction_traffic())
            for step in range(3):
                x = torch.randn(numel, generator=torch.Generator().manual_seed(10 * step + rank))
                fails = step == 1
                given = x.half() if fails and rank == 1 else x
                with pytest.raises((TypeError, PeerFailedError)) if fails else contextlib.nullcontext():
                    complete(all_reduce(given, layout, transport, buffers, CollectiveCall(seed=0, step=step)))
                means += [] if fails else [x]
        found.append((means, transport.sent_bytes))
        transport.close()
    assert alike(*found)


def _sockets() -> int:
    names = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sum(os.path.islink(name) and os.readlink(name).startswith("socket:") for name in names)


def _trains(rank: int, sharding: bool) -> None:
    """Two steps over three streams, and over one."""
    net, parameters, opened = partial(sharded.Net, width=300), [], []
    for streams in (3, 1):
        network = thinwire.Network(streams=streams, transport="group")
        torch.manual_seed(0)
        model = sharded.build(net=net) if sharding else DistributedDataParallel(net())
        before = _sockets()
        if sharding:
            sharded.compress(model, "minmax(bits=8)", "minmax(bits=8)", network=network)
        else:
            thinwire.compress(model, "minmax(bits=8)", network=network, skip_if_slower=False)
        opened.append(_sockets() - before)
        sharded.train(model, 2)
        parameters.append([*(sharded.whole(model).values() if sharding else model.parameters())])
    assert opened[0] >= opened[1] + 2
    assert all(torch.equal(a, b) for a, b in zip(*parameters, strict=True))


@pytest.mark.parametrize("sharding", [False, True])
def test_training_is_the_same_over_several_streams(sharding: bool) -> None:
    run_ranks(_trains, 2, sharding)
