"""A GPT cut into the stages of a pipeline, and one rank's stage with all that trains it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import thinwire
from experiments.papers.aqsgd.methods import Method, choices
from experiments.papers.aqsgd.tasks import FineTuning
from thinwire_tools.compare.gpt import GPT, Block, rotary_angles

_SCHEDULES: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_FP16_SCALE = 1024.0
"""Of the loss, or gradients of activations would fall below what fp16 has; gradients of weights are divided by it."""


class Part(nn.Module):
    """Stage ``index`` of ``num_stages`` of a GPT: tokens in at the first, logits out at the last.

    The GPT's two uses of its embedding lie on different ranks, so that each end goes on with a copy of its own.
    ``half``: blocks compute in bf16 or fp16, and that is what crosses to the next stage.
    """

    def __init__(self, gpt: GPT, index: int, num_stages: int, *, half: str) -> None:
        super().__init__()
        config = gpt.config
        first, last = index == 0, index == num_stages - 1
        blocks = list(gpt.blocks)
        ends = [len(blocks) * stage // num_stages for stage in range(num_stages + 1)]
        self._half = _HALVES.get(half)
        self.embedding = gpt.embedding if first else None
        self.blocks = nn.ModuleList(blocks[ends[index] : ends[index + 1]])
        self.norm = gpt.norm if last else None
        self.head = nn.Linear(config.width, config.vocabulary, bias=False) if last else None
        if self.head is not None:
            with torch.no_grad():
                self.head.weight.copy_(gpt.embedding.weight)
        angles = rotary_angles(config.context, config.width // config.heads)
        self._cos, self._sin = angles.real.contiguous(), angles.imag.contiguous()

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = (part[: x.shape[1]].to(x.device) for part in (self._cos, self._sin))
        if self.embedding is not None:
            x = self.embedding(x)
        x = x.float()
        with torch.autocast("cpu", self._half, enabled=self._half is not None):
            for block in self.blocks:
                assert isinstance(block, Block)
                x = block(x, cos, sin)
        if self.norm is not None and self.head is not None:
            return self.head(self.norm(x.float()))
        return x if self._half is None else x.to(self._half)


def build(task: FineTuning, weights: Path | None, seed: int = 0) -> GPT:
    """The network with the weights that were first trained, or random ones of ``seed``."""
    gpt = task.build(seed)
    if weights is not None:
        gpt.load_state_dict(torch.load(weights, weights_only=True))
    return gpt


class Pipe:
    """This rank's stage of one training: network, schedule, optimizer, messages.

    It has process groups of its own, in which steps are counted from 0: what a training draws does not depend on those
    before it.
    """

    def __init__(self, task: FineTuning, method: Method, seed: int, weights: Path | None, folder: Path) -> None:
        self.task, self.method = task, method
        self.group = self._join()
        self.index, self.num_stages = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.part = Part(build(task, weights, seed), self.index, self.num_stages, half=task.half)
        module, more = self._attach(seed)
        self.stage = thinwire.compress_stage(
            PipelineStage(module, self.index, self.num_stages, torch.device("cpu"), group=self.group, **more),
            forward=method.forward,
            backward=method.backward,
            store=method.place(folder, self._num_samples),
            precision=method.precision,
            seed=seed,
            warmup_epochs=method.warmup_epochs,
            adapt=choices() if method.by_link else None,
        )
        self._scale = _FP16_SCALE if task.half == "fp16" else 1.0
        # A step's gradient is whole before it leaves for other replicas, not only when the schedule scales it.
        self.schedule = _SCHEDULES[method.schedule](self.stage, task.num_micro, loss_fn=self._loss, scale_grads=False)

    def _join(self) -> dist.ProcessGroup:
        """The pipeline's group; called on all ranks."""
        group = dist.new_group(list(range(dist.get_world_size())))
        assert isinstance(group, dist.ProcessGroup), "all ranks are in it"
        return group

    def _attach(self, seed: int) -> tuple[nn.Module, dict[str, Any]]:
        """What the stage runs, and further options of the stage; the optimizer is made."""
        self.optimizer = self.task.optimizer(self.part)
        return self.part, {}

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """A micro-batch's share of the loss."""
        return self._scale / self.task.num_micro * self.task.loss_of(logits, targets)

    @property
    def _num_samples(self) -> int:
        """That this pipeline sees."""
        return self.task.samples

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1

    def order(self, seed: int, epoch: int) -> tuple[Tensor, ...]:
        """Ids of each of this pipeline's batches of an epoch: shape (batch,)."""
        return self.task.order(seed, epoch)

    def step(self, ids: Tensor, rate: float) -> float | None:
        """Train on some samples; the loss, where the last stage is."""
        x, y = self.task.tuned_on(ids)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self.stage.is_first:
            self.stage.set_sample_ids(ids)
        self.optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        inputs, wanted = self._given(x, y)
        self.schedule.step(*inputs, target=wanted, losses=losses, return_outputs=False)
        if self._scale != 1:
            for parameter in self.part.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(self._scale)
        self.optimizer.step()
        return float(torch.stack(losses).detach().sum()) / self._scale if self.is_last else None

    @torch.no_grad()
    def held_out(self) -> tuple[float, float] | None:
        """Loss on what is held out, and the share of what is classified right, where the last stage is; activations
        are sent as they are."""
        scores: list[tuple[float, float]] = []
        for x, y in self._held_out_batches():
            inputs, wanted = self._given(x, y)
            logits = self.schedule.eval(*inputs, target=wanted)
            if self.is_last:
                scores.append((float(self.task.loss_of(logits, y)), self.task.share_right(logits, y)))
        return (fmean(loss for loss, _ in scores), fmean(right for _, right in scores)) if self.is_last else None

    def _held_out_batches(self) -> Iterable[tuple[Tensor, Tensor]]:
        return self.task.held_out()

    @torch.no_grad()
    def complete(self, tokens: Tensor, start: int) -> Tensor:
        """Greedy completions: ``tokens [batch, context]`` with what the network makes of them from ``start`` on."""
        tokens = tokens.clone()
        last = self.num_stages - 1
        for at in range(start, tokens.shape[1]):
            inputs, wanted = self._given(tokens, tokens)
            logits = self.schedule.eval(*inputs, target=wanted)
            picked = logits[:, at - 1].argmax(-1) if self.is_last else torch.zeros(len(tokens), dtype=torch.int64)
            dist.broadcast(picked, group=self.group, group_src=last)
            tokens[:, at] = picked
        return tokens

    @property
    def sent_bytes(self) -> float:
        """By this rank until now."""
        return self.stage.stats.sent_bytes

    def stats(self) -> dict[str, Any]:
        """What this rank counted."""
        return self.stage.stats.to_dict()

    def state_dict(self) -> dict[str, Any]:
        """All that this rank needs to go on bit by bit."""
        parts = {"part": self.part, "optimizer": self.optimizer, "stage": self.stage}
        return {name: part.state_dict() for name, part in parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.part.load_state_dict(state["part"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.stage.load_state_dict(state["stage"])

    def kept(self) -> dict[str, str]:
        """Hashes of what other ranks hold, too, by what it is: of the messages on this stage's side of each boundary,
        of records in memory, of checksums on disk."""
        digests: dict[str, str] = {}
        state = self.stage.state_dict()
        sides = {key.rsplit("/", 1)[0] for key in state if "/" in key}
        for side in sides:
            records = state.get(f"{side}/records", state.get(f"{side}/checksums"))
            assert records is not None, "a store keeps one or the other"
            by_sample = state[f"{side}/entries"][:, 0].argsort()
            digests[side.rsplit("-", 1)[0]] = digest([state[f"{side}/entries"][by_sample], records[by_sample]])
        return digests

    def close(self) -> None:
        """Let go of files and of process groups."""
        self.stage.close_stores()
        self._disband()

    def _disband(self) -> None:
        dist.destroy_process_group(self.group)

    def _given(self, x: Tensor, y: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """What the schedule takes on this rank."""
        return ((x,) if self.stage.is_first else (), y if self.is_last else None)


def digest(tensors: Iterable[Tensor]) -> str:
    """A hash of the bytes of tensors, one after the other."""
    state = hashlib.sha256()
    for tensor in tensors:
        state.update(tensor.detach().contiguous().numpy().tobytes())
    return state.hexdigest()
