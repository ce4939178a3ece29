"""What compression does, logged in every step: to a JSON Lines file, TensorBoard or Weights & Biases.

torchrun --nproc-per-node 2 examples/logs.py --to jsonl --picture logs.svg
torchrun --nproc-per-node 2 examples/logs.py --to tensorboard
torchrun --nproc-per-node 2 examples/logs.py --to wandb
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire

STEPS = 60


def target(kind: str, folder: Path) -> Any:
    """What rank 0 logs to."""
    if kind == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(folder / "runs"))
    if kind == "wandb":
        import wandb

        return wandb.init(project="thinwire", dir=folder)
    return folder / "stats.jsonl"


def draw(log: Path, picture: Path) -> None:
    """Bytes of each step, and how many times fewer than without compression."""
    from matplotlib.figure import Figure

    records = [json.loads(line) for line in log.read_text().splitlines()]
    steps = [record["step"] for record in records]
    figure = Figure(figsize=(9, 3), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2), ("per_step/payload_sent_bytes", "interval/ratio"), strict=True):
        axes.plot(steps, [record[name] for record in records], drawstyle="steps-mid")
        axes.set(title=name, xlabel="step", ylim=(0, None))
        axes.grid(alpha=0.25)
    figure.savefig(picture)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--to", choices=["jsonl", "tensorboard", "wandb"], default="jsonl")
    parser.add_argument("--folder", type=Path, default=Path("."))
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # On a slow network leave skip_if_slower out.
    wire = thinwire.compress(model, "4bit", start=20, skip_if_slower=False)
    log = target(arguments.to, arguments.folder) if dist.get_rank() == 0 else None
    with thinwire.StatsLogger(wire, log) as logger:
        for _ in range(STEPS):
            x = torch.randn(32, 64)
            optimizer.zero_grad()
            (model(x) - x.flip(1)).square().mean().backward()
            optimizer.step()
            logger.log()
    if dist.get_rank() == 0:
        getattr(log, "close" if arguments.to == "tensorboard" else "finish", lambda: None)()
        if arguments.picture is not None:
            draw(arguments.folder / "stats.jsonl", arguments.picture)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
