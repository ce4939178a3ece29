"""The ways that gradients travel in the thesis's chapter 3, as a rank process can be told them."""

# No `from __future__ import annotations` here: DDP checks the annotations of a communication hook as objects.

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.collectives.nodes import VARIABLE as NODE_VARIABLE
from thinwire.plan import Policy, parse_policy
from thinwire.repro.train import VARIANTS
from thinwire.repro.train import Task as DemoTask

CGX = "minmax(bits=4, bucket=128)"
"""The thesis's default (section 3.5.3): "4 bits and 128 bucket size always recovers full accuracy"."""
NORM = "qsgd(bits=4, bucket=128)"
"""QSGD as its paper scales it, by the bucket's L2 norm (section 3.3.3)."""
GRACE = "qsgd(bits=8, bucket=layer, norm=linf)"
"""What the thesis says GRACE's 4-bit quantisation amounts to on the wire (section 3.7.2): one scale for a whole tensor,
no buckets, codes sent as INT8, and an all-gather."""
ALMOST_NOTHING_GAMMA = 10_000.0
"""Of `truncate`: "sending only a small number of elements per layer" (section 3.7.2)."""

_TORCH_POWERSGD_START = 2
_SETTLED_STEPS = 3


@dataclass(frozen=True)
class Way:
    """How gradients travel. ``spec``, ``topology`` and ``transport`` are those of `thinwire.compress`."""

    name: str
    title: str
    colour: str
    kind: Literal["ddp", "thinwire", "blob", "nothing", "torch powersgd"] = "thinwire"
    spec: str = CGX
    topology: str = "sra"
    transport: Literal["auto", "group", "shared"] = "group"
    ranks_per_node: int = 0
    """How many ranks are told to be one node, though each has a link of its own; 0 leaves them what they are."""
    rank: int = 0
    """Of PyTorch's PowerSGD."""
    adapt: str = ""
    """A policy, as text, that chooses each layer's own compressor; its first plan comes before anything is timed."""

    @property
    def one_bucket(self) -> bool:
        """Whether all gradients must be in one DDP bucket: PyTorch's PowerSGD aborts on gloo with several."""
        return self.kind == "torch powersgd"

    def group(self) -> dist.ProcessGroup | None:
        """The process group that DDP is to use, where that is not the default one: of kind ``blob`` it compresses."""
        if self.kind != "blob":
            return None
        options = thinwire.ProcessGroupOptions(self.spec, topology=self.topology)
        made = dist.new_group(backend="thinwire", pg_options=options)
        assert isinstance(made, dist.ProcessGroup)
        return made

    @property
    def policy(self) -> Policy | None:
        return parse_policy(self.adapt) if self.adapt else None

    @property
    def warm_up_steps(self) -> int:
        """Steps before anything is timed: DDP arranges its buckets, messages are opened, a first plan comes."""
        policy = self.policy
        if policy is None:
            return _SETTLED_STEPS
        first = policy.warmup if policy.warmup > policy.lag_steps else policy.warmup + policy.every
        return first + _SETTLED_STEPS

    def attach(
        self, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer | None = None
    ) -> thinwire.Wire | None:
        """Have ``ddp``'s gradients travel so; the Wire where there is one. ``optimizer``: for policies."""
        if self.kind == "nothing":
            VARIANTS["noop"].attach(ddp, DemoTask())
        elif self.kind == "torch powersgd":
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=self.rank, start_powerSGD_iter=_TORCH_POWERSGD_START
            )
            ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif self.kind == "thinwire":
            with _told_nodes(self.ranks_per_node):
                return thinwire.compress(
                    ddp,
                    self.spec,
                    topology=self.topology,
                    transport=self.transport,
                    decline=False,
                    **({"adapt": self.policy, "optimizer": optimizer} if self.adapt else {}),
                )
        return None


@contextmanager
def _told_nodes(ranks_per_node: int) -> Iterator[None]:
    """While the body runs, ranks take so many of them for a node."""
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


FP32 = Way("fp32", "DDP fp32", "#555555", kind="ddp")
NOTHING = Way("nothing", "nothing sent", "#aaaaaa", kind="nothing")
"""The ceiling: the same ranks on the same cores, without communication."""
THINWIRE = Way("thinwire", "thinwire", "#0a7d4f")
