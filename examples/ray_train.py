"""Ray Train with gradients in 2 bits: a worker that is killed is replaced, and training goes on where it was.

python examples/ray_train.py
python examples/ray_train.py --fsdp
Needs: pip install 'ray[train]'
"""

import argparse
import os
import tempfile
from pathlib import Path

import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import thinwire

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def train(config: dict) -> None:
    """What every worker runs."""
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64))
    if config["fsdp"]:
        fully_shard(model)
    else:
        model = prepare_model(model)  # in DDP
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # On a slow network leave skip_if_slower out.
    wire = thinwire.compress(model, "ef(minmax(bits=2))", skip_if_slower=False)

    first, checkpoint = 0, ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt", weights_only=True)
        set_state_dict(model, optimizer, **state["parts"], options=WHOLE)
        wire.load_state_dict(state["wire"])
        first = state["step"]

    for step in range(first, config["steps"]):
        if step == config["die_at"] and rank == 1:
            died = Path(config["died"])
            if not died.exists():
                died.touch()
                os._exit(1)
        draws = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(32, 64, generator=draws)
        loss = (model(x) - x.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 10 == 0:
            # On every worker. What is sharded is gathered on worker 0, which writes.
            model_state, optimizer_state = get_state_dict(model, optimizer, options=WHOLE)
            gathered = wire.gather_state_dict()
            metrics = {"step": step + 1, "loss": loss.item(), "first": first}
            if rank != 0:
                ray.train.report(metrics)
                continue
            with tempfile.TemporaryDirectory() as folder:
                parts = {"model_state_dict": model_state, "optim_state_dict": optimizer_state}
                torch.save({"parts": parts, "wire": gathered, "step": step + 1}, Path(folder) / "state.pt")
                ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--die-at", type=int, help="worker 1 ends itself at this step, once")
    parser.add_argument("--fsdp", action="store_true", help="FSDP2 instead of DDP")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            train,
            train_loop_config={**vars(arguments), "died": f"{folder}/died"},
            scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
            torch_config=TorchConfig(backend="gloo"),
            run_config=RunConfig(storage_path=folder, name="run", failure_config=FailureConfig(max_failures=1)),
        )
        metrics = trainer.fit().metrics
    assert metrics is not None
    print(f"step {metrics['step']}: loss {metrics['loss']:.6f}, last attempt from step {metrics['first']}")


if __name__ == "__main__":
    main()
