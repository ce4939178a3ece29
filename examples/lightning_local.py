"""Lightning's Trainer with local updates: every rank trains alone, and a callback exchanges what they have learned.

python examples/lightning_local.py
Needs: pip install '.[trainers]' in the clone
"""

import pytorch_lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thinwire


class LocalUpdates(pytorch_lightning.Callback):
    """Exchanges compressed progress every few steps, in the place of DDP's gradients."""

    def on_train_start(self, trainer: pytorch_lightning.Trainer, module: pytorch_lightning.LightningModule) -> None:
        thinwire.local.send_nothing(trainer.strategy.model)
        (optimizer,) = trainer.optimizers
        local = thinwire.local.DiLoCo(module, optimizer, every=10, total_steps=trainer.max_steps)
        optimizer.register_step_post_hook(lambda *_: local.step())
        self.local = local

    def on_train_end(self, trainer: pytorch_lightning.Trainer, module: pytorch_lightning.LightningModule) -> None:
        self.local.finish()
        print(f"rank {trainer.global_rank}: {self.local.wire.stats}", flush=True)
        self.local.close()


class Flip(pytorch_lightning.LightningModule):
    """Learns to turn vectors around."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        (x,) = batch
        loss = (self.net(x) - x.flip(1)).square().mean()
        if self.global_rank == 0 and index % 10 == 9:
            print(f"step {index + 1}: loss {loss.item():.4f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    pytorch_lightning.seed_everything(0)
    trainer = pytorch_lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        callbacks=[LocalUpdates()],
        max_steps=40,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Flip(), DataLoader(TensorDataset(torch.randn(4096, 64)), batch_size=32, shuffle=True))


if __name__ == "__main__":
    main()
