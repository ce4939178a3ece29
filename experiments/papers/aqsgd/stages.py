"""A GPT cut into the stages of a pipeline, and one rank's stage with all that trains it, also in replicas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import thinwire
from experiments.framework.rank import Attached
from experiments.papers.aqsgd.tasks import FineTuning, Stacked
from thinwire_tools.compare.gpt import GPT, Block, rotary_angles
from thinwire_tools.compare.train import digest, gradient_bytes, ring_factor
from thinwire_tools.compare.variants import Variant

if TYPE_CHECKING:
    from experiments.papers.aqsgd.methods import Method

_SCHEDULES: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_PROMPTS, _PROMPT_SHARE = 8, 0.5
_ONE_BUCKET_MB = 1e6
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
    """This rank's stage of one training: network, schedule, optimizer, messages. Of a task in replicas rank i has stage
    ``i % num_stages`` of replica ``i // num_stages``. ``weights`` is the file of those that were first trained,
    ``folder`` has stores on disk; ``completions``: what the network makes of prompts is kept.

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
        self.task, self.method, self._completions = task, method, completions
        self._steps, self._step_bytes = 0, 0.0
        self.group, self.replicas = self._join()
        self.index, self.num_stages = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.part = Part(build(task, weights, seed), self.index, self.num_stages, half=task.half)
        module, more = self._attach(seed)
        self.stage = thinwire.compress_stage(
            PipelineStage(module, self.index, self.num_stages, torch.device("cpu"), group=self.group, **more),
            forward=method.forward,
            backward=method.backward,
            store=method.place(folder, task.samples // task.replicas),
            precision=method.precision,
            seed=seed,
            warmup_epochs=method.warmup_epochs,
        )
        self._scale = _FP16_SCALE if task.half == "fp16" else 1.0
        # A step's gradient is whole before it leaves for other replicas, not only when the schedule scales it.
        self.schedule = _SCHEDULES[method.schedule](self.stage, task.num_micro, loss_fn=self._loss, scale_grads=False)

    def _join(self) -> Sequence[Any]:
        """Return the pipeline's group, and that of the stage's replicas, if any; called on all ranks."""
        num_stages = self.num_ranks // self.task.replicas
        self.replica = self.rank // num_stages
        rows = [list(range(first, first + num_stages)) for first in range(0, self.num_ranks, num_stages)]
        columns = [list(range(stage, self.num_ranks, num_stages)) for stage in range(num_stages)]
        # All ranks make all groups, in the same order.
        made = [(members, dist.new_group(members)) for members in (*rows, *(columns if self.task.replicas > 1 else ()))]
        pipeline, *replicas = (group for members, group in made if self.rank in members)
        return pipeline, *(replicas or [None])

    def _attach(self, seed: int) -> tuple[nn.Module, dict[str, Any]]:
        """What the stage runs, and further options of the stage; the optimizer is made."""
        task, method, self.optimizer = self.task, self.method, self.task.optimizer(self.part)
        if not isinstance(task, Stacked):
            return self.part, {}
        # PyTorch's PowerSGD aborts on gloo with several buckets.
        cap = _ONE_BUCKET_MB if method.hook == "torch-powersgd" else task.bucket_cap_mb
        ddp = DistributedDataParallel(
            self.part, process_group=self.replicas, bucket_cap_mb=cap, broadcast_buffers=False
        )
        if method.hook:
            # It divides by the number of all ranks.
            assert task.replicas == self.num_ranks, "PyTorch's hooks are compared without a pipeline"
            Variant(method.hook).attach(ddp, self.optimizer, seed)
        if method.gradients:
            adam = self.optimizer.param_groups[0]
            options = {"betas": adam["betas"], "weight_decay": adam["weight_decay"], "warmup": task.exact_steps}
            self.optimizer = thinwire.optim.QuantizedAdam(self.part.parameters(), adam["lr"], **options)
            more: Any = {"seed": seed, "skip_if_slower": False, "network": thinwire.Network(transport="group")}
            self.wire = thinwire.compress(ddp, method.gradients, optimizer=self.optimizer, **more)
        return ddp, self._shapes()

    def _shapes(self) -> dict[str, Any]:
        """Of what crosses: DDP cannot form its buckets after a pass that only asks for shapes."""
        model, size = self.task.model, self.task.micro_batch
        hidden = torch.zeros(size, model.context, model.width, requires_grad=True)
        tokens = torch.zeros(size, model.context, dtype=torch.int64)
        logits = torch.zeros(size, model.context, model.vocabulary, requires_grad=True)
        return {"input_args": hidden if self.index else tokens, "output_args": logits if self.is_last else hidden}

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """A micro-batch's share of the loss."""
        return self._scale / self.task.num_micro * self.task.loss_of(logits, targets)

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1

    @property
    def probes(self) -> tuple[int]:
        return (self.task.steps,)

    def batches(self, seed: int) -> Iterator[Tensor]:
        return (ids for epoch in count() for ids in self.task.share(seed, epoch, self.replica))

    def step(self, batch: Tensor) -> float | None:
        """Train on the samples with these numbers; the loss, where the last stage is."""
        before = self.sent_bytes
        x, y = self.task.tuned_on(batch)
        if self.stage.is_first:
            self.stage.set_sample_ids(batch)
        self.optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        inputs, wanted = self._given(x, y)
        self.schedule.step(*inputs, target=wanted, losses=losses, return_outputs=False)
        if self._scale != 1:
            for parameter in self.part.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(self._scale)
        self.optimizer.step()
        self._steps += 1
        self._step_bytes = self.sent_bytes - before
        return self._mean(float(torch.stack(losses).detach().sum()) / self._scale) if self.is_last else None

    def _mean(self, value: float) -> float:
        """Over all replicas, each of which has as many samples."""
        if self.replicas is None:
            return value
        total = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total, group=self.replicas)
        return float(total) / self.task.replicas

    @torch.no_grad()
    def score(self) -> tuple[float, float] | None:
        """Loss on what is held out, and the share of what is classified right, where the last stage is; activations
        are sent as they are."""
        scores: list[tuple[float, float]] = []
        for x, y in islice(self.task.held_out(), self.replica, None, self.task.replicas):
            inputs, wanted = self._given(x, y)
            logits = self.schedule.eval(*inputs, target=wanted)
            if self.is_last:
                scores.append((float(self.task.loss_of(logits, y)), self.task.share_right(logits, y)))
        if not self.is_last:
            return None
        return self._mean(fmean(loss for loss, _ in scores)), self._mean(fmean(right for _, right in scores))

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
        return self.stage.stats.sent_bytes + (super().sent_bytes if self.wire else self._dense_bytes)

    @property
    def _dense_bytes(self) -> float:
        """That a ring all-reduce sends of fp32 gradients."""
        return self._steps * gradient_bytes(self.part) * ring_factor(self.task.replicas)

    def counters(self) -> dict[str, Any]:
        return self.stage.stats.to_dict()

    def settled(self) -> dict[str, Any]:
        return {"payload_bytes": float(self._step_bytes), "layers": []}

    def result(self) -> dict[str, Any]:
        """Return what this rank counted, and completions."""
        dense_bytes = self.stage.stats.dense_bytes + self._dense_bytes
        stats = {**self.counters(), "sent_bytes": self.sent_bytes, "dense_bytes": dense_bytes}
        found: dict[str, Any] = {"stats": stats, "digests": self.kept()}
        if self._completions:
            tokens, _ = next(self.task.held_out())
            at = round(_PROMPT_SHARE * self.task.model.context)
            completed = self.complete(tokens, at)
            found |= {"prompted": at, "text": tokens[:_PROMPTS].tolist(), "completions": completed[:_PROMPTS].tolist()}
        return found

    def kept(self) -> dict[str, str]:
        """Hashes of what other ranks hold, too, by what it is: of the messages on this stage's side of each boundary,
        of records in memory, of checksums on disk."""
        digests = {f"parameters of stage {self.index}": digest(self.part.parameters())}
        state = self.stage.state_dict()
        sides = {key.rsplit("/", 1)[0] for key in state if "/" in key}
        for side in sides:
            records = state.get(f"{side}/records", state.get(f"{side}/checksums"))
            assert records is not None, "a store keeps one or the other"
            by_sample = state[f"{side}/entries"][:, 0].argsort()
            digests[f"replica {self.replica}, {side.rsplit('-', 1)[0]}"] = digest(
                [state[f"{side}/entries"][by_sample], records[by_sample]]
            )
        return digests

    def close(self) -> None:
        """Let go of files and of process groups."""
        super().close()
        self.stage.close()
        # Of replicas groups stay: PyTorch names a part of the world's groups, which `thinwire.compress` makes, by how
        # many there are, and a name that comes again finds the addresses of the group that had it.
        if self.replicas is None:
            dist.destroy_process_group(self.group)

    def _given(self, x: Tensor, y: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """What the schedule takes on this rank."""
        return ((x,) if self.stage.is_first else (), y if self.is_last else None)
