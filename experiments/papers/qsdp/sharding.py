"""A GPT under FSDP2 as all parts train it: how it is sharded, micro-batches, exchanges cut short or quantized flat."""

# No `from __future__ import annotations` here: PyTorch looks at what its custom collectives take.

import math
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import thinwire
from experiments.framework.rank import Attached
from thinwire.compressors import Compressor
from thinwire.kernels import derive_key
from thinwire_tools.compare.gpt import GPT
from thinwire_tools.compare.tasks import GPTTask
from thinwire_tools.compare.train import learning_rate

if TYPE_CHECKING:
    from experiments.papers.qsdp.methods import Method

Batch = tuple[Tensor, Tensor]


def shard(task: GPTTask, mesh: DeviceMesh, seed: int, *, half: bool = False) -> GPT:
    """The task's model, block by block under FSDP2, each gathered while the one before it computes.

    ``half``: gradients are reduced in fp16.
    """
    model = task.build(seed)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float16 if half else None)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    thinwire.prefetch(model)
    return model


def backward(task: GPTTask, model: GPT, batch: Batch, num_micro: int = 1) -> float:
    """Leave the mean gradient of a batch in the model's parameters; the loss on this rank.

    Of ``num_micro`` micro-batches all but the last one keep weights from forward to backward and their gradients to
    themselves: ``num_micro + 1`` weight exchanges to one gradient exchange, as the thesis counts (C.2).
    """
    if num_micro == 1:
        loss = task.loss(model, batch)
        loss.backward()
        return float(loss.detach())
    assert isinstance(model, FSDPModule)
    total = 0.0
    for i, micro in enumerate(zip(*(part.chunk(num_micro) for part in batch), strict=True)):
        last = i == num_micro - 1
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_forward(last)
        loss = task.loss(model, micro) / num_micro
        loss.backward()
        total += float(loss.detach())
    return total


class Shards(Attached):
    """One model under FSDP2, and the method that sends its weights and gradients."""

    def __init__(self, task: GPTTask, method: "Method", seed: int, num_micro: int = 1) -> None:
        super().__init__()
        self.task, self.num_micro = task, num_micro
        self.model = shard(task, init_device_mesh("cpu", (self.num_ranks,)), seed, half=method.half)
        self.wire = method.attach(self.model, seed)
        self.optimizer = task.optimizer(self.model)

    def rate(self, step: int) -> float:
        return learning_rate(self.task.learning_rate, step, self.task.steps)

    def step(self, batch: Batch) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        loss = backward(self.task, self.model, batch, self.num_micro)
        self.optimizer.step()
        return loss

    def score(self) -> tuple[float, int]:
        return self._evaluate(self.model, probe=True)

    def result(self) -> dict[str, Any]:
        """Return the score over all held-out data through weights as they are gathered, and as the optimizer keeps
        them, the seconds of learning levels, and what each layer is sent by in the end."""
        return {
            "held_out": self._evaluate(self.model, probe=False),
            "master": self._evaluate(self._whole(), probe=False),
            "learn_s": self.wire.stats.learn_s if self.wire else 0.0,
            "plan": {name: str(c) for name, c in self.wire.plan.layers.items()} if self.wire else {},
            "digests": {},
        }

    def settled(self) -> dict[str, Any]:
        """Return the bytes by formula, of a step of several micro-batches."""
        if self.wire is None:
            return super().settled()
        weights, gradients = self.wire.sent_bytes("weights"), self.wire.sent_bytes()
        return {"payload_bytes": (self.num_micro + 1) * weights + gradients, "layers": []}

    @torch.no_grad()
    def _evaluate(self, model: GPT, *, probe: bool) -> tuple[float, int]:
        return self.task.evaluate(model, self.rank, self.num_ranks, probe=probe)

    def _whole(self) -> GPT:
        """The model with all its weights, as the optimizer keeps them."""
        whole = self.task.build(0)
        shards = {name: value for name, value in self.model.state_dict().items() if isinstance(value, DTensor)}
        whole.load_state_dict({name: shard.full_tensor() for name, shard in shards.items()})
        return whole


def cut_short(model: nn.Module, weights_ratio: float, gradients_ratio: float) -> None:
    """Have stock collectives carry only the first of so many elements of each buffer: thesis, C.2."""
    _set_collectives(model, _ShortGather(weights_ratio), _ShortReduce(gradients_ratio))


def quantize_flat(model: nn.Module, compressor: Compressor, seed: int) -> None:
    """Have stock collectives carry each rank's flat buffers as ``compressor`` decodes them: all weights of a block, its
    norms' included, as one tensor."""
    gather = _QuantizedGather(compressor, derive_key(seed, 0))
    _set_collectives(model, gather, _QuantizedReduce(compressor, derive_key(seed, 1)))


def _set_collectives(model: nn.Module, gather: Any, reduce: Any) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(reduce)


class _Flat:
    """Allocates as PyTorch's own collectives do."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Quantized(_Flat):
    def __init__(self, compressor: Compressor, seed: int) -> None:
        self._compressor, self._seed, self._calls = compressor, seed, count()

    def decoded(self, part: Tensor, rank: int) -> Tensor:
        """What arrives of a part that ``rank`` sends."""
        return self._compressor.roundtrip(part, derive_key(self._seed, next(self._calls), rank))


class _QuantizedGather(_Quantized):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        dist.all_gather_into_tensor(output_tensor, self.decoded(input_tensor, group.rank()), group=group)


class _QuantizedReduce(_Quantized):
    """Every owner is sent a part with a scale of its own."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        parts = [self.decoded(part, group.rank()) for part in input_tensor.chunk(group.size())]
        dist.reduce_scatter_tensor(output_tensor, torch.cat(parts), op=op, group=group)


class _Short(_Flat):
    def __init__(self, ratio: float) -> None:
        self._ratio = ratio

    def sent(self, numel: int) -> int:
        """Of a part of so many elements, those that are sent."""
        return 0 if math.isinf(self._ratio) else math.ceil(numel / self._ratio)


class _ShortGather(_Short):
    """What is not sent is taken from this rank's own part, so that values stay those of a network."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        parts, sent = output_tensor.view(group.size(), -1), self.sent(input_tensor.numel())
        for rank in range(group.size()):
            if rank != group.rank():
                parts[rank].copy_(input_tensor)
        if sent:
            arrived = torch.empty(group.size() * sent, dtype=input_tensor.dtype)
            dist.all_gather_into_tensor(arrived, input_tensor[:sent], group=group)
            parts[:, :sent].copy_(arrived.view(group.size(), sent))


class _ShortReduce(_Short):
    """Of what is not sent an owner takes its own gradient."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        parts, sent = input_tensor.view(group.size(), -1), self.sent(output_tensor.numel())
        output_tensor.copy_(parts[group.rank()])
        if sent:
            total = torch.empty(sent, dtype=input_tensor.dtype)
            dist.reduce_scatter_tensor(total, parts[:, :sent].reshape(-1), op=op, group=group)
            output_tensor[:sent] = total
