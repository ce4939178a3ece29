"""Split learning: clients in turn train both ends of a network, a server what lies between. No image or label leaves a
client. Images are flipped and cropped at random, and messages of activations are cropped as their images are.

torchrun --nproc-per-node 3 examples/split_learning.py

Rank 0 has the client's first layers and images, rank 1 is the server, rank 2 has the client's last layer and labels.
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import thinwire

SIZE, PADDING, BATCH, CLIENTS, ROUNDS = 8, 1, 32, 4, 8


def parts() -> list[nn.Module]:
    front = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU())
    middle = nn.Sequential(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(32, 16, 3, padding=1))
    return [front, middle, nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(16 * (SIZE // 2) ** 2, 10))]


def shares(labels: Tensor) -> list[Tensor]:
    """The images of each client: of every class another share."""
    torch.manual_seed(1)
    drawn = torch.distributions.Dirichlet(torch.full((CLIENTS,), 5.0)).sample((10,))
    owners = torch.multinomial(drawn[labels], 1).squeeze(1)
    return [(owners == client).nonzero().squeeze(1) for client in range(CLIENTS)]


def seen(images: Tensor, flipped: Tensor, corners: Tensor) -> Tensor:
    """Images as an epoch sees them: flipped or not, padded, and cropped from their corners on."""
    mirrored = torch.where(flipped.view(-1, 1, 1, 1), images.flip(3), images)
    padded = nn.functional.pad(mirrored, (PADDING,) * 4)
    pairs = zip(padded, corners.tolist(), strict=True)
    return torch.stack([image[:, down : down + SIZE, right : right + SIZE] for image, (down, right) in pairs])


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    part = parts()[rank]
    stage = PipelineStage(part, rank, 3, torch.device("cpu"))
    stage = thinwire.compress(
        stage,
        forward="delta(maxabs(bits=4))",
        backward="maxabs(bits=8)",
        store=thinwire.store.Crops(size=SIZE, padding=PADDING),
    )
    schedule = ScheduleGPipe(stage, n_microbatches=1, loss_fn=nn.functional.cross_entropy)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.02, momentum=0.9)

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(digits.target)
    held_out = len(images) // 6
    clients = shares(labels[held_out:])
    draws = torch.Generator().manual_seed(0)  # every rank draws the same batches, and needs no others' data
    for number in range(ROUNDS):
        losses: list[Tensor] = []
        of_round: list[Tensor] = []
        for share in clients:
            order = held_out + share[torch.randperm(len(share), generator=draws)]
            for ids in (ids for ids in order.split(BATCH) if len(ids) == BATCH):
                flipped = torch.randint(2, (BATCH,), generator=draws).bool()
                corners = torch.randint(2 * PADDING + 1, (BATCH, 2), generator=draws)
                optimizer.zero_grad()
                if stage.is_first:
                    stage.set_sample_ids(2 * ids + flipped, corners=corners)  # a mirror image is another sample
                    schedule.step(seen(images[ids], flipped, corners))
                else:
                    schedule.step(target=labels[ids] if stage.is_last else None, losses=losses)
                optimizer.step()
                of_round += losses
        if stage.is_last:
            print(f"round {number + 1}: loss {torch.stack(of_round).mean().item():.4f}", flush=True)
    if stage.is_first:
        stage.set_sample_ids(range(held_out))
    with torch.no_grad():
        target = labels[:held_out] if stage.is_last else None
        logits = schedule.eval(*([images[:held_out]] if stage.is_first else []), target=target)
    if stage.is_last:
        right = (logits.argmax(1) == labels[:held_out]).float().mean().item()
        print(f"{right:.1%} of held-out images are classified rightly", flush=True)
    print(f"rank {rank}: {stage.stats}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
