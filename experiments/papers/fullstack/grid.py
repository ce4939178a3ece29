"""A pipeline in several replicas: this rank's stage, and the other replicas of it that it shares gradients with."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import thinwire
from experiments.papers.aqsgd.stages import Pipe, digest
from experiments.papers.fullstack.methods import Method
from experiments.papers.fullstack.tasks import Stacked
from thinwire_tools.compare.train import gradient_bytes, ring_factor
from thinwire_tools.compare.variants import POWERSGD_RANK, send_bf16

_ONE_BUCKET_MB = 1e6


class Grid(Pipe):
    """Rank i has stage ``i % num_stages`` of replica ``i // num_stages``."""

    task: Stacked
    method: Method

    def __init__(self, task: Stacked, method: Method, seed: int, weights: Path | None, folder: Path) -> None:
        self._steps = 0
        super().__init__(task, method, seed, weights, folder)

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
        self.optimizer, self.wire = plain, None
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

    def step(self, ids: Tensor, rate: float) -> float | None:
        self._steps += 1
        return self._mean(super().step(ids, rate))

    def held_out(self) -> tuple[float, float] | None:
        score = super().held_out()
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

    def stats(self) -> dict[str, Any]:
        stage = self.stage.stats
        return {
            **super().stats(),
            "sent_bytes": self.sent_bytes,
            "dense_bytes": stage.dense_bytes + self.gradient_dense_bytes,
        }

    def kept(self) -> dict[str, str]:
        own = {f"replica {self.replica}, {name}": value for name, value in super().kept().items()}
        return {**own, f"parameters of stage {self.index}": digest(self.part.parameters())}

    def state_dict(self) -> dict[str, Any]:
        more = {} if self.wire is None else {"wire": self.wire.state_dict()}
        return {**super().state_dict(), **more}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self.wire is not None:
            self.wire.load_state_dict(state["wire"])

    def close(self) -> None:
        if self.wire is not None:
            self.wire.detach()
        super().close()

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
