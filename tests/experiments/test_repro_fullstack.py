"""``python -m experiments fullstack``: what is trained, and boundaries within one process."""

from __future__ import annotations

import pytest
import torch

from experiments.papers.aqsgd.simulated import Boundary, cross
from experiments.papers.aqsgd.split import Splitting, Training, Views
from experiments.papers.aqsgd.tasks import STACKED_SMALL as SMALL

BITS_3 = "maxabs(bits=3)"


def test_replicas_visit_their_own_samples_once_an_epoch() -> None:
    shares = [[torch.cat(SMALL.share(1, epoch, replica)) for epoch in range(2)] for replica in range(2)]
    for replica in range(2):
        first, second = shares[replica]
        assert first.tolist() != second.tolist()
        assert sorted(first.tolist()) == sorted(second.tolist())
        assert len(SMALL.share(1, 0, replica)) == SMALL.steps_per_epoch
    assert sorted(torch.cat([share[0] for share in shares]).tolist()) == list(range(SMALL.samples))


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_first_visit_is_exact_and_changes_get_small() -> None:
    boundary, a = Boundary(f"delta({BITS_3})", "b", (16, 32), 0), values(2, 16, 32)
    assert torch.equal(boundary.send(a, [4, 9]), a)
    errors = []
    for _ in range(3):
        errors.append(float((boundary.send(a + 0.1, [4, 9]) - a - 0.1).abs().mean()))
        assert boundary.alike
    direct = float((Boundary(BITS_3, "b", (16, 32), 0).send(a + 0.1, [4, 9]) - a - 0.1).abs().mean())
    assert errors[2] < errors[1] < errors[0] < direct / 4


def test_a_window_updates_its_own_part_of_a_message_only() -> None:
    boundary, frame = Boundary("delta(raw)", "b", (2, 4, 4), 0), values(1, 2, 4, 4)
    corner = [(slice(None), slice(0, 3), slice(1, 4))]
    seen = frame[:, :, 0:3, 1:4]
    assert torch.equal(boundary.send(seen, [0], corner), seen)
    kept = boundary._load(boundary.receiver, [0], frame)
    assert torch.equal(kept[:, :, 0:3, 1:4], seen)
    assert not kept[:, :, 3].any()
    assert not kept[:, :, :, 0].any()
    # Another crop of the same image finds what it shares with the first.
    boundary.send(frame[:, :, 1:4, 0:3], [0], [(slice(None), slice(1, 4), slice(0, 3))])
    kept = boundary._load(boundary.receiver, [0], frame)
    torch.testing.assert_close(kept[:, :, 1:4, 0:3], frame[:, :, 1:4, 0:3])
    torch.testing.assert_close(kept[:, :, 0, 1:4], frame[:, :, 0, 1:4])
    assert boundary.alike


def test_gradients_go_back_compressed() -> None:
    a = values(4, 8, 32).requires_grad_()
    there, back = Boundary("raw", "f", (8, 32), 0), Boundary("topk(density=0.2) | maxabs(bits=8)", "b", (), 1)
    weight = values(4, 8, 32, seed=1)
    (cross(a, there, back, range(4)) * weight).sum().backward()
    assert a.grad is not None
    kept = a.grad != 0
    assert 0.15 < float(kept.float().mean()) <= 0.21
    assert float(weight.abs()[kept].min()) >= float(weight.abs()[~kept].max()) - 0.05
    torch.testing.assert_close(a.grad[kept], weight[kept], atol=0.05, rtol=0.02)
    assert back.sent_bytes < 0.3 * back.dense_bytes


def test_a_view_lies_where_its_window_says() -> None:
    pixels = torch.arange(2 * 64.0).view(2, 1, 8, 8)
    views = Views(torch.tensor([False, True]), torch.tensor([0, 2]), torch.tensor([2, 1]))
    seen = views.apply(pixels, 1)
    assert views.samples(torch.tensor([5, 6])) == [10, 13]
    for index, image in enumerate((pixels[0], pixels[1].flip(2))):
        padded = torch.nn.functional.pad(image, (1, 1, 1, 1))
        assert torch.equal(seen[index], padded[views.windows(8, 1)[index]])
    # A position of the second cut stands for four pixels.
    assert views.windows(2, 4)[1] == (slice(None), slice(0, 2), slice(0, 2))


def test_split_training_without_compression_is_plain_training() -> None:
    pytest.importorskip("sklearn")
    task = Splitting(most_images=24, clients=2, local_epochs=1, rounds=1)
    raw, plain = (Training(task, "raw", "raw", 3) for _ in range(2))
    ids = torch.arange(8)
    loss = raw._step(ids)
    images = task.images
    views = Views.draw(8, task.padding, plain.generator)
    seen = views.apply(images.normalized(images.train[ids]), task.padding)
    expected = torch.nn.functional.cross_entropy(plain.model(seen), images.train_labels[ids])
    expected.backward()
    plain.optimizer.step()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    for ours, theirs in zip(raw.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
