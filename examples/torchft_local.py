"""Local updates among workers that come and go, with torchft (pip install torchft).

Start a lighthouse on one machine, and a worker on each:

    torchft_lighthouse --min_replicas 2 --join_timeout_ms 5000
    python examples/torchft_local.py --lighthouse http://HOST:29510

Workers may be killed, and others started, at any time: `local.step()` exchanges with those who are there. A new worker
begins with the others' shared weights, and at their step.
"""

from __future__ import annotations

import argparse
import socket
import time
import zlib
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torchft import Manager, ProcessGroupGloo

import thinwire


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lighthouse", required=True, help="the lighthouse's address, as http://host:29510")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="how long a step takes at least")
    parser.add_argument("--min-workers", type=int, default=1, help="an exchange of fewer does not count")
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds for which a silent worker is waited for")
    args = parser.parse_args()
    timeout = timedelta(seconds=args.timeout)

    # The ranks of one worker meet in a store, here a single one. Workers meet in the store of one of them, so that its
    # address has to be one for all.
    host = socket.gethostname()
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    group = ProcessGroupGloo(timeout=timeout)
    manager = Manager(
        pg=group,
        load_state_dict=None,
        state_dict=None,
        min_replica_size=args.min_workers,
        use_async_quorum=False,  # a worker has to have the shared weights before it goes on
        timeout=timeout,
        quorum_timeout=timedelta(minutes=10),  # longer than the time between two exchanges
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        lighthouse_addr=args.lighthouse,
    )

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    local = thinwire.local.ManagedDiLoCo(model, optimizer, manager, group, every=args.every)
    print(f"joins at step {local.steps}", flush=True)

    draws = torch.Generator()
    draws.seed()  # every worker has data of its own
    while local.steps < args.steps:
        x = torch.randn(32, 64, generator=draws)
        loss = (model(x) - x.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(args.step_seconds)
        exchanges = manager.current_step()
        local.step()
        if manager.current_step() > exchanges:
            weights = torch.cat([p.detach().flatten() for p in model.parameters()])
            checksum = zlib.crc32(weights.numpy().tobytes())
            workers = len(local.members.names)
            print(f"step {local.steps}: loss {loss.item():.4f}, {workers} workers, weights {checksum:08x}", flush=True)
    local.finish()
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
