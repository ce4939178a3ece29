"""Tensor parallelism: the sum behind a row-wise layer, compressed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement
from torch.distributed.tensor.parallel import RowwiseParallel

from thinwire.arguments import check_type
from thinwire.collectives import CommunicationError, Transport
from thinwire.compat import group_timeout
from thinwire.compressors import Compressor, Delta, coder_of, parse
from thinwire.integrations.transports import bare_transport
from thinwire.kernels import FORMAT_VERSION
from thinwire.pipeline.options import coded
from thinwire.pipeline.sample_sum import SampleSum
from thinwire.pipeline.schedule_step import Batch, Ids
from thinwire.pipeline.stats import PipelineStats
from thinwire.plan.contraction import check_contraction
from thinwire.runtime import agree, group_seed
from thinwire.runtime.checkpoint import check_sealed, integers, sealed
from thinwire.store import Memory


class CompressedRowwiseParallel(RowwiseParallel):
    """PyTorch's ``RowwiseParallel`` whose output is summed over ranks compressed (AQ-SGD, appendix F).

        down = thinwire.CompressedRowwiseParallel("delta(maxabs(bits=4))")
        parallelize_module(model, mesh, {"blocks.*.up": ColwiseParallel(), "blocks.*.down": down})
        for ids, (x, y) in loader:                       # of thinwire.data.Indexed(dataset)
            down.set_sample_ids(ids)                     # on every rank
            loss_fn(model(x), y).backward()

    Each rank's part of the output is compressed, an N-th of it on each rank added up, and the sum compressed once more:
    ``A_Q = Q[Q(A_1) + … + Q(A_N)]``. With ``delta(Q)``, each of these messages is what changed since the sample's last
    visit, of which every rank keeps ``2 + 1/N`` times the layer's output in fp32; first visits are sent as they are.
    The gradient of the sum is that of every part and needs no message; gradients that PyTorch adds up before a
    column-wise layer are its own. One style may be given for many layers. Without gradients, or in evaluation, outputs
    are summed as they are.

    The output is a tensor on every rank, batch first. Activations on a GPU are summed on the host, over gloo groups of
    their own. A layer runs once after each `set_sample_ids`, so it cannot be recomputed (activation checkpointing).

    Args:
        compressor: ``delta(...)`` of what codes activations, or such a compressor alone, which keeps nothing and needs
            no ids.
        store: How many samples may be kept, ``thinwire.store.Memory(...)``; samples without room are sent whole.
        seed: Of the draws of stochastic rounding.
        input_layouts: As ``RowwiseParallel`` takes it.

    Raises:
        TypeError, ValueError: An option is invalid.
        DisagreementError: From ``parallelize_module``, ranks were given different options.
    """

    def __init__(
        self,
        compressor: str | Compressor = "delta(maxabs(bits=4))",
        *,
        store: Memory | None = None,
        seed: int = 0,
        input_layouts: Placement | None = None,
    ) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=Partial())
        self.compressor = parse(compressor)
        inner = coded("compressor", coder_of(self.compressor))
        if inner is not self.compressor:
            check_contraction(inner)
        self.store = Memory() if store is None else store
        check_type("store", self.store, Memory, "thinwire.store.Memory(...)")
        self.seed = seed
        self._stats = PipelineStats()
        self._layers: list[_Layer] = []
        self._transports: dict[dist.ProcessGroup, Transport] = {}
        self._samples: tuple[int, ...] = ()
        self._given = 0

    @property
    def keeps(self) -> bool:
        """Whether messages of samples are kept."""
        return isinstance(self.compressor, Delta)

    def set_sample_ids(self, ids: Ids) -> None:
        """Set the samples of the next forward pass, in their order in the batch, on every rank of the mesh the same.

        Args:
            ids: A number of 0 to 2^62 for each sample, its own in every epoch; none twice.

        Raises:
            TypeError, ValueError: These are no ids.
        """
        self._samples = Batch.from_ids(ids, None, None, ()).samples
        self._given += 1
        self._stats.steps += 1

    @property
    def stats(self) -> PipelineStats:
        """What this rank sent for all layers of this style. ``dense_bytes`` are those of ring all-reduces in fp32."""
        return self._stats.holding([layer.sum.store for layer in self._layers if layer.sum.store is not None])

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors from which the style of the same rank, given for the same layers, goes on bit by bit."""
        state = {
            "seed": torch.tensor([self.seed], dtype=torch.int64, device="cpu"),
            "format_version": torch.tensor([FORMAT_VERSION], dtype=torch.int64, device="cpu"),
        }
        for index, layer in enumerate(self._layers):
            state |= {f"{index}/{name}": value for name, value in layer.sum.state_dict().items()}
        return sealed(state)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state, after ``parallelize_module`` and on every rank from the one it saved.

        Raises:
            ValueError: It is damaged, or not the state of a style with as many layers, this seed and wire format.
            StoreError: From the next forward pass, its messages are not of these layers.
        """
        check_sealed(state, [key for key in state if key != "checksums"])
        for name, mine in (("seed", self.seed), ("format_version", FORMAT_VERSION)):
            if name not in state or integers(state, name) != [mine]:
                raise ValueError(f"the state has another {name} than {mine}: resume with the same")
        layers: dict[int, dict[str, Tensor]] = {}
        for key, value in state.items():
            index, _, name = key.partition("/")
            if name and index.isdecimal():
                layers.setdefault(int(index), {})[name] = value.detach().cpu().clone()
        if set(layers) != set(range(len(self._layers))) or not all("step" in own for own in layers.values()):
            raise ValueError(f"the state is of {len(layers)} layers, this style was given for {len(self._layers)}")
        for index, own in layers.items():
            integers(own, "step")
            self._layers[index].sum.load_state_dict(own)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        group = device_mesh.get_group()
        transport = self._transports.get(group)
        if transport is None:
            transport = self._transports[group] = bare_transport(group, group_timeout(group))
        seed = group_seed(self.seed, tuple(dist.get_process_group_ranks(group)))
        layer = _Layer(self, transport, len(self._layers), seed)
        agree(layer.record, transport)
        self._layers.append(layer)
        module.register_forward_hook(layer)
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.compressor)!r}, input_layouts={self.input_layouts})"


class _Layer:
    """The forward hook of one layer: its output, a part of the sum, becomes the sum."""

    def __init__(self, style: CompressedRowwiseParallel, transport: Transport, index: int, seed: int) -> None:
        self._style, self._transport = style, transport
        self._taken = 0
        self.record = {
            "wire format": str(FORMAT_VERSION),
            "layer": str(index),
            "compressor": str(style.compressor),
            "seed": str(style.seed),
            **{f"store {name}": str(value) for name, value in style.store.facts().items()},
        }
        self.sum = SampleSum(
            transport, style.compressor, style.store, name=f"layer{index}", seed=seed, stats=style._stats
        )

    def __call__(self, module: nn.Module, _: Any, part: Tensor) -> Tensor:
        if not (module.training and torch.is_grad_enabled()):
            total = part.detach().to("cpu", copy=True)
            self._transport.all_reduce(total)
            return total.to(part.device)
        try:
            samples = self._samples(part)
            total = _Summed.apply(part, self.sum, samples)
        except Exception as error:
            if self._transport.detector is not None and not isinstance(error, CommunicationError):
                self._transport.detector.report(error)
            raise
        assert isinstance(total, Tensor)
        return total

    def _samples(self, part: Tensor) -> Sequence[int]:
        if not self._style.keeps:
            return range(part.shape[0])
        if self._taken == self._style._given:
            raise ValueError(
                "no sample ids: call set_sample_ids(ids) of the style before each forward pass of training, with the "
                "ids of all samples of the batch. A layer cannot be run twice for the same ids, as activation "
                "checkpointing does"
            )
        self._taken = self._style._given
        return self._style._samples


class _Summed(torch.autograd.Function):
    """The gradient of the sum is that of every part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, own: SampleSum, samples: Sequence[int]) -> Tensor:
        return own(part, samples).to(part.device, part.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None, None
