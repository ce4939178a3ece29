"""One side of one stage boundary: the messages that it sends and receives, and the records m(ξ) that it keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import torch
from torch import Tensor

from thinwire.collectives.message import HEADER_BYTES, seal, verify
from thinwire.compressors import Coded
from thinwire.kernels import derive_key, to_device
from thinwire.pipeline.message import BoundaryTensors, Direction, MessageLayout, ScheduleStep
from thinwire.pipeline.options import PipelineOptions, fitted
from thinwire.pipeline.stats import PipelineStats
from thinwire.store import RecordFormat, Rows, Store
from thinwire.threads import Worker

_DRAWS = {"forward": 1, "backward": 2, "evaluation": 4}
UNSEEN = 2**63 - 1
_AHEAD = 2
"""Number of micro-batches whose messages m(ξ) are loaded before they are needed."""


class BoundarySide:
    """The earlier or the later stage's side of the boundary behind stage ``boundary``.

    Messages of a step go through it in the order of the schedule. The two sides agree beforehand on how each sample
    is sent (`decide_encodings`), so that either knows the size of every message.

    Activations are encoded and decoded on ``device``, and messages are on the host. A store is on the host, too: it
    renews m(ξ) from the message there, so that of what ``device`` computed nothing but messages is copied to the host.

    ``worker`` is the thread that loads and saves records, and that calls `pack`. `unpack` is called in the thread that
    waits for messages. All other calls are the training's, those between two steps with nothing left in either.
    """

    def __init__(
        self,
        boundary: int,
        earlier: bool,
        options: PipelineOptions,
        stats: PipelineStats,
        seed: int,
        device: torch.device,
    ) -> None:
        self.boundary = boundary
        self.device = device
        self.earlier = earlier
        self.outward: Direction = "forward" if earlier else "backward"
        """Direction of the messages that this side sends."""
        self.inward: Direction = "backward" if earlier else "forward"
        """Direction of the messages that this side receives."""
        self.name = f"boundary{boundary}-{'earlier' if earlier else 'later'}"
        self.options = options
        self.keeps = options.keeps_at(boundary)
        """Whether messages are kept at this boundary."""
        self.stats = stats
        self.store: Store | None = None
        self.sent: set[int] = set()
        """Micro-batches of this step whose messages the worker was given to send."""
        self.jobs: list[Future[None]] = []
        """Jobs of the worker in this step: messages to send, and records to save."""
        self._seed = seed
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._loads: dict[int, Future[Tensor]] = {}
        self._crossings: dict[Direction, BoundaryTensors] = {}
        self._coders: dict[tuple[Direction, bool], tuple[Coded, ...]] = {}
        self._coded: dict[int, bool] = {}
        self._warm: frozenset[int] = frozenset()
        self._visits: dict[int, int] = {}
        """Number of times that both sides have seen each of the step's samples; 0 if it is sent whole."""
        self._kept: frozenset[int] = frozenset()
        """Samples of the step of which this side keeps something."""
        self._buffers: dict[tuple[Direction, int], Tensor] = {}
        self._layouts: dict[tuple[Direction, int], MessageLayout] = {}
        self._scratch_tensors: dict[str, Tensor] = {}

    def set_up(
        self,
        step: ScheduleStep,
        num_chunks: int,
        worker: Worker,
        crossings: dict[Direction, BoundaryTensors],
        chosen: dict[Direction, int],
    ) -> None:
        """Prepare for a step in which these tensors cross the boundary, as the schedule has set it up. ``chosen`` are
        the compressors that were chosen by link."""
        self._step, self._num_chunks, self._worker = step, num_chunks, worker
        self._layouts.clear()
        self._loads.clear()
        self.forget_jobs()
        for direction, crossing in crossings.items():
            self._crossings[direction] = crossing
            coder = self.options.coder_at(self.boundary, direction, chosen.get(direction))
            self._coders[direction, True] = fitted(coder, crossing)
            if direction == "forward":
                self._coders[direction, False] = fitted(self.options.evaluation_coder, crossing)

    def crosses(self, direction: Direction) -> bool:
        """Whether anything crosses the boundary in a direction in this step. No gradients go back to a stage whose
        output needs none, such as a frozen first stage: PyTorch tells both sides so when it sets the pipeline up."""
        return (direction == "forward" or self._step.training) and bool(self._crossings[direction].specs)

    def choice_bytes(self, direction: Direction) -> list[int]:
        """Return the bytes of a micro-batch's message with all samples compressed, for each choice of compressor."""
        crossing = self._crossings[direction]
        numels, num_bytes = [part.at(crossing.length) for part in crossing.parts(crossing.length)], []
        for choice in range(len(self.options.choices(direction))):
            coders = fitted(self.options.coder_at(self.boundary, direction, choice), crossing)
            sizes = (coder.payload_bytes(n, crossing.dtype) for coder, n in zip(coders, numels, strict=True))
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
        """Decide which samples of the step are sent compressed. Both sides keep the same of those that are ``same``."""
        assert self.store is not None
        differing = [s for s, alike in zip(samples, same, strict=True) if not alike and s in self._kept]
        self.store.reset(differing)
        self.stats.add(resets=len(differing))
        self._visits = {s: self._visits[s] if alike else 0 for s, alike in zip(samples, same, strict=True)}
        self.store.admit(samples)
        # Nobody counts the visits of a sample without room in the store, so that its warm-up would never end.
        few = (sample for sample, visits in self._visits.items() if visits < self.options.warmup_epochs)
        self._warm = frozenset(few) - self.store.refused
        self._coded = {sample: bool(visits) and sample not in self._warm for sample, visits in self._visits.items()}
        for chunk in range(_AHEAD):
            self._load_ahead(chunk)

    def message(self, direction: Direction, chunk: int) -> Tensor:
        """Return the buffer of a micro-batch's message (uint8), the same memory in every step of the same size."""
        num_bytes = self.layout(direction, chunk).num_bytes
        buffer = self._buffers.get((direction, chunk))
        if buffer is None or buffer.numel() != num_bytes:
            pin = self.device.type == "cuda"
            buffer = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=pin)
            self._buffers[direction, chunk] = buffer
        return buffer

    def forget_jobs(self) -> None:
        """Forget what the worker was given in this step."""
        self.sent.clear()
        self.jobs.clear()

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
        training, crossing, rows = self._step.training, self._crossings[direction], self._rows(chunk)
        coded = [True] * len(rows.samples)
        if training and self.store is not None:
            sent = self._coded if direction == "forward" else {s: s not in self._warm for s in rows.samples}
            coded = [sent[sample] for sample in rows.samples]
        chooses = training and self.store is not None and self.store.chooses and direction == "forward"
        coders, site = self._coders[direction, training], f"boundary{self.boundary}"
        return MessageLayout.build(crossing, rows, coded, coders, chooses=chooses, site=site)

    def _rows(self, chunk: int) -> Rows:
        crossing = self._crossings["forward"]
        return self._step.rows(chunk, self._num_chunks, crossing.batch, crossing.length)

    def prepare(self, chunk: int, tensors: Sequence[Tensor]) -> None:
        """Check the tensors of a micro-batch, which `pack` is to get in the worker's thread, and make that load what
        comes after them.

        Raises:
            ValueError: they are not of the shapes that the other side expects.
        """
        what = "a stage's output" if self.earlier else "the gradient of a stage's input"
        self._crossings[self.outward].check(tensors, self._rows(chunk), what)
        if self.earlier:
            self._load_ahead(chunk + _AHEAD)

    def pack(
        self,
        chunk: int,
        tensors: Sequence[Tensor],
        message: Tensor,
        send: Callable[[], None],
        ready: torch.cuda.Event | None = None,
    ) -> None:
        """Write the message of a micro-batch's tensors, which are computed after the event ``ready``, call ``send``,
        and keep what the other side will keep. If the message cannot be made, one that is marked as failed is sent."""
        direction, layout, crossing = self.outward, self.layout(self.outward, chunk), self._crossings[self.outward]
        m = change = choices = None
        try:
            if ready is not None:
                ready.synchronize()
            with self.stats.timed("encode"):
                with self._on_device():
                    flat = crossing.flatten(tensors, layout.rows, self.device)
                    # Compressors leave gaps, which nothing of an earlier message may fill.
                    there = (
                        message.zero_() if self.device.type == "cpu" else torch.zeros_like(message, device=self.device)
                    )
                    layout.put_others(tensors, there)
                    layout.put_raw(flat, there)
                    if direction == "forward" and self._step.training and self.store is not None:
                        flat = flat.float()
                        if layout.chosen is not None:
                            choices = self.store.choose(flat, layout.rows)
                        m = self._loaded(chunk, layout, choices)
                        change = torch.sub(flat, to_device(m, self.device), out=self._scratch("change", flat))
                    draws = direction if self._step.training else "evaluation"
                    key = derive_key(self._seed, self._step.training_step, self.boundary, _DRAWS[draws])
                    layout.encode(flat if change is None else change, there, key)
                    if there is not message:
                        message.copy_(there, non_blocking=True)
                if choices is not None:
                    layout.put_choices(choices, message)
                self.seal(chunk, message)
        except Exception:
            self.seal(chunk, message, failed=True)
            send()
            raise
        dense_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.stats.add(**{"dense_bytes": dense_bytes, f"{direction}_sent_bytes": message.numel()})
        send()
        if m is not None and change is not None:
            with self._on_device():
                self._note(flat, change, layout)
            self._renew(m, message, layout)
            self._keep(m, layout, choices)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Run the body's work on a stream of the device's own, and wait for that, but not for what the training has
        enqueued on its stream."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream), torch.autocast("cuda", enabled=False):
            try:
                yield
            finally:
                self._stream.synchronize()

    def unpack(self, chunk: int, message: Tensor, peer: int) -> list[Tensor]:
        """Return the tensors in the message from rank ``peer``, and keep what the other side keeps.

        Raises:
            PeerFailedError: the other side could not make the message.
            MessageError: the message is damaged, or not the one that is expected.
        """
        layout, crossing = self.layout(self.inward, chunk), self._crossings[self.inward]
        verify(message, peer=peer, **self._header(self.inward, chunk))
        self.stats.add(received_bytes=message.numel())
        with self.stats.timed("decode"), self._on_device():
            if self.inward == "forward" and self._step.training and self.store is not None:
                self._load_ahead(chunk + _AHEAD)
                choices = layout.take_choices(message)
                m = self._loaded(chunk, layout, choices)
                self._renew(m, message, layout)
                # The next stage computes on m(ξ) before it is rounded for the store.
                self.jobs.append(self._worker.submit(lambda: self._keep(m, layout, choices)))
                flat = to_device(m, self.device)
            else:
                there, flat = message.to(self.device, non_blocking=True), crossing.zeros(layout.rows, self.device)
                layout.take_raw(there, flat)
                layout.decode(there, flat)
            into = crossing.empty(layout.rows, self.device)
            layout.take_others(message, into)
            crossing.unflatten(flat, layout.rows, into)
        return into

    def _load_ahead(self, chunk: int) -> None:
        # `pack` of an earlier micro-batch is submitted later: it would otherwise wait for the loads behind it.
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
        with self.stats.timed("store"):
            return self.store.load_known(layout.rows, layout.where(coded=True), choices)

    def _renew(self, m: Tensor, message: Tensor, layout: MessageLayout) -> None:
        """Make ``m`` the new m(ξ) of the micro-batch's samples, from their message alone, which both sides have."""
        layout.decode(message, m, add=True)
        if raw := layout.where(coded=False):
            whole, count = layout.crossing.zeros(layout.rows), len(layout.rows.samples)
            layout.take_raw(message, whole)
            m.view(count, -1)[raw] = whole.view(count, -1)[raw].float()

    def _keep(self, m: Tensor, layout: MessageLayout, choices: Tensor | None) -> None:
        """Keep the micro-batch's new m(ξ). A sample with NaN or Inf in its message counts as unseen."""
        assert self.store is not None
        with self.stats.timed("store"):
            form, rows = self.store.form, layout.rows
            records = form.encode(m, rows)
            kept = m if form.precision == 32 else form.decode(records, rows.lengths, rows)
            finite = [_is_finite(row) for row in kept.view(len(rows.samples), -1)]
            self.stats.add(nonfinite=self.store.keep(records, rows, self._step.training_step, finite, choices))

    def _note(self, values: Tensor, change: Tensor, layout: MessageLayout) -> None:
        """Count the magnitudes of activations and of their changes (AQ-SGD, Figure 1b)."""
        rows = layout.rows
        room = self._scratch("magnitudes", values)
        table = [torch.abs(x, out=room).view(len(rows.samples), -1).sum(1).cpu().tolist() for x in (values, change)]
        for i, sample in enumerate(rows.samples):
            numel = sum(part.at(rows.lengths[i]) for part in layout.crossing.parts(rows.padded))
            self.stats.note(self._visits[sample], table[0][i], table[1][i] if layout.coded[i] else 0.0, numel)

    def _scratch(self, name: str, like: Tensor) -> Tensor:
        """Return memory of the shape of ``like``, kept from call to call: fresh pages cost more than the encoding."""
        scratch = self._scratch_tensors.get(name)
        if scratch is None or scratch.shape != like.shape:
            scratch = self._scratch_tensors[name] = torch.empty_like(like, memory_format=torch.contiguous_format)
        return scratch

    def seal(self, chunk: int, message: Tensor, *, failed: bool = False) -> None:
        """Write the header of a message, or of one that is marked as failed in place of what the other side expects."""
        seal(message, failed=failed, divided=False, **self._header(self.outward, chunk))

    def _header(self, direction: Direction, chunk: int) -> dict[str, int]:
        """Return the header's fields: ``source`` made the message, ``phase`` is its number among those of the step."""
        source = self.boundary + (direction == "backward")
        phase = 2 * chunk + (direction == "backward")
        digest = derive_key(self.layout(direction, chunk).digest, self.boundary, self._step.training)
        return {"source": source, "phase": phase, "step": self._step.number, "digest": digest}


def _is_finite(row: Tensor) -> bool:
    # A finite sum has finite terms, and takes a fifth of the time; finite terms may have a sum that is not.
    return bool(torch.isfinite(row.sum())) or bool(torch.isfinite(row).all())
