"""A training that can be killed at any time: it goes on from its last checkpoint, with any number of ranks.

torchrun --nproc-per-node 2 --max-restarts 3 examples/elastic.py --checkpoint out/elastic.pt
"""

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire

SAVE_EVERY = 10


def save(path: Path, state: dict) -> None:
    """Write the file whole: a rank that is killed meanwhile leaves the former one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    torch.save(state, part)
    part.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, required=True, help="where all ranks can read it")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--die-at", type=int, help="rank 1 kills itself at this step of the first attempt")
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # On a slow network leave skip_if_slower out.
    wire = thinwire.compress(model, "ef(minmax(bits=2))", skip_if_slower=False)

    first = 0
    if arguments.checkpoint.exists():
        state = torch.load(arguments.checkpoint, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        wire.load_state_dict(state["wire"])
        first = state["step"]
        if rank == 0:
            print(f"attempt {attempt}: goes on from step {first}", flush=True)

    for step in range(first, arguments.steps):
        if step == arguments.die_at and attempt == 0 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        # By step and rank, so that a run that goes on sees the batches that it would have seen.
        draws = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(32, 64, generator=draws)
        loss = (model(x) - x.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.6f}", flush=True)
        if (step + 1) % SAVE_EVERY == 0:
            gathered = wire.gather_state_dict()  # on every rank
            if rank == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                save(arguments.checkpoint, {**state, "wire": gathered, "step": step + 1})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
