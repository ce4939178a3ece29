"""All-reduces of small tensors by messages: the sums of a native all-reduce, the same bits on every rank."""

from __future__ import annotations

from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness import run_ranks
from thinwire.collectives import ProcessGroupTransport, ring_bytes
from thinwire.collectives.transport import SMALL_BYTES, small_reduction

TIMEOUT = timedelta(seconds=20)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int32)


def _transport() -> ProcessGroupTransport:
    group = dist.new_group(timeout=TIMEOUT)
    assert isinstance(group, dist.ProcessGroup)
    return ProcessGroupTransport(group, TIMEOUT, owned=True)


def _whole(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(-20, 20, (numel,), generator=torch.Generator().manual_seed(rank)).to(dtype)


def _check_sums(rank: int, num_ranks: int) -> None:
    transport = _transport()
    numels = (1, 2, 3, 5, 1000, SMALL_BYTES // 4, SMALL_BYTES // 4 + 1)
    for dtype in DTYPES:
        for numel in numels if dtype is torch.float32 else numels[:5]:
            of_ranks = torch.stack([_whole(r, numel, dtype).double() for r in range(num_ranks)])
            for op, expected in (("sum", of_ranks.sum(0)), ("max", of_ranks.amax(0))):
                x = _whole(rank, numel, dtype)
                transport.all_reduce(x, lane=int(op == "max"), op=op)  # pyright: ignore[reportArgumentType]
                assert torch.equal(x.double(), expected), (op, dtype, numel)
    x = torch.randn(4, 333, generator=torch.Generator().manual_seed(rank))
    transport.all_reduce(x)
    assert len({bytes(row.numpy().tobytes()) for row in transport.all_gather(x)}) == 1, "ranks have different bits"
    x = torch.tensor([256.0 if rank == 0 else 1.0], dtype=torch.bfloat16)
    transport.all_reduce(x)
    rounded = "259 is half way between 258 and 260; rounded after each rank it would be 256"
    assert num_ranks != 4 or float(x) == 260.0, rounded
    part = torch.full((3, 2), float(rank)).mT
    transport.all_reduce(part)
    assert part.eq(sum(range(num_ranks))).all(), "not contiguous"
    transport.close()


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_sums_and_maxima_are_exact_and_alike_on_all_ranks(num_ranks: int) -> None:
    run_ranks(_check_sums, num_ranks, num_ranks)


def _check_under_way(rank: int, num_ranks: int) -> None:
    transport = _transport()
    sums = [torch.full((size,), float(rank + size)) for size in range(1, 9)]
    started = [transport.start_all_reduce(x, lane=i % 2) for i, x in enumerate(sums)]
    for pending in reversed(started):
        pending.wait()
    for x in sums:
        assert x.eq(sum(rank + x.numel() for rank in range(num_ranks))).all()
    # More, one after another, than there are tags.
    for _ in range(600):
        x = torch.ones(2)
        transport.all_reduce(x)
        assert x.eq(num_ranks).all()
    transport.close()


def test_several_are_under_way_and_awaited_in_any_order() -> None:
    """Between two ranks nothing is left to send when one is awaited, so the order in which they are does not matter."""
    run_ranks(_check_under_way, 2, 2)


@pytest.mark.parametrize(("num_ranks", "numel"), [(2, 1000), (4, 1000), (8, 1000), (4, 2)])
def test_messages_are_few_and_have_the_bytes_of_a_ring(num_ranks: int, numel: int) -> None:
    """One message after another in a ring: 2(n−1). Here: one between two ranks, two between more."""
    sent, received = [], []
    for rank in range(num_ranks):

        def send(message: Tensor, peer: int, phase: int, rank: int = rank) -> mock.Mock:
            sent.append((phase, rank, peer, message.numel()))
            return mock.Mock()

        def receive(message: Tensor, peer: int, phase: int, rank: int = rank) -> mock.Mock:
            received.append((phase, peer, rank, message.numel()))
            return mock.Mock()

        how = {"rank": rank, "num_ranks": num_ranks, "send": send, "receive": receive}
        small_reduction(torch.zeros(numel), "sum", **how).wait()
    assert {phase for phase, *_ in sent} == ({0} if num_ranks == 2 else {0, 1})
    assert sum(size for *_, size in sent) == num_ranks * ring_bytes(4 * numel, num_ranks)
    assert min(size for *_, size in sent) > 0, "nothing is sent for empty parts"
    assert sorted(sent) == sorted(received), "every message is expected by its receiver"
