"""Local updates under accelerate: it prepares the optimizer, the schedule and the data, and the model stays unwrapped.

torchrun --nproc-per-node 2 examples/accelerate_local.py
Needs: pip install '.[trainers]' in the clone
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thinwire

STEPS = 30


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)).to(accelerator.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS * accelerator.num_processes)
    data = DataLoader(TensorDataset(torch.randn(4096, 64)), batch_size=32, shuffle=True)
    optimizer, schedule, data = accelerator.prepare(optimizer, schedule, data)  # not the model: it would be in DDP
    local = thinwire.local.DiLoCo(model, optimizer, every=10, total_steps=STEPS)

    for (x,) in data:
        with accelerator.accumulate(model):
            loss = (model(x) - x.flip(1)).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            local.step()
            if local.steps % 10 == 0:
                accelerator.print(f"step {local.steps}: loss {loss.item():.4f}")
            if local.steps == STEPS:
                break
    local.finish()
    print(f"rank {accelerator.process_index}: {local.wire.stats}", flush=True)
    local.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
