"""Hugging Face's Trainer, or accelerate in a loop of one's own, with gradients in 4 bits: two lines more than without.

torchrun --nproc-per-node 2 examples/trainer.py
torchrun --nproc-per-node 2 examples/trainer.py --accelerate
Needs: pip install '.[trainers]' in the clone
"""

import argparse
import tempfile

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import thinwire

STEPS = 30


class Counting(Dataset):
    """Sequences that count upwards from a random start: what comes next can be learned."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (index * 7 + torch.arange(32)) % 64
        return {"input_ids": tokens, "labels": tokens}


def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=2))


def with_trainer(folder: str) -> None:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    # On a slow network leave skip_if_slower out.
    callback = thinwire.trainer_callback("4bit", skip_if_slower=False)
    trainer = Trainer(model(), arguments, train_dataset=Counting(), callbacks=[callback])
    trainer.train()
    for entry in trainer.state.log_history:
        if "loss" in entry and trainer.is_world_process_zero():
            print(f"step {entry['step']}: loss {float(entry['loss']):.4f}")
    print(f"rank {arguments.process_index}: {callback.wire.stats}", flush=True)


def with_accelerate() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW((net := model()).parameters(), lr=3e-3)
    net, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(Counting(), batch_size=8, shuffle=True))
    # On a slow network leave skip_if_slower out.
    wire = thinwire.compress(net, "4bit", skip_if_slower=False)
    accelerator.register_for_checkpointing(wire.checkpointable())
    for step, batch in zip(range(1, STEPS + 1), loader, strict=False):
        loss = net(**batch).loss
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        if step % 10 == 0 and accelerator.is_main_process:
            print(f"step {step}: loss {loss.item():.4f}")
    print(f"rank {accelerator.process_index}: {wire.stats}", flush=True)
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--accelerate", action="store_true")
    if parser.parse_args().accelerate:
        with_accelerate()
    else:
        with tempfile.TemporaryDirectory() as folder:
            with_trainer(folder)
