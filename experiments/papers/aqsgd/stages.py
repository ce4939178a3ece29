"""A GPT cut into the stages of a pipeline, and one rank's stage with all that trains it, also in replicas."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import count, islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import thinwire
from experiments.framework.rank import Attached
from experiments.papers.aqsgd.tasks import FineTuning, Stacked
from thinwire_tools.compare.gpt import GPT, Block, rotary_angles
from thinwire_tools.compare.train import gradient_bytes, ring_factor
from thinwire_tools.compare.variants import POWERSGD_RANK, send_bf16

if TYPE_CHECKING:
    from experiments.papers.aqsgd.methods import Method

_SCHEDULES: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_PROMPTS, _PROMPT_SHARE = 8, 0.5
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


class Pipe(Attached):
    """This rank's stage of one training: network, schedule, optimizer, messages. ``weights`` is the file of those that
    were first trained, ``folder`` has stores on disk; ``completions``: what the network makes of prompts is kept.

    It has process groups of its own, in which steps are counted from 0: what a training draws does not depend on those
    before it.
    """

    stages: ClassVar[tuple[str, ...]] = ("encode_s", "decode_s", "store_s", "agree_s")

    def __init__(
        self,
        task: FineTuning,
        method: Method,
        seed: int,
        weights: Path | None = None,
        folder: Path | None = None,
        *,
        completions: bool = False,
    ) -> None:
        super().__init__()
        self.task, self.method, self._completions, self._step_bytes = task, method, completions, 0.0
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

    @property
    def probes(self) -> tuple[int]:
        return (self.task.steps,)

    def batches(self, seed: int) -> Iterator[Tensor]:
        return (ids for epoch in count() for ids in self.order(seed, epoch))

    def step(self, ids: Tensor) -> float | None:
        """Train on some samples; the loss, where the last stage is."""
        before = self.sent_bytes
        x, y = self.task.tuned_on(ids)
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
        self._step_bytes = self.sent_bytes - before
        return float(torch.stack(losses).detach().sum()) / self._scale if self.is_last else None

    @torch.no_grad()
    def score(self) -> tuple[float, float] | None:
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

    def counters(self) -> dict[str, Any]:
        return self.stage.stats.to_dict()

    def settled(self) -> dict[str, Any]:
        return {"payload_bytes": float(self._step_bytes), "layers": []}

    def result(self) -> dict[str, Any]:
        """Return what this rank counted, and completions."""
        found: dict[str, Any] = {"stats": self.counters(), "digests": self.kept()}
        if self._completions:
            tokens, _ = next(self.task.held_out())
            at = round(_PROMPT_SHARE * self.task.model.context)
            completed = self.complete(tokens, at)
            found |= {"prompted": at, "text": tokens[:_PROMPTS].tolist(), "completions": completed[:_PROMPTS].tolist()}
        return found

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
        super().close()
        self.stage.close()
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


_ONE_BUCKET_MB = 1e6


class Grid(Pipe):
    """Rank i has stage ``i % num_stages`` of replica ``i // num_stages``."""

    task: Stacked
    method: Method

    _steps = 0

    def _join(self) -> dist.ProcessGroup:
        rank, world = dist.get_rank(), dist.get_world_size()
        num_stages = world // self.task.replicas
        self.replica = rank // num_stages
        rows = [list(range(first, first + num_stages)) for first in range(0, world, num_stages)]
        columns = [list(range(stage, world, num_stages)) for stage in range(num_stages)]
        # All ranks make all groups, in the same order.
        made = [(members, dist.new_group(members)) for members in (*rows, *columns)]
        pipeline, replicas = (group for members, group in made if rank in members)
        assert isinstance(pipeline, dist.ProcessGroup)
        assert isinstance(replicas, dist.ProcessGroup)
        self.replicas = replicas
        return pipeline

    def _attach(self, seed: int) -> tuple[nn.Module, dict[str, Any]]:
        task, method = self.task, self.method
        # PyTorch's PowerSGD aborts on gloo with several buckets.
        cap_mb = _ONE_BUCKET_MB if method.hook == "powersgd" else task.bucket_cap_mb
        self.ddp = DistributedDataParallel(
            self.part, process_group=self.replicas, bucket_cap_mb=cap_mb, broadcast_buffers=False
        )
        if method.hook:
            hook(self.ddp, method.hook, self.replicas)
        plain = task.optimizer(self.part)
        self.optimizer = plain
        if method.gradients:
            group = plain.param_groups[0]
            self.optimizer = thinwire.optim.QuantizedAdam(
                self.part.parameters(),
                betas=group["betas"],
                weight_decay=group["weight_decay"],
                warmup=task.exact_steps,
            )
            self.wire = thinwire.compress(
                self.ddp,
                method.gradients,
                optimizer=self.optimizer,
                seed=seed,
                skip_if_slower=False,
                network=thinwire.Network(transport="group"),
            )
        return self.ddp, self._shapes()

    def _shapes(self) -> dict[str, Any]:
        """Of what crosses: DDP cannot form its buckets after a pass that only asks for shapes."""
        model, size = self.task.model, self.task.micro_batch
        hidden = torch.zeros(size, model.context, model.width, requires_grad=True)
        tokens = torch.zeros(size, model.context, dtype=torch.int64)
        logits = torch.zeros(size, model.context, model.vocabulary, requires_grad=True)
        return {"input_args": hidden if self.index else tokens, "output_args": logits if self.is_last else hidden}

    @property
    def _num_samples(self) -> int:
        return self.task.samples // self.task.replicas

    def order(self, seed: int, epoch: int) -> tuple[Tensor, ...]:
        return self.task.share(seed, epoch, self.replica)

    def step(self, ids: Tensor) -> float | None:
        self._steps += 1
        return self._mean(super().step(ids))

    def score(self) -> tuple[float, float] | None:
        score = super().score()
        if score is None:
            return None
        loss, right = map(self._mean, score)
        assert loss is not None
        assert right is not None
        return loss, right

    def _held_out_batches(self) -> Iterable[tuple[Tensor, Tensor]]:
        return islice(self.task.held_out(), self.replica, None, self.task.replicas)

    def _mean(self, loss: float | None) -> float | None:
        """Over all replicas, each of which has as many samples."""
        if loss is None:
            return None
        total = torch.tensor(loss, dtype=torch.float64)
        dist.all_reduce(total, group=self.replicas)
        return float(total) / self.task.replicas

    @property
    def gradient_sent_bytes(self) -> float:
        if self.wire is not None:
            return self.wire.stats.payload_sent_bytes
        return self.gradient_dense_bytes

    @property
    def gradient_dense_bytes(self) -> float:
        """That a ring all-reduce sends of fp32 gradients."""
        return self._steps * gradient_bytes(self.part) * ring_factor(self.task.replicas)

    @property
    def sent_bytes(self) -> float:
        return self.stage.stats.sent_bytes + self.gradient_sent_bytes

    def counters(self) -> dict[str, Any]:
        stage = self.stage.stats
        return {
            **super().counters(),
            "sent_bytes": self.sent_bytes,
            "dense_bytes": stage.dense_bytes + self.gradient_dense_bytes,
        }

    def kept(self) -> dict[str, str]:
        own = {f"replica {self.replica}, {name}": value for name, value in super().kept().items()}
        return {**own, f"parameters of stage {self.index}": digest(self.part.parameters())}

    def _disband(self) -> None:
        """Groups stay: PyTorch names a part of the world's groups, which `thinwire.compress` makes, by how many groups
        there are, and a name that comes again finds the addresses of the group that had it."""


# --- PyTorch's own methods of compressing gradients

_POWERSGD_START = 2
"""The least that PyTorch takes with error feedback."""


def hook(ddp: DistributedDataParallel, name: Literal["bf16", "powersgd"], group: dist.ProcessGroup) -> None:
    """Register one on ``ddp``, whose process group is the whole world.

    Raises:
        ValueError: it is not: these hooks divide by the size of the world.
    """
    if dist.get_world_size(group) != dist.get_world_size():
        raise ValueError("PyTorch's hooks are compared among all ranks, without a pipeline")
    if name == "bf16":
        send_bf16(ddp)
        return
    state = powerSGD_hook.PowerSGDState(
        group, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=_POWERSGD_START
    )
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
