"""One rank of ``thinwire bench allreduce``. Prints its measurements as one line of JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives import Layer, Layout, ProcessGroupTransport, all_reduce, complete
from thinwire.compressors import Coded, parse

_TIMEOUT = timedelta(seconds=120)


class _Contest:
    """Three ways to move one gradient: gloo's fp32 all-reduce, thinwire's, and its bytes with nothing done to them."""

    def __init__(self, numel: int, spec: str, transport: ProcessGroupTransport) -> None:
        compressor = parse(spec)
        if not isinstance(compressor, Coded):
            raise TypeError(f"{spec} is not a compressor whose messages this benchmark can send")
        rank, num_ranks = transport.rank, transport.world_size
        self.transport = transport
        self.layout = Layout.build([Layer("gradient", 0, (numel,), compressor)], num_ranks, torch.float32)
        self.buffers = transport.open(self.layout.reduction_traffic())
        self.gradient = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
        self.x = self.gradient.clone()
        self.step = 0

    def gloo(self) -> None:
        dist.all_reduce(self.x)

    def thinwire(self) -> None:
        self.step += 1
        complete(all_reduce(self.x, self.layout, self.transport, self.buffers, seed=0, step=self.step))

    def bare(self) -> None:
        """The same messages in the same order, with nothing done to them."""
        layout, transport, buffers = self.layout, self.transport, self.buffers
        schedule, rank, num_chunks = layout.schedule(transport.rank), transport.rank, len(layout.chunks)
        transport.begin(buffers)
        arriving = {address: transport.receive_into(buffers, *address) for address in buffers.inbox}
        leaving = []

        def send(phase: int) -> None:
            leaving.extend(transport.send_from(buffers, phase, buffers.outbox[phase].numel()))

        for k, _ in schedule.leaves:
            send(k)
        for k in schedule.inner:
            tree = layout.trees[layout.chunks[k].owner]
            for child in tree.children[rank]:
                arriving[k, child].wait()
            send(k if tree.parents[rank] is not None else num_chunks + k)
        for k, parent in schedule.means:
            arriving[num_chunks + k, parent].wait()
            if layout.trees[layout.chunks[k].owner].children[rank]:
                send(num_chunks + k)
        for pending in leaving:
            pending.wait()
        transport.end(buffers)


def _time(run: Callable[[], None]) -> float:
    dist.barrier()
    started = time.perf_counter()
    run()
    mine = torch.tensor(time.perf_counter() - started)
    # An all-reduce has ended when it has on the slowest rank.
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    return float(mine)


def _error(contest: _Contest) -> float:
    """Relative L2 error of one compressed mean against the exact one, which travels as fp64."""
    contest.x.copy_(contest.gradient)
    contest.thinwire()
    exact = contest.gradient.double()
    dist.all_reduce(exact)
    exact /= contest.layout.world_size
    return float((contest.x - exact).norm() / exact.norm())


def _same_everywhere(x: Tensor) -> bool:
    low, high = x.clone(), x.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    return bool(torch.equal(low, high))


def main(numel: int, spec: str, repeats: int) -> None:
    """Measure in rounds, one of each at a time, so that a noisy machine is noisy for all alike."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    group = dist.new_group(timeout=_TIMEOUT)
    assert isinstance(group, dist.ProcessGroup)
    contest = _Contest(numel, spec, ProcessGroupTransport(group, _TIMEOUT))
    ways = {"gloo": contest.gloo, "thinwire": contest.thinwire, "bare": contest.bare}
    for name in ("thinwire", "bare"):
        _time(ways[name])
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            contest.x.copy_(contest.gradient)
            times[name].append(_time(way))
    error = _error(contest)
    same = _same_everywhere(contest.x)
    if dist.get_rank() == 0:
        answer = {
            "seconds": {name: median(values) for name, values in times.items()},
            "all": times,
            "message_bytes": contest.layout.sent_bytes(0),
            "gloo_bytes": 2 * (contest.layout.world_size - 1) * numel * 4 // contest.layout.world_size,
            "relative_error": error,
            "replicas_identical": same,
        }
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
