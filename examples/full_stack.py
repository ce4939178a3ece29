"""Every byte between machines compressed: a pipeline of two stages, in two replicas.

    torchrun --nproc-per-node 4 examples/full_stack.py
    torchrun --nproc-per-node 4 examples/full_stack.py --epochs 2 --checkpoint saved   # and again, to go on

Activations travel as the change since each sample's last visit, in 3 bits (AQ-SGD); their gradients in 6; and between
replicas, once the optimizer's variance rests, its momentum in 4 (QuantizedAdam). A byte-level transformer learns the
source of Python's standard library. The setting is that of section 4.3 of the AQ-SGD paper, for a laptop.
"""

import argparse
import hashlib
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.data import Share

STAGES, REPLICAS = 2, 2
CONTEXT, WIDTH, LAYERS, HEADS = 64, 96, 4, 4
SAMPLES, BATCH, MICRO_BATCHES = 128, 16, 4


class Blocks(nn.Module):
    """One stage: the embedding before the first blocks, or the head behind the last."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH) if stage == 0 else None
        self.position = nn.Parameter(torch.zeros(CONTEXT, WIDTH)) if stage == 0 else None
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(LAYERS // STAGES)
        )
        self.head = nn.Linear(WIDTH, 256) if stage == STAGES - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x) + self.position
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x) if self.head is not None else x


def samples() -> Tensor:
    """Windows of the standard library's source, one byte longer than the context: int64 (samples, context + 1)."""
    text = b""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) > SAMPLES * (CONTEXT + 1):
            break
    return torch.tensor(list(text[: SAMPLES * (CONTEXT + 1)])).view(SAMPLES, CONTEXT + 1)


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    """A micro-batch's share of the loss: gradients are whole before replicas exchange them."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten()) / MICRO_BATCHES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6, help="passes over the data in this run")
    parser.add_argument("--checkpoint", type=Path, help="folder to go on from, if there is one, and to save to")
    parser.add_argument("--plain", action="store_true", help="everything uncompressed, to compare with")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (REPLICAS, STAGES), mesh_dim_names=("replica", "stage"))
    replica, index = mesh.get_local_rank("replica"), mesh.get_local_rank("stage")

    torch.manual_seed(index)  # replicas begin alike
    model = DistributedDataParallel(Blocks(index), process_group=mesh.get_group("replica"))
    optimizer = thinwire.optim.QuantizedAdam(model.parameters(), lr=2e-3, warmup=None if options.plain else 12)
    wire = thinwire.compress(
        model, "raw" if options.plain else "minmax(bits=4, bucket=128)", optimizer=optimizer, skip_if_slower=False
    )

    # DDP cannot form its buckets after a pass that only asks for shapes: they are told beforehand.
    hidden = torch.zeros(BATCH // MICRO_BATCHES, CONTEXT, WIDTH, requires_grad=True)
    first, last = index == 0, index == STAGES - 1
    tokens = torch.zeros(BATCH // MICRO_BATCHES, CONTEXT, dtype=torch.int64)
    logits = torch.zeros(BATCH // MICRO_BATCHES, CONTEXT, 256, requires_grad=True)
    stage = PipelineStage(
        model,
        index,
        STAGES,
        torch.device("cpu"),
        input_args=tokens if first else hidden,
        output_args=logits if last else hidden,
        group=mesh.get_group("stage"),
    )
    stage = thinwire.compress(
        stage,
        forward="raw" if options.plain else "delta(maxabs(bits=3))",
        backward="raw" if options.plain else "maxabs(bits=6)",
    )
    schedule = ScheduleGPipe(stage, n_microbatches=MICRO_BATCHES, loss_fn=loss_of, scale_grads=False)

    text = samples()
    share = Share(range(SAMPLES), replica, REPLICAS)  # each replica keeps messages of its own samples
    done = 0
    saved = options.checkpoint / f"rank{dist.get_rank()}.pt" if options.checkpoint else None
    if saved and saved.exists():
        state = torch.load(saved, weights_only=True)
        done = state["epochs"]
        for part, name in ((model.module, "model"), (optimizer, "optimizer"), (wire, "wire"), (stage, "stage")):
            part.load_state_dict(state[name])

    for epoch in range(done, done + options.epochs):
        share.set_epoch(epoch)
        losses = []
        for ids in torch.tensor(list(share)).split(BATCH):
            optimizer.zero_grad()
            x, y = text[ids, :-1], text[ids, 1:]
            if first:
                stage.set_sample_ids(ids)
                schedule.step(x)
            else:
                schedule.step(target=y, losses=losses)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if last and replica == 0:
            print(f"epoch {epoch}: loss {MICRO_BATCHES * torch.stack(losses).mean():.4f}")

    if saved:
        saved.parent.mkdir(parents=True, exist_ok=True)
        state = {"model": model.module, "optimizer": optimizer, "wire": wire, "stage": stage}
        torch.save(
            {"epochs": done + options.epochs, **{name: part.state_dict() for name, part in state.items()}}, saved
        )
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    print(f"stage {index}, replica {replica}: {stage.stats}")
    print(f"stage {index}, replica {replica}: gradients: {wire.stats}; parameters {digest[:16]}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
