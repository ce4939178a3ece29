"""Methods of sending the gradients of DDP: compressors, process groups, PyTorch's own PowerSGD, or nothing at all."""

# No `from __future__ import annotations` here: DDP checks the annotations of a communication hook as objects.

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import thinwire
from experiments.framework.replicas import Replica
from experiments.policies.baselines import ByPriority
from thinwire.collectives.shared_memory import NODE_VARIABLE
from thinwire.local import send_nothing
from thinwire.policies import Policy, parse_policy

CGX = "minmax(bits=4, bucket=128)"
"""Default of the thesis (section 3.5.3): "4 bits and 128 bucket size always recovers full accuracy"."""
NORM = "qsgd(bits=4, bucket=128)"
"""Compressor QSGD as its paper scales it, by the bucket's L2 norm (section 3.3.3)."""
GRACE = "qsgd(bits=8, bucket=layer, norm=linf)"
"""Messages of GRACE's 4-bit quantization by the thesis (section 3.7.2): one scale for a whole tensor, no buckets, codes
sent as INT8, and an all-gather."""
ALMOST_NOTHING_GAMMA = 10_000.0
"""Parameter of `truncate`: "sending only a small number of elements per layer" (section 3.7.2)."""

_TORCH_POWERSGD_START = 2
_SETTLED_STEPS = 3


@dataclass(frozen=True)
class Method:
    """A method of sending gradients. ``spec``, ``algorithm``, ``transport`` and ``exclude`` are those of
    `thinwire.compress`."""

    name: str
    title: str
    color: str
    kind: Literal["ddp", "all-reduce", "all-gather", "thinwire", "blob", "nothing", "torch powersgd"] = "thinwire"
    """``all-reduce`` and ``all-gather`` are plain fp32 by a hook that takes its time."""
    spec: str = CGX
    algorithm: str = "sra"
    transport: Literal["auto", "group", "shared"] = "group"
    ranks_per_node: int = 0
    """Number of ranks that count as one node, though each has a link of its own; 0 leaves nodes as they are."""
    rank: int = 0
    """Rank of PyTorch's PowerSGD."""
    adapt: str = ""
    """Policy, as text, that chooses each layer's own compressor; its first plan begins before anything is timed."""
    by_priority: bool = False
    """Whether the policy is an L-GreCo that weighs the bytes of later buckets more."""
    exclude: tuple[str, ...] = ()

    @property
    def one_bucket(self) -> bool:
        """Whether all gradients must be in one DDP bucket: PyTorch's PowerSGD aborts on gloo with several."""
        return self.kind == "torch powersgd"

    def group(self) -> dist.ProcessGroup | None:
        """Return the process group for DDP, where that is not the default one: of kind ``blob`` it compresses."""
        if self.kind != "blob":
            return None
        options = thinwire.ProcessGroupOptions(self.spec, algorithm=self.algorithm, where=lambda _: True)
        made = dist.new_group(backend="thinwire", pg_options=options)
        assert isinstance(made, dist.ProcessGroup)
        return made

    @property
    def policy(self) -> Policy | None:
        policy = parse_policy(self.adapt) if self.adapt else None
        return ByPriority(**vars(policy)) if self.by_priority else policy

    @property
    def _follows_rate(self) -> bool:
        """Whether the compressor needs the learning rate."""
        return "diminishing" in self.spec or "scale=params" in self.spec

    @property
    def warm_up_steps(self) -> int:
        """Steps before anything is timed: DDP arranges its buckets, messages are opened, a first plan begins."""
        policy = self.policy
        if policy is None:
            return _SETTLED_STEPS
        first = policy.warmup if policy.warmup > policy.lag_steps else policy.warmup + policy.every
        return first + _SETTLED_STEPS

    def attached(self, task: Any, seed: int, **options: Any) -> Replica:
        """Build the model of ``task`` on this rank, and send its gradients by this method."""
        return Replica(task, self, seed, **options)

    def attach(
        self,
        ddp: DistributedDataParallel,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        seed: int = 0,
        measure: int = 0,
    ) -> thinwire.Wire | None:
        """Send ``ddp``'s gradients by this method; returns the Wire where there is one.

        ``optimizer`` is for policies, and what follows the learning rate; ``seed`` and ``measure`` are those of
        `thinwire.compress`.
        """
        if self.kind == "nothing":
            send_nothing(ddp)
        elif self.kind == "torch powersgd":
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=self.rank, start_powerSGD_iter=_TORCH_POWERSGD_START
            )
            ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif self.kind == "thinwire":
            with _grouped_in_nodes(self.ranks_per_node):
                return thinwire.compress(
                    ddp,
                    self.spec,
                    network=thinwire.Network(algorithm=self.algorithm, transport=self.transport),
                    checks=thinwire.Checks(measure_every=measure),
                    exclude=self.exclude,
                    seed=seed,
                    skip_if_slower=False,
                    **({"adapt": self.policy} if self.adapt else {}),
                    **({"optimizer": optimizer} if self.adapt or self._follows_rate else {}),
                )
        return None


@contextmanager
def _grouped_in_nodes(ranks_per_node: int) -> Iterator[None]:
    """Make ranks count ``ranks_per_node`` of them as a node while the body runs."""
    before = os.environ.get(NODE_VARIABLE)
    if ranks_per_node:
        os.environ[NODE_VARIABLE] = str(dist.get_rank() // ranks_per_node)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(NODE_VARIABLE, None)
        else:
            os.environ[NODE_VARIABLE] = before


def compressed(spec: str) -> Method:
    """Return a training whose gradients are compressed by ``spec`` and sent by the defaults of `thinwire.compress`."""
    return Method(spec, spec, "#0a7d4f", spec=spec, transport="auto")


FP32 = Method("fp32", "DDP fp32", "#555555", kind="ddp")
NOTHING = Method("nothing", "nothing sent", "#aaaaaa", kind="nothing")
"""Method of the ceiling: the same ranks on the same cores, without communication."""
THINWIRE = Method("thinwire", "thinwire", "#0a7d4f")
