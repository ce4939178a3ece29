"""Variants of a comparison: messages for gradients, optimizers, and intervals of communication."""

# No `from __future__ import annotations` here: DDP checks the annotations of a communication hook as objects.

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.compressors import parse
from thinwire.local import DiLoCo, Nesterov, send_nothing
from thinwire.optim import CompressedAdamW, Muon, QuantizedAdam
from thinwire.policies import parse_policy
from thinwire.runtime import Follower, for_reducer
from thinwire_tools.compare.tasks import BETAS, WEIGHT_DECAY, Task
from thinwire_tools.compare.train import gradient_bytes, ring_factor

BASELINE = "fp32"
"""Name of the variant that others are compared to: DDP with uncompressed gradients."""
ALONE = "alone"
"""Variant that sends nothing: each rank trains on its own batches. A variant above it is worse than no network."""
# One scale for each layer, a biased rounding and no error feedback: damage that a comparison must be able to see.
CONTROL_RULES = "minmax(bits=1, bucket=1048576, rounding=nearest)"
POWERSGD_RANK = 4
LOCAL_EVERY = 8
_ONE_BUCKET_MB = 1e6
_WITH = " with "
_POWERSGD_START = 2
_MUON_RATE_FACTOR = 4.0
_EXACT_SHARE = 0.15
"""Share of steps that 1-bit Adam takes in fp32, before its variance is frozen (Tang et al. 2021, section 7)."""

_ADAM = {"betas": BETAS, "weight_decay": WEIGHT_DECAY}
OPTIMIZERS: Mapping[str, Callable[[Task, nn.Module], torch.optim.Optimizer]] = {
    "task": lambda task, model: task.optimizer(model),
    "muon": lambda task, model: Muon(model, task.learning_rate, **_ADAM),
    "compressed-adamw": lambda task, model: CompressedAdamW(model.parameters(), task.learning_rate, **_ADAM),
    "one-bit-adam": lambda task, model: QuantizedAdam(
        model.parameters(), task.learning_rate, **_ADAM, warmup=math.ceil(_EXACT_SHARE * task.steps)
    ),
}


@dataclass(frozen=True)
class Attached:
    """Handles of a variant that is attached to a model."""

    sent: Callable[[int], float]
    """Function that returns the bytes that this rank has sent after so many steps, without TCP's headers."""
    formula: Callable[[], float | None]
    """Function that returns the bytes that a step must send by the format's formula, where there is one."""
    wire: thinwire.Wire | None = None
    finish: Callable[[], None] = lambda: None
    """Function that ends the training: all ranks get the same parameters where steps leave them different."""
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Variant:
    """One way of training, in plain values, which are sent to the ranks as JSON.

    ``spec`` is the compressor of all layers, which ``policy`` adapts, both as canonical text. `BASELINE`, `ALONE`,
    ``"bf16"`` and ``"torch-powersgd"`` stand for DDP's own all-reduce, for no communication, and for PyTorch's hooks.
    """

    spec: str
    policy: str | None = None
    title: str = ""
    local: Mapping[str, Any] | None = None
    """Options of `DiLoCo`: ranks exchange what they have learned every `LOCAL_EVERY` steps, in place of gradients."""
    optimizer: str = "task"
    rate_factor: float = 1.0
    """Factor on the task's learning rate, which is the best of its own optimizer: that of `CompressedAdamW` is twice as
    high, and Muon's four times."""
    start: int = 0
    one_bucket: bool = False
    """Whether DDP puts all gradients into one bucket."""
    on_link: bool = True
    """Whether messages cross the slow link; those of a variant that is there for its loss alone do not."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a variant: ``"topk(density=0.01)"``, ``"topk(density=0.01) with lgreco(every=25)"`` or ``"alone"``.

        Raises:
            ValueError: the spec or the policy is wrong.
        """
        if text.strip() == ALONE:
            return cls(ALONE)
        # Neither side can contain the word: it is a keyword of Python.
        spec, separator, policy = text.partition(_WITH)
        if separator and not policy.strip():
            raise ValueError(f"{text!r} names no policy: write SPEC with lgreco(every=25)")
        return cls(str(parse(spec)), str(parse_policy(policy)) if separator else None)

    def __str__(self) -> str:
        return self.spec if self.policy is None else f"{self.spec}{_WITH}{self.policy}"

    @property
    def synchronized(self) -> bool:
        """Whether ranks end with the same parameters."""
        return self.spec != ALONE

    @property
    def every(self) -> int:
        """Number of steps from one exchange to the next; a step's time is the mean over so many."""
        return 1 if self.local is None else LOCAL_EVERY

    def prepare(self, task: Task, model: nn.Module) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
        """Return ``model`` of ``task`` in DDP, and its optimizer."""
        if self.one_bucket:
            task = replace(task, bucket_cap_mb=_ONE_BUCKET_MB)  # pyright: ignore[reportArgumentType, reportCallIssue]
        ddp = task.distribute(model)
        return ddp, OPTIMIZERS[self.optimizer](task, ddp.module)

    def attach(
        self, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, seed: int, measure: int = 0
    ) -> Attached:
        """Attach the variant to ``ddp``; every ``measure`` steps the exact mean is taken, too, but not counted."""
        dense = gradient_bytes(ddp) * ring_factor(dist.get_world_size())
        if self.local is not None:
            return _exchange_locally(ddp, optimizer, seed, self.local)
        match self.spec:
            case "fp32":
                return _constant(dense)
            case "bf16":
                send_bf16(ddp)
                return _constant(dense / 2)
            case "alone":
                send_nothing(ddp)
                return _constant(0.0)
            case "torch-powersgd":
                return _torch_powersgd(ddp, seed, dense)
        options: dict[str, Any] = {"seed": seed, "start": self.start, "skip_if_slower": False}
        if self.policy is not None or self.optimizer != "task":
            # Accordion reads its learning rate, and some optimizers compress within their step.
            options["optimizer"] = optimizer
        if self.policy is not None:
            options["adapt"] = parse_policy(self.policy)
        wire = thinwire.compress(ddp, self.spec, checks=thinwire.Checks(measure_every=measure), **options)
        exact = dense if measure and not wire.plan.all_raw else 0.0
        return Attached(
            lambda steps: wire.stats.payload_sent_bytes - exact * math.ceil(steps / max(1, measure)),
            lambda: dense if wire.plan.all_raw else wire.sent_bytes(),
            wire,
            close=wire.detach,
        )


def _constant(bytes_per_step: float) -> Attached:
    return Attached(lambda steps: bytes_per_step * steps, lambda: bytes_per_step)


def _exchange_locally(
    ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, seed: int, options: Mapping[str, Any]
) -> Attached:
    send_nothing(ddp)
    # Plain averages: momentum needs more exchanges than a short training has.
    outer = Nesterov(lr=1.0, momentum=0.0)
    local = DiLoCo(ddp, optimizer, every=LOCAL_EVERY, outer=outer, seed=seed, **options)
    optimizer.register_step_post_hook(lambda *_: local.step())
    return Attached(lambda _: local.wire.stats.payload_sent_bytes, lambda: None, finish=local.finish, close=local.close)


def _torch_powersgd(ddp: DistributedDataParallel, seed: int, dense: float) -> Attached:
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=_POWERSGD_START, random_seed=seed
    )
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    factor = 4 * ring_factor(dist.get_world_size())
    # PyTorch counts the elements that it reduces (P, Q, and tensors left as they are) once it has started.
    return Attached(
        lambda steps: min(steps, _POWERSGD_START) * dense + state.compression_stats()[2] * factor, lambda: None
    )


def send_bf16(ddp: DistributedDataParallel) -> None:
    """Make ``ddp`` send its gradients in bf16, on any backend."""
    ddp.register_comm_hook(Follower("bf16"), _bf16_hook)


def _bf16_hook(follower, bucket):
    """Run PyTorch's ``bf16_compress_hook``, which itself refuses every backend but NCCL."""
    buffer = bucket.buffer()
    message = buffer.to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(message, async_op=True)
    assert work is not None
    return for_reducer(follower.follow(work, lambda: buffer.copy_(message)))


def low_rank(title: str, dtype: str) -> Variant:
    """Return thinwire's PowerSGD with factors of ``dtype``, comparable to PyTorch's."""
    spec = f"powersgd(rank={POWERSGD_RANK}, dtype={dtype})"
    return Variant(spec, title=title, start=_POWERSGD_START, one_bucket=True)


def local_updates(title: str, optimizer: str = "task", **options: Any) -> Variant:
    """Return `DiLoCo` with ``options``; for the optimizer "muon" at its own learning rate."""
    factor = _MUON_RATE_FACTOR if optimizer == "muon" else 1.0
    return Variant("local", title=title, local=options, optimizer=optimizer, rate_factor=factor)


def in_optimizer(spec: str, title: str, *, on_link: bool = True) -> Variant:
    """Return `CompressedAdamW` at its own learning rate, twice that of AdamW."""
    return Variant(spec, title=title, optimizer="compressed-adamw", rate_factor=2.0, on_link=on_link)


VARIANTS = {
    BASELINE: Variant(BASELINE, title="DDP fp32"),
    "thinwire": Variant("minmax(bits=4, bucket=128)", title="thinwire 4-bit"),
    "bf16": Variant("bf16", title="DDP bf16"),
    "powersgd": Variant("torch-powersgd", title="torch PowerSGD", one_bucket=True),
    "low-rank": low_rank(f"thinwire rank {POWERSGD_RANK}", "fp32"),
    "in-optimizer": in_optimizer("gaussian(bits=2, bucket=64)", "2 bits in AdamW"),
    "in-optimizer-fp32": in_optimizer(BASELINE, "fp32 in AdamW", on_link=False),
    "local": local_updates(f"local, every {LOCAL_EVERY}"),
    "muloco": local_updates("local with Muon", "muon"),
    "muon": Variant(BASELINE, title="DDP fp32, Muon", optimizer="muon", rate_factor=_MUON_RATE_FACTOR, on_link=False),
    ALONE: Variant(ALONE, title="training alone"),
    "control": Variant(CONTROL_RULES, title="1-bit control"),
}
"""Ways of training in `thinwire demo`, in the order of their turns: the first two show the most."""

EVERY = (
    "minmax(bits=4, bucket=128)",
    "lattice(bits=8, bucket=1024)",
    "levels(bits=4, bucket=1024, learn_at=(15, 75), min_numel=10000)",
    "gaussian(bits=4)",
    "qsgd(bits=4)",
    "maxabs(bits=4)",
    "terngrad(clip=2.5)",
    "shared_terngrad",
    "natural",
    "rangefloat(bits=8)",
    "cast(bf16)",
    "intsgd(bits=8)",
    "intdiana(bits=2)",
    "heuristic_intsgd(bits=8)",
    "onebit",
    "sign",
    "topk(density=0.01)",
    "topk(density=0.01) | minmax(bits=8)",
    "globaltopk(density=0.01)",
    "chunktopk(k=64)",
    "threshold(lam=0.003)",
    "dgc(topk(density=0.01), momentum=0)",
    "randk(density=0.1)",
    "ef(randk(density=0.1))",
    "truncate(gamma=10)",
    "fft(theta=0.85)",
    "powersgd(rank=4)",
    "atomo(rank=4)",
)
"""Compressors at sensible settings; a plan puts error feedback around those that want it. All train by AdamW, with
whose momentum `DGC` must not have one of its own."""

WITHOUT = {
    "topk(density=0.01)": "topk(density=0.01, feedback=False)",
    "onebit": "onebit(feedback=False)",
    "sign": "sign(feedback=False)",
    "powersgd(rank=4)": "powersgd(rank=4, feedback=False)",
    "fft(theta=0.85)": "fft(theta=0.85, feedback=False)",
}
"""Biased compressors, and the same without error feedback."""

SOME = ("minmax(bits=4, bucket=128)", "onebit", "topk(density=0.01)", "powersgd(rank=4)")
"""Compressors of the small version."""
