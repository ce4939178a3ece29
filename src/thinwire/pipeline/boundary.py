"""One side of one stage boundary: the messages that it sends and receives, and the records m(ξ) that it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.collectives.message import HEADER_BYTES, MessageError, seal, verify
from thinwire.compressors import Coded
from thinwire.kernels import derive_key
from thinwire.pipeline.message import BoundaryTensors, Direction, Encoding, MessageLayout
from thinwire.pipeline.options import PipelineOptions, fitted
from thinwire.pipeline.schedule_step import ScheduleStep
from thinwire.pipeline.stats import PipelineStats
from thinwire.store import RecordFormat, Rows, Store
from thinwire.threads import Worker

_DRAWS = {"forward": 1, "backward": 2, "evaluation": 4}
UNSEEN = 2**63 - 1
_AHEAD = 2
"""Number of micro-batches whose messages m(ξ) are loaded before they are needed."""


class _Change(NamedTuple):
    """The data from which a message of changes was made."""

    layout: MessageLayout
    message: Tensor
    m: Tensor
    """Messages m(ξ) of the samples, as both sides had them."""
    values: Tensor
    """Activations of the samples."""
    change: Tensor
    choices: Tensor | None


class BoundarySide:
    """The earlier or the later stage's side of the boundary behind stage ``boundary``.

    Messages of a step go through it in the order of the schedule. The two sides agree beforehand on how each sample
    is sent (`decide_encodings`), so that either knows the size of every message.

    ``worker`` is the thread that loads and saves records, and that calls `pack` and `keep`. `unpack` is called in the
    thread of this side's `Arrivals`. All other calls are the training's, those between two steps with nothing left in
    either.
    """

    def __init__(
        self, boundary: int, earlier: bool, options: PipelineOptions, stats: PipelineStats, worker: Worker
    ) -> None:
        self._worker = worker
        self._loads: dict[int, Future[Tensor]] = {}
        self.saves: list[Future[None]] = []
        """Records of this step that are being saved."""
        self.boundary = boundary
        self.earlier = earlier
        self.options = options
        self.seed = options.seed
        """Seed of the random draws, another one in each replica of a pipeline."""
        self.stats = stats
        self.store: Store | None = None
        self._crossings: dict[Direction, BoundaryTensors] = {}
        self.chosen: dict[Direction, int] = {}
        self._fitted: dict[Direction, tuple[BoundaryTensors, int | None]] = {}
        self._coders: dict[tuple[Direction, bool], tuple[Coded, ...]] = {}
        self._kinds: dict[int, Encoding] = {}
        self._warm: frozenset[int] = frozenset()
        self._refused: frozenset[int] = frozenset()
        self._visits: dict[int, int] = {}
        """Number of times that both sides have seen each of the step's samples; 0 if it is sent whole."""
        self._kept: frozenset[int] = frozenset()
        """Samples of the step of which this side keeps something."""
        self._buffers: dict[tuple[Direction, int], Tensor] = {}
        self._layouts: dict[tuple[Direction, int], MessageLayout] = {}
        self._scratch_tensors: dict[str, Tensor] = {}
        self._packed: _Change | None = None
        """Changes in the last message, until they are kept."""
        self._step: ScheduleStep | None = None
        self._num_chunks = 1

    @property
    def outward(self) -> Direction:
        """Direction of the messages that this side sends."""
        return "forward" if self.earlier else "backward"

    @property
    def inward(self) -> Direction:
        """Direction of the messages that this side receives."""
        return "backward" if self.earlier else "forward"

    @property
    def keeps(self) -> bool:
        """Whether messages are kept at this boundary."""
        return self.options.keeps_at(self.boundary)

    @property
    def name(self) -> str:
        return f"boundary{self.boundary}-{'earlier' if self.earlier else 'later'}"

    def set_up(
        self, step: ScheduleStep, num_chunks: int, forward: BoundaryTensors, backward: BoundaryTensors | None
    ) -> None:
        """Prepare for a step in which these tensors cross the boundary, as the schedule has set it up."""
        self._step, self._num_chunks = step, num_chunks
        self._layouts.clear()
        self._loads.clear()
        self.saves.clear()
        both: list[tuple[Direction, BoundaryTensors | None]] = [("forward", forward), ("backward", backward)]
        for direction, crossing in both:
            choice = self.chosen.get(direction)
            if crossing is None or self._fitted.get(direction) == (crossing, choice):
                continue
            self._crossings[direction] = crossing
            self._coders[direction, True] = fitted(self.options.coder_at(self.boundary, direction, choice), crossing)
            self._fitted[direction] = crossing, choice
            if direction == "forward":
                self._coders[direction, False] = fitted(self.options.evaluation_coder, crossing)

    def crosses(self, direction: Direction) -> bool:
        """Whether anything crosses the boundary in a direction in this step. No gradients go back to a stage whose
        output needs none, such as a frozen first stage: PyTorch tells both sides so when it sets the pipeline up."""
        assert self._step is not None, "a step has begun"
        return (direction == "forward" or self._step.training) and bool(self._crossings[direction].specs)

    def choice_bytes(self, direction: Direction) -> list[int]:
        """Return the bytes of a micro-batch's message with all samples compressed, for each choice of compressor."""
        crossing = self._crossings[direction]
        parts, num_bytes = crossing.parts(crossing.length), []
        for choice in range(len(self.options.choices(direction))):
            coders = fitted(self.options.coder_at(self.boundary, direction, choice), crossing)
            sizes = (
                coder.payload_bytes(part.at(crossing.length), crossing.dtype)
                for coder, part in zip(coders, parts, strict=True)
            )
            num_bytes.append(HEADER_BYTES + crossing.batch * sum(sizes))
        return num_bytes

    def record_format(self) -> RecordFormat:
        """Return the format of this boundary's records: of samples of ``max_length`` positions, or as long as now."""
        crossing = self._crossings["forward"]
        parts = crossing.parts(self.options.max_length or crossing.length)
        half = "float16" if crossing.dtype == torch.float16 else "bfloat16"
        return RecordFormat(parts, self.options.precision, half, f"boundary{self.boundary}")

    def local_view(self, samples: Sequence[int], *, compare: bool) -> list[int]:
        """Return a fingerprint for each sample, which both sides of the boundary compare; `UNSEEN` if nothing is kept.
        With ``compare`` it covers the record itself."""
        assert self.store is not None
        with self.stats.timed("store"):
            damaged = self.store.verify(samples)
            self.stats.add(corrupt=len(damaged), resets=len(damaged))
            self._visits = {sample: self.store.visits(sample) for sample in samples}
            views = {sample: self.store.view(sample, compare=compare) for sample in samples}
            self._kept = frozenset(sample for sample, view in views.items() if view is not None)
            return [UNSEEN if view is None else view >> 2 for view in views.values()]

    def decide_encodings(self, samples: Sequence[int], same: Sequence[bool]) -> None:
        """Decide the encoding of each sample.

        Args:
            samples: All samples of the step.
            same: For each of them, whether both sides keep the same message of it.
        """
        assert self.store is not None
        agreed = {sample: self._visits[sample] if alike else 0 for sample, alike in zip(samples, same, strict=True)}
        differing = [s for s, alike in zip(samples, same, strict=True) if not alike and s in self._kept]
        self.store.reset(differing)
        self.stats.add(resets=len(differing))
        self._visits = agreed
        self._refused = self.store.admit(samples)
        warmup = self.options.warmup_epochs
        # Nobody counts the visits of a sample without room in the store, so that its warm-up would never end.
        self._warm = frozenset(
            sample for sample, visits in agreed.items() if sample not in self._refused and visits < warmup
        )
        self._kinds = {
            sample: Encoding.CODED if visits and sample not in self._warm else Encoding.RAW
            for sample, visits in agreed.items()
        }
        for chunk in range(_AHEAD):
            self._load_ahead(chunk)

    def message(self, direction: Direction, chunk: int) -> Tensor:
        """Return the buffer of a micro-batch's message (uint8), the same memory in every step of the same size."""
        num_bytes = self.layout(direction, chunk).num_bytes
        buffer = self._buffers.get((direction, chunk))
        if buffer is None or buffer.numel() != num_bytes:
            buffer = self._buffers[direction, chunk] = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")
        return buffer

    def renew_messages(self) -> None:
        """Allocate other buffers from now on."""
        self._buffers.clear()

    def layout(self, direction: Direction, chunk: int) -> MessageLayout:
        """Return the layout of a micro-batch's message."""
        layout = self._layouts.get((direction, chunk))
        if layout is None:
            layout = self._layouts[direction, chunk] = self._layout(direction, chunk)
        return layout

    def _layout(self, direction: Direction, chunk: int) -> MessageLayout:
        step, crossing, rows = self._present(direction, chunk)
        site = f"boundary{self.boundary}"
        if not step.training:
            kinds = [Encoding.CODED] * len(rows.samples)
            return MessageLayout.build(crossing, rows, kinds, self._coders[direction, False], site=site)
        if self.store is None:
            kinds = [Encoding.CODED] * len(rows.samples)
        elif direction == "forward":
            kinds = [self._kinds[sample] for sample in rows.samples]
        else:
            kinds = [Encoding.RAW if sample in self._warm else Encoding.CODED for sample in rows.samples]
        chooses = self.store is not None and self.store.chooses and direction == "forward"
        return MessageLayout.build(crossing, rows, kinds, self._coders[direction, True], chooses=chooses, site=site)

    def room(self, direction: Direction, chunk: int) -> list[Tensor]:
        """Return tensors, on the host, for those of a micro-batch."""
        _, crossing, rows = self._present(direction, chunk)
        shapes = crossing.shapes(len(rows.samples), rows.padded)
        return [
            torch.empty(shape, dtype=spec.dtype, device="cpu")
            for shape, spec in zip(shapes, crossing.specs, strict=True)
        ]

    def _present(self, direction: Direction, chunk: int) -> tuple[ScheduleStep, BoundaryTensors, Rows]:
        assert self._step is not None, "a step has begun"
        forward, crossing = self._crossings["forward"], self._crossings[direction]
        return self._step, crossing, self._step.rows(chunk, self._num_chunks, forward.batch, forward.length)

    def prepare(self, direction: Direction, chunk: int, tensors: Sequence[Tensor]) -> None:
        """Check the tensors of a micro-batch, which `pack` is to get in the worker's thread, and make that load what
        comes after them.

        Raises:
            ValueError: They are not of the shapes that the other side expects.
        """
        _, crossing, rows = self._present(direction, chunk)
        what = "a stage's output" if direction == "forward" else "the gradient of a stage's input"
        crossing.check(tensors, len(rows.samples), rows.padded, what)
        if direction == "forward":
            self._load_ahead(chunk + _AHEAD)

    def pack(self, direction: Direction, chunk: int, tensors: Sequence[Tensor], message: Tensor) -> None:
        """Write the message of a micro-batch's tensors, which were checked. `keep` must follow, once it is sent."""
        step, crossing, rows = self._present(direction, chunk)
        layout, self._packed = self.layout(direction, chunk), None
        with self.stats.timed("encode"):
            flat = crossing.flatten(tensors, rows)
            layout.put_others(tensors, message)
            if direction == "forward" and step.training and self.store is not None:
                self._packed = self._pack_change(flat, layout, chunk, message)
            else:
                layout.put_raw(flat, message)
                layout.encode(flat, message, self._key(direction if step.training else "evaluation"))
            self._seal(layout, direction, chunk, message)
        dense_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.stats.add(**{"dense_bytes": dense_bytes, f"{direction}_sent_bytes": message.numel()})

    def keep(self) -> None:
        """Keep what the other side will keep of the message that was packed last."""
        packed, self._packed = self._packed, None
        if packed is None:
            return
        layout, message, m, values, change, choices = packed
        with self.stats.timed("store"):
            layout.decode(message, m, add=True)
            self._note(values, change, layout)
            self._save(*self._renew(m, values, layout), layout, choices)

    def fail(self, direction: Direction, chunk: int, message: Tensor) -> None:
        """Write a message that is marked as failed, in place of the one that the other side expects."""
        self._seal(self.layout(direction, chunk), direction, chunk, message, failed=True)

    def unpack(self, direction: Direction, chunk: int, message: Tensor, into: Sequence[Tensor], peer: int) -> None:
        """Decode the message from rank ``peer`` into tensors, and keep what the other side keeps.

        Raises:
            PeerFailedError: The other side could not make the message.
            MessageError: The message is damaged, or not the one that is expected.
        """
        step, crossing, rows = self._present(direction, chunk)
        layout = self.layout(direction, chunk)
        verify(message, peer=peer, **self._header(layout, direction, chunk, sent=False))
        if message.numel() != layout.num_bytes:  # a checksum does not miss zeros at the end
            raise MessageError(f"rank {peer} sent {message.numel()} bytes, where {layout.num_bytes} are expected")
        self.stats.add(received_bytes=message.numel())
        with self.stats.timed("decode"):
            flat = torch.zeros(_numel(crossing, rows), dtype=crossing.dtype, device="cpu")
            layout.take_raw(message, flat)
            if direction == "forward" and step.training and self.store is not None:
                flat = self._unpack_change(flat, layout, chunk, message)
            else:
                layout.decode(message, flat)
            layout.take_others(message, into)
            for values, i in zip(crossing.unflatten(flat, rows), crossing.floats, strict=True):
                into[i].copy_(values.view(into[i].shape))

    def _pack_change(self, flat: Tensor, layout: MessageLayout, chunk: int, message: Tensor) -> _Change:
        assert self.store is not None
        values, choices = flat.float(), None
        if layout.chosen is not None:
            choices = self.store.choose(values, layout.rows)
            layout.put_choices(choices, message)
        m = self._loaded(chunk, layout, choices)
        change = torch.sub(values, m, out=self._scratch("change", values))
        layout.put_raw(flat, message)
        layout.encode(change, message, self._key("forward"))
        return _Change(layout, message, m, values, change, choices)

    def _unpack_change(self, whole: Tensor, layout: MessageLayout, chunk: int, message: Tensor) -> Tensor:
        self._load_ahead(chunk + _AHEAD)
        choices = layout.take_choices(message)
        m = self._loaded(chunk, layout, choices)
        layout.decode(message, m, add=True)
        kept, records = self._renew(m, whole.float(), layout)
        self.saves.append(self._worker.submit(lambda: self._timed_save(kept, records, layout, choices)))
        return m  # The next stage computes on m(ξ) before it is rounded for the store.

    def _load_ahead(self, chunk: int) -> None:
        # `pack` of an earlier micro-batch is submitted later: it would otherwise wait for the loads behind it.
        assert self._step is not None
        if self.store is None or self.store.chooses:
            return
        if self._step.training and chunk < self._num_chunks:
            self._loads[chunk] = self._worker.submit(lambda: self._load(self.layout("forward", chunk), None))

    def _loaded(self, chunk: int, layout: MessageLayout, choices: Tensor | None) -> Tensor:
        """Return m(ξ) of the micro-batch's samples, which was loaded ahead unless the sender chooses it."""
        ahead = self._loads.pop(chunk, None)
        return self._load(layout, choices) if ahead is None else ahead.result()

    def _load(self, layout: MessageLayout, choices: Tensor | None) -> Tensor:
        """Return m(ξ) of the micro-batch's samples; zero where nothing is kept."""
        assert self.store is not None
        coded, rows = layout.rows_sent_as(Encoding.CODED), layout.rows
        with self.stats.timed("store"):
            if len(coded) == len(rows.samples) and coded:
                return self.store.load(rows, choices)
            m = torch.zeros(_numel(layout.crossing, rows), dtype=torch.float32, device="cpu")
            if coded:
                records = self.store.load(_some(rows, coded), None if choices is None else choices[coded])
                m.view(len(rows.samples), -1)[coded] = records.view(len(coded), -1)
            return m

    def _renew(self, m: Tensor, values: Tensor, layout: MessageLayout) -> tuple[Tensor, Tensor]:
        """Return the micro-batch's new m(ξ) as it is kept, and its records; ``m`` becomes m(ξ) before it is rounded.

        ``values`` are the samples that were sent raw. Both sides have the same, and make the same records of them.
        """
        assert self.store is not None
        rows, form = layout.rows, self.store.form
        raw = layout.rows_sent_as(Encoding.RAW)
        m.view(len(rows.samples), -1)[raw] = values.view(len(rows.samples), -1)[raw]
        records = form.encode(m, rows)
        return (m if form.precision == 32 else form.decode(records, rows.lengths, rows)), records

    def _timed_save(self, kept: Tensor, records: Tensor, layout: MessageLayout, choices: Tensor | None) -> None:
        with self.stats.timed("store"):
            self._save(kept, records, layout, choices)

    def _save(self, kept: Tensor, records: Tensor, layout: MessageLayout, choices: Tensor | None) -> None:
        """Save the micro-batch's new m(ξ), of values ``kept``. A sample with NaN or Inf in its message is not kept: it
        counts as unseen."""
        assert self.store is not None
        assert self._step is not None
        rows = layout.rows
        finite = [_is_finite(row) for row in kept.view(len(rows.samples), -1)]
        keep = [i for i, sample in enumerate(rows.samples) if finite[i] and sample not in self._refused]
        for i, sample in enumerate(rows.samples):
            if not finite[i]:
                self.stats.add(nonfinite=1)
                self.store.forget(sample)
        if len(keep) < len(rows.samples):
            records, choices = records[keep], None if choices is None else choices[keep]
        self.store.save(records, _some(rows, keep), self._step.training_step, choices)

    def _note(self, values: Tensor, change: Tensor, layout: MessageLayout) -> None:
        """Count the magnitudes of activations and of their changes (AQ-SGD, Figure 1b)."""
        rows = layout.rows
        if not rows.samples:
            return
        room = self._scratch("magnitudes", values)
        table = [torch.abs(x, out=room).view(len(rows.samples), -1).sum(1).tolist() for x in (values, change)]
        for i, sample in enumerate(rows.samples):
            visits = self._visits[sample]
            numel = sum(part.at(rows.lengths[i]) for part in layout.crossing.parts(rows.padded))
            moved = table[1][i] if layout.kinds[i] is Encoding.CODED else 0.0
            self.stats.note(visits, [table[0][i]], [moved], numel)

    def _scratch(self, name: str, like: Tensor) -> Tensor:
        """Return memory of the shape of ``like``, kept from call to call: fresh pages cost more than the encoding."""
        scratch = self._scratch_tensors.get(name)
        if scratch is None or scratch.shape != like.shape:
            scratch = self._scratch_tensors[name] = torch.empty_like(like, memory_format=torch.contiguous_format)
        return scratch

    def _key(self, draws: str) -> int:
        assert self._step is not None
        return derive_key(self.seed, self._step.training_step, self.boundary, _DRAWS[draws])

    def _header(self, layout: MessageLayout, direction: Direction, chunk: int, *, sent: bool) -> dict[str, int]:
        """Return the header's fields: ``source`` made the message, ``phase`` is its number among those of the step."""
        assert self._step is not None
        mine = self.boundary if self.earlier else self.boundary + 1
        other = self.boundary + 1 if self.earlier else self.boundary
        phase = 2 * chunk + (direction == "backward")
        digest = derive_key(layout.digest, self.boundary, self._step.training)
        return {"source": mine if sent else other, "phase": phase, "step": self._step.number, "digest": digest}

    def _seal(
        self, layout: MessageLayout, direction: Direction, chunk: int, message: Tensor, *, failed: bool = False
    ) -> None:
        assert message.numel() >= HEADER_BYTES
        seal(message, failed=failed, divided=False, **self._header(layout, direction, chunk, sent=True))


def _is_finite(row: Tensor) -> bool:
    # A finite sum has finite terms, and takes a fifth of the time; finite terms may have a sum that is not.
    return bool(torch.isfinite(row.sum())) or bool(torch.isfinite(row).all())


def _numel(crossing: BoundaryTensors, rows: Rows) -> int:
    return len(rows.samples) * sum(part.at(rows.padded) for part in crossing.parts(rows.padded))


def _some(rows: Rows, which: Sequence[int]) -> Rows:
    samples, lengths = tuple(rows.samples[i] for i in which), tuple(rows.lengths[i] for i in which)
    return Rows(samples, lengths, rows.padded, tuple(rows.corners[i] for i in which) if rows.corners else ())
