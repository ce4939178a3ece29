"""Boundaries whose two sides live in one process, and what trains across them: online learning and tensor parallelism.

Messages are bytes all the same, and each side keeps its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.papers.aqsgd.stages import Part, build
from experiments.papers.aqsgd.tasks import FineTuning
from thinwire.compressors import Coded, Delta, parse
from thinwire.kernels import derive_key
from thinwire.pipeline.message import BoundaryTensors, MessageLayout, Spec
from thinwire.pipeline.options import fitted
from thinwire.store import CenterTable, MemoryStore, Part as RecordPart, RecordFormat, Rows
from thinwire_tools.compare.gpt import GPT, Block, next_token_loss

Window = tuple[slice, ...]
"""Where in a sample's message, whose first dimension is whole, an activation lies."""


class Boundary:
    """What crosses in one direction between two parties, ``a [samples, ...]``, at most ``delta(...)`` of it.

    ``frame`` is the shape of a sample's message: that of its activation, or larger in all but the first dimension where
    activations are windows of it (a random crop, appendix H.6), of which a visit updates its own part only.
    """

    def __init__(self, spec: str, name: str, frame: Sequence[int], seed: int) -> None:
        compressor = parse(spec)
        self.keeps = isinstance(compressor, Delta)
        coder = compressor.coder if isinstance(compressor, Delta) else compressor
        assert isinstance(coder, Coded), "what codes activations is decoded by itself"
        self.coder, self.frame = coder, tuple(frame)
        self.sent_bytes = self.dense_bytes = 0
        self._name, self._seed, self._step = name, seed, 0
        form = RecordFormat((RecordPart(1, torch.Size(frame).numel(), False),), site=name)
        self.sender, self.receiver = MemoryStore(form), MemoryStore(form)

    def send(self, a: Tensor, samples: Sequence[int], windows: Sequence[Window] | None = None) -> Tensor:
        """What the receiver has of ``a``, of the same shape, in fp32; ``windows`` is one for each sample."""
        rows = Rows.uniform(samples, a.shape[1])
        crossing = BoundaryTensors((Spec(tuple(a.shape), torch.float32),))
        coded = [not self.keeps or self.sender.entry(sample) is not None for sample in samples]
        layout = MessageLayout.build(crossing, rows, coded, fitted(self.coder, crossing), site=self._name)
        message = torch.zeros(layout.num_bytes, dtype=torch.uint8)
        flat = a.detach().float().contiguous().view(-1)
        frames = self._load(self.sender, samples, a)
        layout.put_raw(flat, message)
        layout.encode(flat - self._cut(frames, a, windows), message, derive_key(self._seed, self._step))
        self._take(self.sender, layout, message, frames, a, windows)
        arrived = self._take(self.receiver, layout, message, self._load(self.receiver, samples, a), a, windows)
        self._step += 1
        self.sent_bytes += layout.num_bytes
        self.dense_bytes += 4 * a.numel()
        return arrived.view(a.shape)

    @property
    def alike(self) -> bool:
        """Whether both sides keep the same."""
        return self.sender.digest() == self.receiver.digest()

    def _load(self, store: MemoryStore, samples: Sequence[int], a: Tensor) -> Tensor:
        """Messages as a side keeps them: (samples, *frame), zero where nothing is."""
        if not self.keeps:
            return torch.zeros(a.shape)
        frames = torch.zeros(len(samples), *self.frame)
        known = [i for i, sample in enumerate(samples) if store.entry(sample) is not None]
        if known:
            kept = store.load(Rows.uniform((samples[i] for i in known), 0))
            frames[known] = kept.view(len(known), *self.frame)
        return frames

    def _cut(self, frames: Tensor, a: Tensor, windows: Sequence[Window] | None) -> Tensor:
        """The windows of messages, flat."""
        if windows is None or not self.keeps:
            return frames.reshape(-1)
        return torch.cat([frame[window].reshape(-1) for frame, window in zip(frames, windows, strict=True)])

    def _take(
        self,
        store: MemoryStore,
        layout: MessageLayout,
        message: Tensor,
        frames: Tensor,
        a: Tensor,
        windows: Sequence[Window] | None,
    ) -> Tensor:
        """What a message says, and what it changes in what a side keeps."""
        values = self._cut(frames, a, windows).clone()
        layout.take_raw(message, values)
        layout.decode(message, values, add=True)
        if self.keeps:
            for frame, own, window in zip(frames, values.view(a.shape), windows or [...] * len(frames), strict=True):
                frame[window] = own
            rows = Rows.uniform(layout.rows.samples, 0)
            store.save(store.form.encode(frames.view(-1), rows), rows, self._step)
        return values


class _Crossing(torch.autograd.Function):
    """Forward through one boundary, backward through another."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, there: Boundary, back: Boundary, samples: Sequence[int], windows: Any) -> Tensor:
        ctx.back = back
        return there.send(a, samples, windows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        # As one message, in which samples share the largest values: nothing is kept of each.
        gradient = gradients[0]
        return ctx.back.send(gradient.reshape(1, 1, -1), [0]).view(gradient.shape), None, None, None, None


def cross(
    a: Tensor, there: Boundary, back: Boundary, samples: Sequence[int], windows: Sequence[Window] | None = None
) -> Tensor:
    """``a`` as it arrives; its gradient goes back by ``back``, which keeps nothing."""
    return _Crossing.apply(a, there, back, samples, windows)  # pyright: ignore[reportReturnType]


_NUM_CENTERS = 256
_LAST_SHARE = 0.25


class CenterBoundary(Boundary):
    """A boundary whose sides keep cluster centers of positions instead of messages of samples."""

    def __init__(self, spec: str, name: str, width: int, seed: int, num: int = _NUM_CENTERS) -> None:
        super().__init__(spec, name, (), seed)
        self.of_sender, self.of_receiver = CenterTable(num, width), CenterTable(num, width)
        self.moved = self.magnitude = 0.0

    def send(self, a: Tensor, samples: Any, windows: Any = None) -> Tensor:
        vectors = a.detach().float().reshape(-1, a.shape[-1])
        begun = min(self.of_sender.missing, len(vectors))
        # Spread over the batch: neighbors in a text are alike.
        first = torch.linspace(0, len(vectors) - 1, begun).long() if begun else torch.empty(0, dtype=torch.int64)
        for side in (self.of_sender, self.of_receiver) if begun else ():
            side.begin(vectors[first])
        names = self.of_sender.nearest(vectors)
        change = vectors - self.of_sender.look_up(names)
        self.moved, self.magnitude = self.moved + float(change.abs().sum()), self.magnitude + float(vectors.abs().sum())
        coded, message = self._coded(change)
        for side in (self.of_sender, self.of_receiver):
            arrived = side.look_up(names) + coded
            arrived[first] = vectors[first]
            side.update(names, arrived)
        self.sent_bytes += message + names.numel() + 4 * first.numel() * a.shape[-1]
        self.dense_bytes += 4 * a.numel()
        self._step += 1
        return arrived.view(a.shape)

    def _coded(self, change: Tensor) -> tuple[Tensor, int]:
        """What arrives of a change, and its bytes."""
        coder = self.coder.fit(change.shape)
        assert isinstance(coder, Coded)
        key = derive_key(self._seed, self._step)
        return coder.roundtrip(change, key), coder.payload_bytes(change.numel(), torch.float32)

    @property
    def alike(self) -> bool:
        ours, theirs = self.of_sender.state_dict(), self.of_receiver.state_dict()
        return all(torch.equal(value, theirs[name]) for name, value in ours.items())

    @property
    def moved_share(self) -> float:
        """Mean magnitude of a change from the nearest center, in that of an activation."""
        return self.moved / max(self.magnitude, 1e-30)


def run_online(job: dict[str, Any], tell: Callable[[int, float], None]) -> dict[str, Any]:
    """Train for an epoch as ``job`` says: the last steps' mean loss, loss on what is held out, bytes."""
    task, seed = FineTuning.from_json(job["task"]), int(job["seed"])
    weights = None if job["weights"] is None else Path(job["weights"])
    parts = [Part(build(task, weights, seed), index, 2, half="") for index in range(2)]
    parameters = torch.nn.ModuleList(parts)
    optimizer = task.optimizer(parameters)
    forward = str(job["forward"])
    if job["centers"]:
        there: Boundary = CenterBoundary(forward, "forward", task.model.width, seed)
    else:
        there = Boundary(forward, "forward", (task.model.context, task.model.width), seed)
    back = Boundary(job["backward"], "backward", (), seed + 1)
    losses = []
    batches = [ids for epoch in range(task.epochs) for ids in task.order(seed, epoch)]
    for step, ids in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = task.rate(step)
        x, y = task.tuned_on(ids)
        optimizer.zero_grad(set_to_none=True)
        loss = next_token_loss(parts[1](cross(parts[0](x), there, back, ids.tolist())), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        tell(step + 1, losses[-1])
    with torch.no_grad():
        held_out = [float(next_token_loss(parts[1](parts[0](x)), y)) for x, y in task.held_out()]
    last = losses[-max(1, round(_LAST_SHARE * len(losses))) :]
    return {
        "losses": losses,
        "loss": sum(last) / len(last),
        "held_out": sum(held_out) / len(held_out),
        "sent_bytes": there.sent_bytes,
        "dense_bytes": there.dense_bytes,
        "alike": there.alike,
        "moved_share": there.moved_share if isinstance(there, CenterBoundary) else None,
        "spec": str(parse(forward)),
    }


class Sum:
    """``A_Q = Q[Q(A_1) + … + Q(A_N)]`` (F.2) of one layer. With ``delta(...)`` each of these N + 1 messages is what
    changed of its sample's since the last visit (F, with equations 3 and 4 of Tang et al. 2019)."""

    def __init__(self, spec: str, name: str, shape: Sequence[int], num_ranks: int, seed: int) -> None:
        self.parts = [Boundary(spec, f"{name} part {rank}", shape, seed) for rank in range(num_ranks)]
        self.whole = Boundary(spec, f"{name} sum", shape, seed)

    @property
    def boundaries(self) -> list[Boundary]:
        return [*self.parts, self.whole]

    def reduce(self, parts: Sequence[Tensor], samples: Sequence[int]) -> Tensor:
        """The sum as it arrives on every rank: parts and sum are (samples, length, width)."""
        arrived = [boundary.send(part, samples) for boundary, part in zip(self.parts, parts, strict=True)]
        return self.whole.send(torch.stack(arrived).sum(0), samples)


class _Summed(torch.autograd.Function):
    """Its gradient is the sum's, for every part: that needs no message where a rank has the whole of it."""

    @staticmethod
    def forward(ctx: Any, made: Sum, samples: Sequence[int], *parts: Tensor) -> Tensor:
        ctx.num = len(parts)
        return made.reduce(parts, samples)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, *gradients * ctx.num


class RowParallel(nn.Module):
    """A linear layer whose input features lie on several ranks (Shoeybi et al. 2019), each with its part of the sum;
    all of them in one process."""

    def __init__(self, linear: nn.Linear, made: Sum | None, num_ranks: int) -> None:
        super().__init__()
        self.linear, self.made, self.num_ranks = linear, made, num_ranks
        self.samples: Sequence[int] = ()

    def forward(self, x: Tensor) -> Tensor:
        if self.made is None or not self.training:
            return self.linear(x)
        shares = zip(x.chunk(self.num_ranks, -1), self.linear.weight.chunk(self.num_ranks, 1), strict=True)
        parts = [functional.linear(share, weight) for share, weight in shares]
        summed = _Summed.apply(self.made, self.samples, *parts)
        assert isinstance(summed, Tensor)
        return summed + self.linear.bias


class OfSamples(Protocol):
    """A layer that is given the ids of a batch's samples."""

    samples: Sequence[int]


def fine_tune(
    gpt: GPT, task: FineTuning, layers: Sequence[OfSamples], seed: int, tell: Callable[[int, float], None]
) -> tuple[list[float], list[float]]:
    """Train ``gpt`` on all epochs of ``task``: the loss of each step, and of each held-out batch at the end.

    ``tell`` is called with the number of steps so far and the last one's loss.
    """
    optimizer = task.optimizer(gpt)
    losses: list[float] = []
    for ids in (ids for epoch in range(task.epochs) for ids in task.order(seed, epoch)):
        for group in optimizer.param_groups:
            group["lr"] = task.rate(len(losses))
        for layer in layers:
            layer.samples = ids.tolist()
        x, y = task.tuned_on(ids)
        optimizer.zero_grad(set_to_none=True)
        loss = next_token_loss(gpt(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        tell(len(losses), losses[-1])
    gpt.eval()
    with torch.no_grad():
        return losses, [float(next_token_loss(gpt(x), y)) for x, y in task.held_out()]


def run_tensor_parallel(job: dict[str, Any], tell: Callable[[int, float], None]) -> dict[str, Any]:
    """Fine-tune as ``job`` says: losses by epoch, loss on what is held out, bytes."""
    task, seed, num_ranks = FineTuning.from_json(job["task"]), int(job["seed"]), int(job["num_ranks"])
    gpt = build(task, None if job["weights"] is None else Path(job["weights"]), seed)
    shape, layers = (task.model.context, task.model.width), []
    for index, block in enumerate(gpt.blocks):
        assert isinstance(block, Block)
        for name in ("attention_out", "mlp_out"):
            made = Sum(job["spec"], f"{index} {name}", shape, num_ranks, seed) if job["spec"] else None
            layer = RowParallel(getattr(block, name), made, num_ranks)
            setattr(block, name, layer)
            layers.append(layer)
    losses, held_out = fine_tune(gpt, task, layers, seed, tell)
    boundaries = [boundary for layer in layers if layer.made for boundary in layer.made.boundaries]
    last = losses[-task.steps_per_epoch :]
    return {
        "losses": losses,
        "loss": sum(last) / len(last),
        "held_out": sum(held_out) / len(held_out),
        "sent_bytes": sum(boundary.sent_bytes for boundary in boundaries),
        "dense_bytes": sum(boundary.dense_bytes for boundary in boundaries),
        "alike": all(boundary.alike for boundary in boundaries),
    }
