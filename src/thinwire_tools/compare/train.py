"""Paired training: every variant starts from the same weights and sees the same batches; only the exchange of gradients
differs.

A variant is a small function that attaches something to a ``DistributedDataParallel`` model; `VARIANTS` lists them.
"""

# No `from __future__ import annotations` here: DDP checks the annotations of a communication hook as objects.

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.local import DiLoCo, Nesterov, send_nothing
from thinwire.optim import CompressedAdamW, Muon, QuantizedAdam
from thinwire.runtime import Follower, for_reducer
from thinwire_tools.compare import tasks
from thinwire_tools.compare.gpt import GPTConfig
from thinwire_tools.compare.tasks import BETAS, WEIGHT_DECAY, GPTTask, probe_steps

# One scale for each layer, a biased rounding and no error feedback: damage that a comparison must be able to see.
CONTROL_RULES = "minmax(bits=1, bucket=1048576, rounding=nearest)"
POWERSGD_RANK = 4
LOCAL_EVERY = 8
_POWERSGD_START = 2
_ONE_BUCKET_MB = 1e6
_WARM_UP_SHARE = 0.1
_MUON_RATE_FACTOR = 4.0
_IN_OPTIMIZER_RATE_FACTOR = 2.0
_EXACT_SHARE = 0.15
"""The share of steps that 1-bit Adam takes in fp32, before its variance is frozen (Tang et al. 2021, section 7)."""


def learning_rate(highest: float, step: int, steps: int) -> float:
    """Learning rate of ``step`` (from 0): a linear warm-up over the first tenth, then a cosine that ends at zero."""
    warm_up = math.ceil(steps * _WARM_UP_SHARE)
    if step < warm_up:
        return highest * (step + 1) / warm_up
    return highest * 0.5 * (1 + math.cos(math.pi * (step - warm_up + 1) / (steps - warm_up + 1)))


@dataclass(frozen=True)
class Task(GPTTask):
    """What the demo trains from one seed, the same for every variant.

    After every ``probe_every`` steps the loss is evaluated on ``probe_windows`` windows of held-out text, at the end on
    ``held_out_windows``.
    """

    model: GPTConfig = field(default_factory=lambda: GPTConfig(width=128))
    steps: int = 96
    batch: int = 4
    learning_rate: float = 3e-3
    held_out_windows: int = 512
    probe_windows: int = 64
    probe_every: int = 8
    seed: int = 0

    @property
    def probe_steps(self) -> list[int]:
        """Steps after which the held-out loss is evaluated; the last step is one of them."""
        return probe_steps(self)

    def rate(self, step: int) -> float:
        """Learning rate of ``step``."""
        return learning_rate(self.learning_rate, step, self.steps)


class Attached:
    """What a variant attached to a DDP model: it counts the bytes that are sent, and can be detached."""

    def __init__(self, bytes_per_step: float = 0.0) -> None:
        self._bytes_per_step = bytes_per_step

    def payload_bytes(self, steps: int) -> float:
        """Bytes this rank has sent in ``steps`` steps, without TCP's headers."""
        return self._bytes_per_step * steps

    def formula_bytes(self) -> float | None:
        """Bytes that a step must send by the format's formula, where there is one."""
        return None

    def finish(self) -> None:
        """End the training: all ranks get the same parameters where the variant has not seen to it in each step."""

    def detach(self) -> None:
        """Release what the variant holds."""


class _Thinwire(Attached):
    def __init__(self, wire: thinwire.Wire) -> None:
        super().__init__()
        self._wire = wire

    def payload_bytes(self, steps: int) -> float:
        return self._wire.stats.payload_sent_bytes

    def formula_bytes(self) -> float | None:
        return self._wire.wire_bytes_per_step()

    def detach(self) -> None:
        self._wire.detach()


class _Local(Attached):
    def __init__(self, local: DiLoCo) -> None:
        super().__init__()
        self._local = local

    def payload_bytes(self, steps: int) -> float:
        return self._local.wire.stats.payload_sent_bytes

    def finish(self) -> None:
        self._local.finish()

    def detach(self) -> None:
        self._local.close()


class _PowerSGD(Attached):
    def __init__(self, state: powerSGD_hook.PowerSGDState, ring: float, dense_bytes: float) -> None:
        super().__init__()
        self._state, self._ring, self._dense_bytes = state, ring, dense_bytes

    def payload_bytes(self, steps: int) -> float:
        # PyTorch counts the elements of what it reduces (P, Q, and tensors left as they are) once it has started.
        factors = self._state.compression_stats()[2] * 4 * self._ring
        return min(steps, _POWERSGD_START) * self._dense_bytes + factors


def ring_factor(num_ranks: int) -> float:
    """What each rank sends in a ring all-reduce, per byte that is reduced."""
    return 2 * (num_ranks - 1) / num_ranks


def gradient_bytes(model: nn.Module) -> int:
    """Bytes of one fp32 gradient of ``model``."""
    return 4 * sum(parameter.numel() for parameter in model.parameters())


def _sent(ddp: DistributedDataParallel) -> float:
    return gradient_bytes(ddp) * ring_factor(dist.get_world_size())


def _fp32(ddp: DistributedDataParallel, replica: "Replica") -> Attached:
    return Attached(_sent(ddp))


def send_bf16(ddp: DistributedDataParallel) -> None:
    """Have ``ddp`` send its gradients in bf16, on any backend."""
    ddp.register_comm_hook(Follower("bf16"), _bf16_hook)


def _bf16(ddp: DistributedDataParallel, replica: "Replica") -> Attached:
    send_bf16(ddp)
    return Attached(_sent(ddp) / 2)


def _alone(ddp: DistributedDataParallel, replica: "Replica") -> Attached:
    send_nothing(ddp)
    return Attached()


def _local(ddp: DistributedDataParallel, replica: "Replica", **options: Any) -> Attached:
    send_nothing(ddp)
    # Plain averages: momentum pays over more exchanges than the demo has.
    outer = Nesterov(lr=1.0, momentum=0.0)
    local = DiLoCo(ddp, replica.optimizer, every=LOCAL_EVERY, outer=outer, seed=replica.task.seed, **options)
    replica.optimizer.register_step_post_hook(lambda *_: local.step())
    return _Local(local)


def _powersgd(ddp: DistributedDataParallel, replica: "Replica") -> Attached:
    state = powerSGD_hook.PowerSGDState(
        None,
        matrix_approximation_rank=POWERSGD_RANK,
        start_powerSGD_iter=_POWERSGD_START,
        random_seed=replica.task.seed,
    )
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return _PowerSGD(state, ring_factor(dist.get_world_size()), _sent(ddp))


def _compressed(ddp: DistributedDataParallel, replica: "Replica") -> Attached:
    return _Thinwire(thinwire.compress(ddp, seed=replica.task.seed, skip_if_slower=False))


def _in_optimizer(ddp: DistributedDataParallel, replica: "Replica", compressor: str) -> Attached:
    options = {"optimizer": replica.optimizer, "seed": replica.task.seed, "skip_if_slower": False}
    return _Thinwire(thinwire.compress(ddp, compressor, **options))


def _adamw(task: Task, model: nn.Module) -> torch.optim.Optimizer:
    return task.optimizer(model)


def _muon(task: Task, model: nn.Module) -> torch.optim.Optimizer:
    return Muon(model, task.learning_rate, weight_decay=WEIGHT_DECAY, betas=BETAS)


def _compressed_adamw(task: Task, model: nn.Module) -> torch.optim.Optimizer:
    return CompressedAdamW(model.parameters(), task.learning_rate, betas=BETAS, weight_decay=WEIGHT_DECAY)


def _one_bit_adam(task: Task, model: nn.Module) -> torch.optim.Optimizer:
    warm_up = math.ceil(_EXACT_SHARE * task.steps)
    return QuantizedAdam(model.parameters(), task.learning_rate, betas=BETAS, weight_decay=WEIGHT_DECAY, warmup=warm_up)


def _low_rank(ddp: DistributedDataParallel, replica: "Replica", *, dtype: str = "fp32") -> Attached:
    spec = f"powersgd(rank={POWERSGD_RANK}, dtype={dtype})"
    return _Thinwire(thinwire.compress(ddp, spec, seed=replica.task.seed, skip_if_slower=False, start=_POWERSGD_START))


def _control(ddp: DistributedDataParallel, replica: "Replica") -> Attached:
    return _Thinwire(thinwire.compress(ddp, CONTROL_RULES, seed=replica.task.seed, skip_if_slower=False))


def _bf16_hook(follower, bucket):
    """PyTorch's ``bf16_compress_hook``, which itself refuses every backend but NCCL."""
    buffer = bucket.buffer()
    message = buffer.to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(message, async_op=True)
    assert work is not None
    return for_reducer(follower.follow(work, lambda: buffer.copy_(message)))


@dataclass(frozen=True)
class Variant:
    """A variant of the training: how gradients are exchanged."""

    title: str
    attach: Callable[[DistributedDataParallel, "Replica"], Attached]
    one_bucket: bool = False
    """Whether DDP puts all gradients into one bucket."""
    synchronised: bool = True
    """Whether ranks end with the same parameters."""
    every: int = 1
    """Steps from one exchange to the next; a step's time is the mean over so many."""
    optimizer: Callable[[Task, nn.Module], torch.optim.Optimizer] = _adamw
    rate_factor: float = 1.0
    """Factor on the task's learning rate, which is AdamW's best; Muon's best on this task is four times as high."""
    on_link: bool = True
    """Whether its messages cross the slow link; those of a variant that is there for its loss alone do not."""


VARIANTS = {
    "fp32": Variant("DDP fp32", _fp32),
    "bf16": Variant("DDP bf16", _bf16),
    "powersgd": Variant("torch PowerSGD", _powersgd, one_bucket=True),
    "thinwire": Variant("thinwire 4-bit", _compressed),
    "low-rank": Variant(f"thinwire rank {POWERSGD_RANK}", _low_rank, one_bucket=True),
    "low-rank-bf16": Variant(f"thinwire rank {POWERSGD_RANK}, bf16", partial(_low_rank, dtype="bf16"), one_bucket=True),
    "in-optimizer": Variant(
        "2 bits in AdamW",
        partial(_in_optimizer, compressor="gaussian(bits=2, bucket=64)"),
        optimizer=_compressed_adamw,
        rate_factor=_IN_OPTIMIZER_RATE_FACTOR,
    ),
    "one-bit-adam": Variant(
        "1-bit Adam", partial(_in_optimizer, compressor="onebit(bucket=layer)"), optimizer=_one_bit_adam
    ),
    "local": Variant(f"local, every {LOCAL_EVERY}", _local, every=LOCAL_EVERY),
    "overlapped": Variant("local, 1 step late", partial(_local, overlap=1), every=LOCAL_EVERY),
    "streaming": Variant("local, streaming", partial(_local, fragments=2, overlap=3, mix=0.5), every=LOCAL_EVERY),
    "muloco": Variant("local with Muon", _local, every=LOCAL_EVERY, optimizer=_muon, rate_factor=_MUON_RATE_FACTOR),
    "muloco-streaming": Variant(
        "local with Muon, streaming",
        partial(_local, fragments=2, overlap=2),
        every=LOCAL_EVERY,
        optimizer=_muon,
        rate_factor=_MUON_RATE_FACTOR,
    ),
    "muon": Variant("DDP fp32, Muon", _fp32, optimizer=_muon, rate_factor=_MUON_RATE_FACTOR, on_link=False),
    "alone": Variant("training alone", _alone, synchronised=False),
    "control": Variant("1-bit control", _control),
}


class Replica:
    """One rank's model and optimizer; `train` sets the learning rate of each step."""

    def __init__(self, task: Task, make_optimizer: Callable[[Task, nn.Module], torch.optim.Optimizer] = _adamw) -> None:
        self.task = task
        self.model = task.build(task.seed)
        self.parameters = list(self.model.parameters())
        self.optimizer = make_optimizer(task, self.model)


def distributed(replica: Replica, variant: Variant) -> DistributedDataParallel:
    """``replica``'s model in DDP, with the buckets that ``variant`` asks for."""
    cap = _ONE_BUCKET_MB if variant.one_bucket else replica.task.bucket_cap_mb
    return DistributedDataParallel(replica.model, bucket_cap_mb=cap, gradient_as_bucket_view=True)


def train(
    task: tasks.Task,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Any],
    rate: Callable[[int], float],
) -> Iterator[tuple[float, float]]:
    """Train one step per batch at its learning rate; yields each step's loss on this rank, and its seconds."""
    for step, batch in enumerate(batches):
        started = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.zero_grad(set_to_none=True)
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        seconds = time.perf_counter() - started
        yield loss.item(), seconds


def digest(model: nn.Module) -> str:
    """Hash of all parameters' bytes: equal on two ranks exactly where their replicas are."""
    state = hashlib.sha256()
    for parameter in model.parameters():
        state.update(parameter.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()
