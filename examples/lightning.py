"""Lightning's Trainer with gradients in 4 bits: one callback more than without.

python examples/lightning.py
Needs: pip install '.[trainers]' in the clone
"""

import pytorch_lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thinwire


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
    # On a slow network leave skip_if_slower out.
    callback = thinwire.lightning_callback("4bit", skip_if_slower=False)
    trainer = pytorch_lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        callbacks=[callback],
        max_steps=40,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Flip(), DataLoader(TensorDataset(torch.randn(4096, 64)), batch_size=32, shuffle=True))
    print(f"rank {trainer.global_rank}: {callback.wire.stats}", flush=True)


if __name__ == "__main__":
    main()
