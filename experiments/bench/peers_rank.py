"""One worker of ``python -m experiments bench peers``."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from thinwire.local import DiLoCo, Nesterov
from thinwire_tools.bench.allreduce_rank import sent_on_interface
from thinwire_tools.bench.rank import serve
from thinwire_tools.compare.tasks import GPTTask
from thinwire_tools.compare.train import digest, learning_rate
from thinwire_tools.lab.network import address

_LIGHTHOUSE_PORT = 29510
_OUTER = Nesterov()
_TIMEOUT = timedelta(seconds=60)


def train(method: str, compressor: str, task: dict[str, Any], every: int, seed: int) -> dict[str, Any]:
    """Train from ``seed``; held-out loss, and seconds and bytes a step after the first exchange, of this worker."""
    made = GPTTask.from_json(task)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    model = made.build(seed)
    optimizer = made.optimizer(model)
    peer = {"torchft": _torchft, "hivemind": _hivemind}.get(method)
    with peer(model, optimizer, every) if peer else _thinwire(model, optimizer, every, compressor, seed) as step:
        started, sent = 0.0, 0
        for i, batch in enumerate(made.batches(seed, rank, num_ranks)):
            if i == every:
                dist.barrier()
                started, sent = time.perf_counter(), sent_on_interface()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(made.learning_rate, i, made.steps)
            optimizer.zero_grad(set_to_none=True)
            made.loss(model, batch).backward()
            optimizer.step()
            step()
        seconds = time.perf_counter() - started
        sent = sent_on_interface() - sent
    model.eval()
    with torch.no_grad():
        total, count = made.evaluate(model, rank, num_ranks, probe=False)
    both = torch.tensor([total, count], dtype=torch.float64)
    dist.all_reduce(both)
    of_all: list[Any] = [None] * num_ranks
    dist.all_gather_object(of_all, digest(model))
    sent_bytes = sent / (made.steps - every)
    differ = len(set(of_all)) > 1
    return {"loss": float(both[0] / both[1]), "seconds": seconds, "sent_bytes": sent_bytes, "replicas_differ": differ}


@contextmanager
def _thinwire(
    model: nn.Module, optimizer: torch.optim.Optimizer, every: int, compressor: str, seed: int
) -> Iterator[Callable[[], None]]:
    local = DiLoCo(model, optimizer, every=every, outer=_OUTER, compressor=compressor, seed=seed)
    yield local.step
    local.close()


@contextmanager
def _torchft(model: nn.Module, optimizer: torch.optim.Optimizer, every: int) -> Iterator[Callable[[], None]]:
    """torchft's DiLoCo, which counts the optimizer's steps by itself; its lighthouse is on the first worker."""
    from torchft import Manager, ProcessGroupGloo  # pyright: ignore[reportMissingImports]
    from torchft.coordination import LighthouseServer  # pyright: ignore[reportMissingImports]
    from torchft.local_sgd import DiLoCo as TorchftDiLoCo  # pyright: ignore[reportMissingImports]

    rank = dist.get_rank()
    lighthouse = LighthouseServer(bind=f"[::]:{_LIGHTHOUSE_PORT}", min_replicas=2) if rank == 0 else None
    dist.barrier()
    store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]
    manager = Manager(
        pg=ProcessGroupGloo(timeout=_TIMEOUT),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=2,
        use_async_quorum=False,
        init_sync=False,
        timeout=_TIMEOUT,
        quorum_timeout=_TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=address(rank),
        store_port=store.port,
        hostname=address(rank),
        lighthouse_addr=f"http://{os.environ['MASTER_ADDR']}:{_LIGHTHOUSE_PORT}",
    )
    outer = torch.optim.SGD(model.parameters(), lr=_OUTER.lr, momentum=_OUTER.momentum, nesterov=True)
    with TorchftDiLoCo(manager, [model], optimizer, outer, sync_every=every):
        yield lambda: None
    dist.barrier()
    manager.shutdown(wait=False)
    if lighthouse is not None:
        lighthouse.shutdown()


@contextmanager
def _hivemind(model: nn.Module, optimizer: torch.optim.Optimizer, every: int) -> Iterator[Callable[[], None]]:
    """hivemind's averager in fp32, within the same outer optimizer; the second worker finds the first in its table."""
    import hivemind  # pyright: ignore[reportMissingImports]
    from hivemind.averaging import DecentralizedAverager  # pyright: ignore[reportMissingImports]

    # Its table and its averager are processes of their own, which cannot be pickled.
    multiprocessing.current_process().daemon = False
    multiprocessing.set_start_method("fork", force=True)
    place = {"start": True, "host_maddrs": [f"/ip4/{address(dist.get_rank())}/tcp/0"]}
    table = hivemind.DHT(**place) if dist.get_rank() == 0 else None
    known = [None if table is None else [str(maddr) for maddr in table.get_visible_maddrs()]]
    dist.broadcast_object_list(known, 0)
    table = table or hivemind.DHT(initial_peers=known[0], **place)
    parameters = list(model.parameters())
    anchor = nn.utils.parameters_to_vector(parameters).detach().clone()
    momentum, steps = torch.zeros_like(anchor), 0
    averager = DecentralizedAverager([torch.zeros_like(anchor)], table, start=True, prefix="peers", target_group_size=2)

    def step() -> None:
        nonlocal steps
        steps += 1
        if steps % every:
            return
        with torch.no_grad(), averager.get_tensors() as (mean,):
            mean.copy_(anchor - nn.utils.parameters_to_vector(parameters))
        if averager.step(timeout=_TIMEOUT.total_seconds()) is None:
            raise TimeoutError("the workers did not find each other")
        with torch.no_grad(), averager.get_tensors() as (mean,):
            _OUTER.update(anchor, momentum, mean)
            nn.utils.vector_to_parameters(anchor.clone(), parameters)

    yield step
    dist.barrier()
    averager.shutdown()
    table.shutdown()


def main() -> None:
    serve(train)
