"""Online learning (appendix G): every sample comes once; changes are taken from cluster centers, or from nothing."""

# No `from __future__ import annotations` here: ranks make tasks again of plain values.

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.papers.aqsgd.stages import Part, build
from experiments.papers.aqsgd.tasks import FineTuning
from experiments.papers.fullstack.simulated import Boundary, cross
from thinwire.compressors import Coded, parse
from thinwire.kernels import derive_key
from thinwire.store import CenterTable
from thinwire_tools.compare.gpt import next_token_loss

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


def run(job: dict[str, Any], tell: Callable[[int, float], None]) -> dict[str, Any]:
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
