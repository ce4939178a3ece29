"""Every way of attaching thinwire to a training, behind one interface: what the laws of all attachments need of it."""

from __future__ import annotations

import functools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

import nets
import sharded
import thinwire
from pipelines import BATCH, SAMPLES, Pipe, samples
from thinwire.integrations.ddp import Options, attach_ddp
from thinwire.local import DiLoCo
from thinwire.optim import CompressedAdamW, Muon, QuantizedAdam

FEEDBACK = "ef(minmax(bits=2, bucket=64, rounding=stochastic))"
"""Rounded by draws, so that a law sees which are drawn."""
WHOLE = StateDictOptions(full_state_dict=True)
State = dict[str, Any]


class Training(ABC):
    """One rank's part of a training. It is made with the same weights on all ranks, and not yet compressed."""

    worlds: tuple[int, int, int] = (2, 3, 1)
    """Numbers of ranks: what it trains on, another number, and what checkpoints of both are compared on."""
    backend = "gloo"
    without: tuple[str, ...] = ()
    """Laws that do not apply: by the names of their functions."""
    share = 0.6
    """Of the bytes that it sent uncompressed, no more."""
    becomes_stock = True
    """Whether it trains as if it had never been compressed once it is detached."""
    keeps_nothing_of_nan = True
    """Whether all slots stay as they were in a step with a value that is not finite."""
    model: Any
    optimizer: torch.optim.Optimizer
    wire: Any
    """What `attach` made of it: has ``state_dict``, ``load_state_dict`` and, but for pipelines,
    ``gather_state_dict``."""

    def __init__(self, rank: int) -> None:
        self.rank, self.size = rank, dist.get_world_size()

    @property
    def poisons(self) -> bool:
        """Whether this rank is the one that meets a value that is not finite: the last one."""
        return self.rank == self.size - 1

    @abstractmethod
    def attach(self) -> None:
        """Begin to compress."""

    @abstractmethod
    def step(self, step: int) -> None:
        """Train on this rank's batch of that index."""

    @abstractmethod
    def poisoned_step(self, step: int) -> list[Tensor]:
        """Meet a value on the last rank that is not finite, and return what this rank received of it."""

    def weights(self) -> dict[str, Tensor]:
        """The weights that all ranks must have in common after a step."""
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def state(self) -> State:
        """What a checkpoint of this rank holds, without the wire's state."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: State) -> None:
        """Continue from a `state`."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def detach(self) -> None:
        """End compressing."""
        self.wire.detach()

    @property
    def handle(self) -> Any:
        """What counts bytes and slots."""
        return self.wire

    def sent_bytes(self) -> int:
        """Bytes that this rank has sent since `attach`."""
        return self.handle.stats.payload_sent_bytes

    def planned_bytes(self) -> float:
        """Bytes of a step, by formula."""
        return self.wire.sent_bytes()

    def dense_bytes(self) -> int:
        """Bytes of the same, uncompressed."""
        return self.handle.stats.dense_bytes

    def memory(self) -> tuple[int, int]:
        """Bytes of slots, as told before training and as they are."""
        return self.handle.engine.planned_bytes, self.handle.stats.slot_bytes


class Replicated(Training):
    """DistributedDataParallel. With buckets as they are from the first step on: bytes are a formula of buckets."""

    compressor: Any = FEEDBACK
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer] = staticmethod(
        lambda model: torch.optim.SGD(nets.trained(model), lr=0.05, momentum=0.9)
    )

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.model = nets.make(rank, bucket_cap_mb=25.0)
        self.optimizer = self.optimizer_of(self.model)

    def attach(self) -> None:
        self.wire = thinwire.compress(self.model, self.compressor, skip_if_slower=False, **self.options())

    def options(self) -> dict[str, Any]:
        return {}

    def backward(self, step: int, factor: float = 1.0) -> None:
        self.optimizer.zero_grad()
        (nets.loss_of(self.model, nets.batch(self.rank, step)) * factor).backward()

    def step(self, step: int) -> None:
        self.backward(step)
        self.optimizer.step()

    def poisoned_step(self, step: int) -> list[Tensor]:
        self.backward(step, float("inf") if self.poisons else 1.0)
        received = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        self.optimizer.zero_grad()
        return received


class Mixed(Replicated):
    """Compressors of all kinds side by side: coded, gathered, of low rank, summed, with levels that are learned."""

    without = ("memory_told",)  # the slots of a bucket have room for all its layers
    compressor: ClassVar = {
        "embed*": "ef(topk(density=0.1) | minmax(bits=8))",
        "layers.0.weight": "ef(powersgd(rank=2))",
        "layers.1.weight": "levels(bits=3, learn_at=(1, 2), min_numel=0)",
        "layers.2.weight": "ef(randk(density=0.2))",
        "layers.3.weight": "ef(minmax(bits=4), bits=8)",
        "*": "cast(bf16)",
    }


class Adaptive(Replicated):
    """A policy that has changed the plan before the laws look."""

    compressor = "ef(minmax(bits=4))"

    def options(self) -> dict[str, Any]:
        return {"adapt": thinwire.policies.KMeans(every=2, window=1, lag=1)}


class OnDevice(Replicated):
    """The way of a device, on CPU tensors over gloo."""

    def attach(self) -> None:
        self.wire = attach_ddp(self.model, Options(compressor=self.compressor, skip_if_slower=False, as_device=True))


class Preconditioned(Replicated):
    """CompressedAdamW, whose updates are what is sent."""

    compressor = "minmax(bits=2, bucket=64)"
    becomes_stock = False  # ranks average their moments
    optimizer_of = staticmethod(lambda model: CompressedAdamW(nets.trained(model), lr=1e-3))

    def options(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer}


class Momenta(Preconditioned):
    """QuantizedAdam, its warm-up over after the first step."""

    compressor = "minmax(bits=4, bucket=64)"
    becomes_stock = True
    optimizer_of = staticmethod(lambda model: QuantizedAdam(nets.trained(model), lr=1e-3, warmup=1))


class Orthogonal(Replicated):
    """Muon, whose ranks divide its work."""

    optimizer_of = staticmethod(lambda model: Muon(model, lr=1e-3))


class Grouped(Replicated):
    """Unmodified DDP over the process group ``thinwire``, which has no state and is not detached."""

    backend = "cpu:thinwire"
    without = (
        *("resumed", "another_world", "detached", "wrong_state", "bytes_foreseen", "memory_told"),
        *("independent_of_defaults", "in_a_closure", "dropped"),  # its draws are new in each training
    )
    keeps_nothing_of_nan = False  # it keeps nothing

    def attach(self) -> None:
        thinwire.register_model(self.model)
        self.wire = dist.group.WORLD

    def detach(self) -> None:
        pass


class Sharded(Training):
    """FSDP2 with weights and gradients compressed."""

    worlds = (2, 4, 3)  # one rank owes nothing: it adds exactly
    weights_spec = "minmax(bits=8, bucket=64)"

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.model = self.build()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def build(self) -> Any:
        return sharded.build(reshard_after_forward=False)

    def attach(self) -> None:
        self.wire = sharded.compress(self.model, self.weights_spec, FEEDBACK)

    def step(self, step: int) -> None:
        sharded.train(self.model, 1, first=step, optimizer=self.optimizer)

    def backward(self, step: int, factor: float = 1.0) -> None:
        x, y = sharded.batch(step, self.rank)
        ((self.model(x) - y).square().mean() * factor).backward()

    def poisoned_step(self, step: int) -> list[Tensor]:
        self.optimizer.zero_grad()
        self.backward(step, float("inf") if self.poisons else 1.0)
        received = [p.grad.full_tensor() for p in self.model.parameters()]
        self.optimizer.zero_grad()
        return received

    def weights(self) -> dict[str, Tensor]:
        return sharded.whole(self.model)

    def state(self) -> State:
        weights, optimizer = get_state_dict(self.model, self.optimizer, options=WHOLE)
        return {"model": weights, "optimizer": optimizer}

    def load(self, state: State) -> None:
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **parts, options=WHOLE)

    def planned_bytes(self) -> float:
        return self.wire.sent_bytes("weights") + self.wire.sent_bytes()


class Changes(Sharded):
    """What is sent of weights is how they differ from what has arrived before."""

    weights_spec = "delta(minmax(bits=4, bucket=64))"
    keeps_nothing_of_nan = False  # weights arrive in a step whose gradients are not finite, too


class AdaptiveShards(Sharded):
    """A policy for weights and gradients together, that has changed the plan before the laws look."""

    def attach(self) -> None:
        policy = thinwire.policies.KMeans(every=2, window=1, lag=1)
        self.wire = sharded.compress(self.model, self.weights_spec, "ef(minmax(bits=4, bucket=64))", adapt=policy)


class PreconditionedShards(Sharded):
    """CompressedAdamW, whose ranks keep the moments of their shards."""

    becomes_stock = False  # ranks average their moments

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.optimizer = CompressedAdamW(self.model.parameters(), lr=1e-3)

    def attach(self) -> None:
        gradients = "minmax(bits=2, bucket=64)"
        self.wire = sharded.compress(self.model, self.weights_spec, gradients, optimizer=self.optimizer)


@functools.cache
def _mesh(replicas: int, shards: int) -> Any:
    """The groups of a mesh stay until the process ends: one for all models."""
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


class Replicas(Sharded):
    """Replicas of a model of two shards."""

    worlds = (4, 6, 2)

    def build(self) -> Any:
        return sharded.build(_mesh(self.size // 2, 2), reshard_after_forward=False)

    def planned_bytes(self) -> float:
        return super().planned_bytes() + self.wire.sent_bytes("across")


class Whole(Sharded):
    """Replicas of a model whose modules are whole on every rank."""

    without = ("memory_told",)  # the slots of a bucket have room for all its layers

    def build(self) -> Any:
        return sharded.build(_mesh(self.size, 1))

    def attach(self) -> None:
        self.wire = thinwire.compress(self.model, FEEDBACK, skip_if_slower=False, min_numel=0)

    def planned_bytes(self) -> float:
        return self.wire.sent_bytes()


class Local(Training):
    """DiLoCo: what is sent is each worker's progress since the last exchange, every other step."""

    without = ("detached", "in_a_closure", "dropped")  # it is closed for good, and takes two steps at once

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        torch.manual_seed(0)
        self.model = nets.Net()
        self.optimizer = torch.optim.SGD(nets.trained(self.model), lr=0.05)

    def attach(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # so many exchanges say that fewer would do
            self.wire = DiLoCo(self.model, self.optimizer, every=2, compressor="minmax(bits=2, bucket=64)")

    @property
    def handle(self) -> Any:
        return self.wire.wire

    def step(self, step: int) -> None:
        # Twice: after each the workers have the shared weights.
        for half in range(2):
            self.optimizer.zero_grad()
            nets.loss_of(self.model, nets.batch(self.rank, 2 * step + half)).backward()
            self.optimizer.step()
            self.wire.step()

    def poisoned_step(self, step: int) -> list[Tensor]:
        """The others go on from the weights that were shared, and so does the worker whose weights broke."""
        if self.poisons:
            with torch.no_grad():
                self.model.norm.weight[0] = torch.nan
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            self.wire.step()
            self.wire.step()
        return [torch.tensor(torch.nan) for warning in said if "not finite" in str(warning.message)]

    def detach(self) -> None:
        self.wire.close()

    def planned_bytes(self) -> float:
        return 2 * (self.wire.bytes_per_step + 32)  # and headers


class Stage(Training):
    """A pipeline of two stages: the change of each sample's activation forward, gradients backward."""

    without = (
        *("another_world", "detached", "wrong_state", "bytes_foreseen", "memory_told", "independent_of_defaults"),
        *("in_a_closure", "dropped"),  # its schedule calls backward
    )
    share = 0.95  # a sample's first activation is not compressed
    keeps_nothing_of_nan = False  # of the samples that had it nothing is kept any more

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.x, self.y = samples()

    def attach(self) -> None:
        self.pipe = Pipe(self.rank, self.size, forward="delta(maxabs(bits=4))", backward="maxabs(bits=6)")
        (self.wire,) = self.pipe.stages

    def _ids(self, step: int) -> Tensor:
        first = step * BATCH % SAMPLES
        return torch.arange(first, first + BATCH)

    def step(self, step: int) -> None:
        ids = self._ids(step)
        self.pipe.step(self.x[ids], self.y[ids], ids)

    def poisoned_step(self, step: int) -> list[Tensor]:
        ids = self._ids(step)
        x = self.x[ids].clone()
        x[3, 0, 0] = torch.nan
        before = self.pipe.parameters()
        loss = self.pipe.step(x, self.y[ids], ids)
        received = [*self.pipe.parameters(), *([torch.tensor(loss)] if loss is not None else [])]
        with torch.no_grad():
            for p, q in zip([p for m in self.pipe.modules for p in m.parameters()], before, strict=True):
                p.copy_(q)
        return received

    def weights(self) -> dict[str, Tensor]:
        """Of each boundary the digest of what both sides keep."""
        return {name.rpartition("-")[0]: torch.tensor(d & 2**62 - 1) for name, d in self.pipe.digests().items()}

    def state(self) -> State:
        return {"modules": [module.state_dict() for module in self.pipe.modules]}

    def load(self, state: State) -> None:
        for module, its in zip(self.pipe.modules, state["modules"], strict=True):
            module.load_state_dict(its)

    def detach(self) -> None:
        self.wire.close()

    def sent_bytes(self) -> int:
        return self.wire.stats.forward_sent_bytes + self.wire.stats.backward_sent_bytes


ATTACHMENTS: dict[str, type[Training]] = {
    "DDP": Replicated,
    "DDP, all kinds": Mixed,
    "DDP, a policy": Adaptive,
    "DDP on a device": OnDevice,
    "CompressedAdamW": Preconditioned,
    "QuantizedAdam": Momenta,
    "Muon": Orthogonal,
    "process group": Grouped,
    "FSDP2": Sharded,
    "FSDP2, changes of weights": Changes,
    "FSDP2, a policy": AdaptiveShards,
    "CompressedAdamW on FSDP2": PreconditionedShards,
    "FSDP2 on (n, 2)": Replicas,
    "FSDP2 on (n, 1)": Whole,
    "DiLoCo": Local,
    "pipeline": Stage,
}
