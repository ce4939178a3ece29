"""Tensor parallelism: the sum behind a row-wise layer, compressed (AQ-SGD, appendix F)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement
from torch.distributed.tensor.parallel import RowwiseParallel

from thinwire.arguments import check_type
from thinwire.collectives import Transport
from thinwire.collectives.message import seal, verify
from thinwire.collectives.transport import ring_bytes
from thinwire.compressors import Compressor, Delta, message_coder, parse
from thinwire.integrations.transports import bare_transport
from thinwire.kernels import FORMAT_VERSION, derive_key
from thinwire.pipeline.message import Batch, BoundaryTensors, Ids, MessageLayout, Spec
from thinwire.pipeline.options import coded, fitted, inner_coder, read_state, write_state
from thinwire.pipeline.pipeline import report
from thinwire.pipeline.stats import PipelineStats
from thinwire.runtime import agree, group_seed
from thinwire.runtime.checkpoint import integers
from thinwire.store import Memory, Part, RecordFormat, Rows, Store

_GRAIN = 128
"""Number of elements to a multiple of which samples are cut, so that buckets are whole."""
_PARTS, _SUM = 0, 1
"""Phases of an exchange."""


class SampleSum:
    """Sums one layer's activations over the ranks of a transport: ``A_Q = Q[Q(A_1) + … + Q(A_N)]`` (AQ-SGD, F.2).

    Each rank adds up an N-th of every sample's elements. With ``delta(Q)`` all N + 1 messages are changes: a rank sends
    what changed of its part since the sample's last visit, and of the sum the change, and what the last message of the
    sum had left out, as in double-pass error compensation (Tang et al. 2019, equations 3 and 4). A sample's first visit
    is sent in fp32. Ranks make the same calls; each keeps of a sample its own part, the sum, and of its N-th what the
    last message left out: ``2 + 1/N`` times the activation in fp32.

    Args:
        transport: the ranks.
        compressor: ``delta(...)`` of a coded compressor, or such a compressor alone, which keeps nothing.
        place: where records are kept.
        name: distinguishes the layer from others, the same on all ranks.
        seed: the seed of stochastic rounding.
        stats: counts what this rank sends.
    """

    def __init__(
        self, transport: Transport, compressor: Compressor, place: Memory, *, name: str, seed: int, stats: PipelineStats
    ) -> None:
        self.transport, self._coder, self._place = transport, coded("compressor", message_coder(compressor)), place
        self._keeps = isinstance(compressor, Delta)
        self._name, self._seed, self.stats = name, seed, stats
        self._shape: tuple[int, ...] | None = None
        self._cuts: list[tuple[int, int]] = []
        self._share = 0
        self.store: Store | None = None
        self._loaded: dict[str, Tensor] = {}
        self.step = 0

    def __call__(self, x: Tensor, samples: Sequence[int]) -> Tensor:
        """Return the sum of all ranks' ``x`` (samples, ...) as all receive it, in fp32 on the host. ``samples`` are
        their ids; only their number counts if nothing is kept.

        Raises:
            ValueError: ``x`` has another number of samples than ``samples``, or another shape than before.
            StoreError: there is no room for a sample.
            TransportError, PeerFailedError, MessageError: a message was not received, or is not the expected one.
        """
        self._set_up(x, len(samples))
        flat = x.detach().to("cpu", torch.float32).reshape(len(samples), -1)
        rows, known = Rows.uniform(samples, 0), [True] * len(samples)
        widths = [flat.shape[1], flat.shape[1], self._share]
        kept = torch.zeros(len(samples), sum(widths), dtype=torch.float32, device="cpu")
        if self.store is not None:
            self.store.admit(samples)
            known = [self.store.visits(sample) > 0 for sample in samples]
            kept = self.store.load_known(rows, [i for i, seen in enumerate(known) if seen]).view(len(samples), -1)
        # This rank's parts as others know them, the sums, and what was left out of this rank's share of these.
        part, total, rest = kept.split(widths, dim=1)
        layouts = [self._layout(cut, rows, known, f"to {rank}") for rank, cut in enumerate(self._cuts)]
        layouts_of_sum = [self._layout(cut, rows, known, f"sum {rank}") for rank, cut in enumerate(self._cuts)]
        changes = [(flat - part)[:, start:end] for start, end in self._cuts]
        arrived = self._scatter(changes, layouts, part)
        rank = self.transport.rank
        own = rest[:, : arrived.shape[1]] + arrived
        sums = self._gather(own, layouts_of_sum)
        for (start, end), change in zip(self._cuts, sums, strict=True):
            total[:, start:end] += change
        rest[:, : own.shape[1]] = own - sums[rank]
        if self.store is not None:
            # All ranks have the same sum, so that they forget the same samples.
            finite = torch.isfinite(total).all(1).tolist()
            records = self.store.form.encode(kept.view(-1), rows)
            self.stats.nonfinite += self.store.keep(records, rows, self.step, finite)
        self.step += 1
        self.stats.dense_bytes += ring_bytes(4 * flat.numel(), self.transport.world_size)
        return total.view(x.shape)

    def _set_up(self, x: Tensor, count: int) -> None:
        if x.dim() < 2 or x.shape[0] != count:
            raise ValueError(
                f"activations of shape {tuple(x.shape)} are not those of {count} samples: the first dimension is the "
                "batch, and set_sample_ids() takes the ids of all its samples before each forward pass"
            )
        if tuple(x.shape[1:]) == self._shape:
            return
        if self.store is not None:
            raise ValueError(
                f"a sample's activation has shape {tuple(x.shape[1:])}, and messages are kept of {self._shape}: "
                "pad samples to one length"
            )
        self._shape = tuple(x.shape[1:])
        numel, ranks = torch.Size(self._shape).numel(), self.transport.world_size
        if numel < ranks:
            raise ValueError(f"a sample's activation of shape {self._shape} cannot be shared by {ranks} ranks")
        grain = _GRAIN if numel >= _GRAIN * ranks else 1
        self._cuts = list(pairwise([numel * rank // ranks // grain * grain for rank in range(ranks)] + [numel]))
        self._share = max(end - start for start, end in self._cuts)
        if self._keeps:
            parts = (Part(1, numel, False), Part(1, numel, False), Part(1, self._share, False))
            form = RecordFormat(parts, site=self._name)
            self.store = self._place.open(form, self._name, run=1)
            if self._loaded:
                self.store.load_state_dict(self._loaded)
                self._loaded = {}

    def _layout(self, cut: tuple[int, int], rows: Rows, known: Sequence[bool], what: str) -> MessageLayout:
        crossing = BoundaryTensors((Spec((len(rows.samples), cut[1] - cut[0]), torch.float32),))
        return MessageLayout.build(crossing, rows, known, fitted(self._coder, crossing), site=f"{self._name} {what}")

    def _scatter(self, changes: Sequence[Tensor], layouts: Sequence[MessageLayout], part: Tensor) -> Tensor:
        """Send every rank its share of this rank's changes, and add up those received. ``part`` becomes what the others
        know of this rank's."""
        rank, ranks = self.transport.rank, self.transport.world_size
        messages = [self._encoded(own, layouts[peer], rank, _PARTS) for peer, own in enumerate(changes)]
        for (start, end), layout, message in zip(self._cuts, layouts, messages, strict=True):
            part[:, start:end] += self._decoded(message, layout, rank, _PARTS)
        arriving = [torch.empty_like(messages[rank]) for _ in range(ranks)]
        arriving[rank] = messages[rank]
        self._exchange(dict(enumerate(messages)), dict(enumerate(arriving)))
        total = torch.zeros_like(changes[rank])
        for source, message in enumerate(arriving):  # in the same order for every share
            total += self._decoded(message, layouts[rank], source, _PARTS)
        return total

    def _gather(self, own: Tensor, layouts: Sequence[MessageLayout]) -> list[Tensor]:
        """Send this rank's share of the sum to all others, and return all shares as received."""
        rank = self.transport.rank
        messages = [torch.empty(layout.num_bytes, dtype=torch.uint8, device="cpu") for layout in layouts]
        messages[rank] = self._encoded(own, layouts[rank], rank, _SUM)
        self._exchange(dict.fromkeys(range(len(layouts)), messages[rank]), dict(enumerate(messages)))
        return [self._decoded(message, layouts[source], source, _SUM) for source, message in enumerate(messages)]

    def _exchange(self, leaving: Mapping[int, Tensor], arriving: Mapping[int, Tensor]) -> None:
        transport = self.transport
        tag = transport.new_tag(1)
        if transport.detector is not None:
            transport.detector.advance()
        peers = [peer for peer in leaving if peer != transport.rank]
        pending = [transport.receive(arriving[peer], peer, tag) for peer in peers]
        pending += [transport.send(leaving[peer], peer, tag) for peer in peers]
        for one in pending:
            one.wait()
        self.stats.forward_sent_bytes += sum(leaving[peer].numel() for peer in peers)
        self.stats.received_bytes += sum(arriving[peer].numel() for peer in peers)

    def _encoded(self, values: Tensor, layout: MessageLayout, rank: int, phase: int) -> Tensor:
        message = torch.zeros(layout.num_bytes, dtype=torch.uint8, device="cpu")
        flat = values.contiguous().view(-1)
        layout.put_raw(flat, message)
        layout.encode(flat, message, derive_key(self._seed, self.step, rank, phase))
        seal(message, source=rank, phase=phase, step=self.step, digest=layout.digest)
        return message

    def _decoded(self, message: Tensor, layout: MessageLayout, source: int, phase: int) -> Tensor:
        if source != self.transport.rank:
            verify(message, peer=source, source=source, phase=phase, step=self.step, digest=layout.digest)
        values = layout.crossing.zeros(layout.rows)
        layout.take_raw(message, values)
        layout.decode(message, values)
        return values.view(len(layout.rows.samples), -1)

    def state_dict(self) -> dict[str, Tensor]:
        """Return tensors from which `load_state_dict` restores the records, and the step."""
        state = self._loaded if self.store is None else self.store.state_dict()
        return {"step": torch.tensor([self.step], dtype=torch.int64, device="cpu"), **state}

    def load_state_dict(self, step: int, state: Mapping[str, Tensor]) -> None:
        """Continue from a state; records are checked when the first activation shows their shape."""
        self.step = step
        self._loaded = {name: value for name, value in state.items() if name != "step"}
        if self.store is not None and self._loaded:
            self.store.load_state_dict(self._loaded)
            self._loaded = {}


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
        compressor: ``delta(...)`` of a coded compressor, or such a compressor alone, which keeps nothing and needs
            no ids.
        store: limit of the samples that are kept, ``thinwire.store.Memory(...)``; samples without room are sent whole.
        seed: the seed of stochastic rounding.
        input_layouts: see ``RowwiseParallel``.

    Raises:
        TypeError, ValueError: an option is invalid.
        DisagreementError: from ``parallelize_module``, ranks were given different options.
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
        inner_coder(self.compressor)
        self.store = Memory() if store is None else store
        check_type("store", self.store, Memory, "thinwire.store.Memory(...)")
        self.seed = seed
        self._stats = PipelineStats()
        self._sums: list[SampleSum] = []
        """The sum of each layer."""
        self._transports: dict[dist.ProcessGroup, Transport] = {}
        self._samples: tuple[int, ...] = ()
        self._taken: set[int] = set()
        """Layers that have run since the samples were set."""

    def set_sample_ids(self, ids: Ids) -> None:
        """Set the samples of the next forward pass, in their order in the batch, on every rank of the mesh the same.

        Args:
            ids: a number of 0 to 2^62 for each sample, its own in every epoch; none twice.

        Raises:
            TypeError, ValueError: these are no ids.
        """
        self._samples = Batch.from_ids(ids, None, None, ()).samples
        self._taken.clear()
        self._stats.steps += 1

    @property
    def stats(self) -> PipelineStats:
        """Totals of this rank for all layers of this style. ``dense_bytes`` are those of ring all-reduces in fp32."""
        return self._stats.holding([own.store for own in self._sums if own.store is not None])

    def state_dict(self) -> dict[str, Tensor]:
        """Return tensors from which the style of the same rank, given for the same layers, continues bit by bit."""
        return write_state(self.seed, {str(index): own.state_dict() for index, own in enumerate(self._sums)})

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state, after ``parallelize_module`` and on every rank from the one it saved.

        Raises:
            ValueError: it is damaged, or not the state of a style with as many layers, this seed and wire format.
            StoreError: from the next forward pass, its messages are not of these layers.
        """
        parts = read_state(state, self.seed, "tensor-parallel style")
        del parts[""]
        layers = {str(index) for index in range(len(self._sums))}
        if set(parts) != layers or not all("step" in own for own in parts.values()):
            raise ValueError(f"the state is of {len(parts)} layers, this style was given for {len(self._sums)}")
        steps = {index: integers(own, "step")[0] for index, own in parts.items()}
        for index, own in parts.items():
            self._sums[int(index)].load_state_dict(steps[index], own)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        group = device_mesh.get_group()
        transport = self._transports.get(group)
        if transport is None:
            transport = self._transports[group] = bare_transport(group)
        index = len(self._sums)
        record = {
            "wire format": str(FORMAT_VERSION),
            "layer": str(index),
            "compressor": str(self.compressor),
            "seed": str(self.seed),
            **{f"store {name}": str(value) for name, value in self.store.facts().items()},
        }
        agree(record, transport)
        seed = group_seed(self.seed, tuple(dist.get_process_group_ranks(group)))
        own = SampleSum(transport, self.compressor, self.store, name=f"layer{index}", seed=seed, stats=self._stats)
        self._sums.append(own)
        module.register_forward_hook(partial(self._sum, index))
        return module

    def _sum(self, index: int, module: nn.Module, _: Any, part: Tensor) -> Tensor:
        """Return the sum of which a layer's output is a part: the layer's forward hook."""
        own = self._sums[index]
        if not (module.training and torch.is_grad_enabled()):
            total = part.detach().to("cpu", copy=True)
            own.transport.all_reduce(total)
            return total.to(part.device)
        try:
            samples = self._take_samples(index) if isinstance(self.compressor, Delta) else range(part.shape[0])
            total = _Summed.apply(part, own, samples)
        except Exception as error:
            report(error, own.transport)
            raise
        assert isinstance(total, Tensor)
        return total

    def _take_samples(self, index: int) -> Sequence[int]:
        if not self._samples or index in self._taken:
            raise ValueError(
                "no sample ids: call set_sample_ids(ids) of the style before each forward pass of training, with the "
                "ids of all samples of the batch. A layer cannot be run twice for the same ids, as activation "
                "checkpointing does"
            )
        self._taken.add(index)
        return self._samples

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.compressor)!r}, input_layouts={self.input_layouts})"


class _Summed(torch.autograd.Function):
    """The gradient of the sum is that of every part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, own: SampleSum, samples: Sequence[int]) -> Tensor:
        return own(part, samples).to(part.device, part.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None, None
