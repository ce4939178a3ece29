"""The stages of one rank in a pipeline: their agreement on each step, and the messages that they exchange."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives import CommunicationError, PeerFailedError, Pending
from thinwire.integrations.transports import bare_transport
from thinwire.kernels import power_of_two
from thinwire.pipeline.arrivals import Arrivals
from thinwire.pipeline.boundary import UNSEEN, BoundarySide
from thinwire.pipeline.links import choose
from thinwire.pipeline.message import Direction, chunk_sizes
from thinwire.pipeline.schedule_step import Batch, ScheduleStep
from thinwire.pipeline.stage_compression import StageCompression
from thinwire.runtime import agree, group_seed
from thinwire.threads import Worker

_FIRST_ROOM = 1024
"""Bytes of the first announcement; later ones have as many as the last one took."""
_SIZE_BYTES = 8
_MOST_BYTES = 1 << 28
"""Largest size of an announcement."""
_MISSING = -(2**63)
_FAILURE_TIMEOUT = timedelta(seconds=2)
"""Time that a stage that fails waits for its neighbors to receive that: its own error must not be late."""

_forming: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[Pipeline]] = weakref.WeakKeyDictionary()
"""Last pipeline of each process group: other stages of this rank may join it in its first step."""


class Pipeline:
    """The stages of this rank in one pipeline: a transport, a worker's thread, and the step under way.

    Before the first micro-batch of a step, the first stage's rank announces the samples; then, if messages are kept,
    one all-reduce of a few words for each sample shows both sides of each boundary which samples they keep alike. If a
    rank cannot continue, all raise.

    Messages are compressed and sent by the worker's thread. The receives of a whole step are posted when it
    begins, and other threads wait for them.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        """All ranks of ``group`` must call this.

        Raises:
            PeerFailedError: Another rank failed before its first step.
            TransportError: Another rank did not join in time, or is gone.
        """
        # The group is the pipeline's own: messages of others in the user's group may have the same tags.
        self.transport = bare_transport(group)
        self.worker = Worker("thinwire pipeline")
        """Worker that compresses and sends messages, loads and saves records, while the training's thread computes.

        Nothing else touches the stores during a step: a record that is loaded ahead and one that is saved behind cannot
        meet. The order of the jobs is that of the calls, so that both sides of a boundary, and a run that is resumed,
        do the same. No job waits for another rank, so that `Worker.wait` ends.
        """
        self._ranks = dist.get_process_group_ranks(group)
        self._number = 0
        self._timed = 0
        self._agreed: dict[str, str] | None = None
        self._compared = False
        self._room = _FIRST_ROOM
        self._present: dict[int, StageCompression] = {}
        """Stages that are about to begin a step; none are kept alive afterwards."""
        self._sides: list[BoundarySide] = []
        """Sides of the step under way."""
        self._stage_ranks: Mapping[int, int] = {}
        """Rank, in the pipeline's group, of each stage."""
        self._num_chunks = 0
        self._tag = 0
        self._arrivals: dict[tuple[int, Direction], Arrivals] = {}
        """Receives of this step, by boundary and direction."""
        self._sends: dict[tuple[int, int], Future[None]] = {}
        """Messages of this step that were handed over to be sent, by boundary and micro-batch."""
        self._leaving: list[Pending] = []
        """Messages of this step that are being sent."""
        self._abandoned: list[object] = []

    @staticmethod
    def note(stage: StageCompression, group: dist.ProcessGroup | None) -> Pipeline:
        """Note a stage that is about to begin a step. Called for all of a rank, before the first one moves.

        The first call meets the other ranks, before PyTorch's own first messages: those would fail without a cause
        where another rank cannot take the step.

        Returns:
            The pipeline of the stage. Stages of a rank that begin their first step together have the same.
        """
        group = group or dist.group.WORLD
        assert group is not None, "a stage was made, so there is a process group"
        forming = _forming.get(group)
        pipeline = stage.pipeline or (None if forming is None else forming())
        if pipeline is None or (stage.pipeline is None and not pipeline._may_join(stage)):
            pipeline = Pipeline(group)
            _forming[group] = weakref.ref(pipeline)
        pipeline._present[stage.index] = stage
        return pipeline

    def _may_join(self, stage: StageCompression) -> bool:
        return not self._number and bool(self._present) and stage.index not in self._present

    def begin(self, first_micro_batch: int | None = None) -> None:
        """Agree on the step with all ranks. The first stage that moves calls it; for the others it does nothing.

        ``first_micro_batch`` is its number of samples, if it is known here.

        Raises:
            ValueError, TypeError, StoreError: This rank, or the first stage's, cannot take the step.
            PeerFailedError: Another rank cannot.
            DisagreementError: Ranks have different options.
        """
        if not self._present:
            return
        stages = [self._present[index] for index in sorted(self._present)]
        self._present = {}
        with stages[0].stats.timed("agree"):
            self._agree_on_options(stages)
            step = self._announced(stages[0], first_micro_batch)
            self._number += 1
            self._num_chunks, self._stage_ranks = stages[0].num_chunks, stages[0].group_ranks
            # Messages of a step that was abandoned have other tags.
            self._tag = self.transport.new_tag(max(1, 2 * (stages[0].num_stages - 1) * self._num_chunks))
            if step.error:
                raise ValueError(f"the first stage cannot take this step: {step.error}")
            if step.training:
                self._choose(stages, step)
            self._set_up(stages, step)
        self._timed += step.training
        for side in self._sides:
            self._post_receives(side)
        for stage in stages:
            stage.step += step.training
            stage.stats.steps += step.training
            stage.stats.evaluations += not step.training

    def report(self, error: BaseException) -> None:
        """Tell the other ranks, which will get a `PeerFailedError`, what went wrong on this one."""
        if self.transport.detector is not None and not isinstance(error, CommunicationError):
            self.transport.detector.report(error)

    def attribute(self, error: PeerFailedError) -> PeerFailedError:
        """Return ``error`` with the rank that was the first to fail."""
        detector = self.transport.detector
        return error if detector is None else detector.attribute(error)

    def send(self, side: BoundarySide, chunk: int, tensors: Sequence[Tensor]) -> None:
        """Compress the tensors of a micro-batch and send them, in the worker's thread. `settle` waits for that.

        Raises:
            ValueError: They are not of the shapes that the other side expects.
        """
        side.prepare(side.outward, chunk, tensors)
        message = side.message(side.outward, chunk)
        ready = None
        if any(tensor.is_cuda for tensor in tensors):
            ready = torch.cuda.Event()
            ready.record()

        def pack_and_send() -> None:
            try:
                if ready is not None:
                    ready.synchronize()
                side.pack(side.outward, chunk, tensors, message)
            except Exception:
                side.fail(side.outward, chunk, message)
                self._start(side, chunk, message)
                raise
            self._start(side, chunk, message)
            side.keep()

        self._sends[side.boundary, chunk] = self.worker.submit(pack_and_send)
        if (side.boundary, "backward") in self._arrivals and side.earlier:
            self._arrivals[side.boundary, "backward"].expect()
        # Gradients tell a stage that its activations were received. Messages without an answer must be sent before the
        # step ends, after which the training may.
        last = sum(boundary == side.boundary for boundary, _ in self._sends) == self._num_chunks
        if last and not (side.earlier and side.crosses("backward")):
            self.settle()

    def _start(self, side: BoundarySide, chunk: int, message: Tensor) -> None:
        tag = self._tag_of(side, side.outward, chunk)
        self._leaving.append(self.transport.send(message, self._peer(side), tag))

    def take(self, boundary: int, direction: Direction, chunk: int) -> list[Tensor] | None:
        """Return a micro-batch's tensors that cross a boundary to this rank, once they are received; None where nothing
        does.

        Raises:
            TransportError: The message was not received.
            PeerFailedError, MessageError: The message is not the expected one.
        """
        arrivals = self._arrivals.get((boundary, direction))
        return None if arrivals is None else arrivals.take(chunk)

    def check(self, *, wait: bool = False) -> None:
        """Raise the error of the worker's thread so far, or, with ``wait``, once all its jobs are done."""
        for job in self._jobs:
            if wait or job.done():
                job.result()

    @property
    def _jobs(self) -> list[Future[None]]:
        """Jobs that this step has handed over to the worker's thread."""
        return [*self._sends.values(), *(save for side in self._sides for save in side.saves)]

    def failure(self) -> BaseException | None:
        """Wait for the worker's thread, and return its first error, or None."""
        self.worker.wait()
        return next((error for error in (job.exception() for job in self._jobs) if error is not None), None)

    def settle(self) -> None:
        """Wait until all records are saved and all messages of this step are sent.

        Raises:
            TransportError: A message could not be sent.
            StoreError: A record could not be saved.
        """
        error = self.failure()
        leaving, self._leaving = self._leaving, []
        if error is not None:
            self._forget_jobs()
            raise error
        for pending in leaving:
            pending.wait()

    def rest(self) -> None:
        """Give up the receives that are not complete, if any, and wait until no thread works on this rank's sides."""
        unfinished = [arrivals for arrivals in self._arrivals.values() if not arrivals.complete]
        for arrivals in unfinished:
            arrivals.stop()
        if unfinished:
            # Keep the receives of an abandoned step, and their buffers, alive until they complete.
            self._abandoned += unfinished
            self._renew_messages()
        self._arrivals = {}
        self.worker.wait()

    def give_up(self) -> None:
        """Send the neighbors' stages a failed message in place of the next one: they raise, and do the same."""
        self.rest()
        sends: list[dist.Work] = []
        for side in self._sides:
            left = [chunk for chunk in range(self._num_chunks) if (side.boundary, chunk) not in self._sends]
            if not left or not side.crosses(side.outward):
                continue
            message = side.message(side.outward, left[0]).clone()
            side.fail(side.outward, left[0], message)
            self._abandoned.append(message)
            # `Transport.send` would look for the rank that is to blame if this fails.
            with suppress(RuntimeError):
                tag = self._tag_of(side, side.outward, left[0])
                sends.append(self.transport.group.send([message], self._peer(side), tag))
        for work in sends:
            # Otherwise the process might end before the messages are sent. A neighbor that is alive has posted the
            # receive; one that is gone does not need it.
            with suppress(RuntimeError):
                work.wait(_FAILURE_TIMEOUT)
        # Messages whose receive nobody waits for may be under way for long: others must not use their memory.
        self._forget_jobs()
        self._abandoned += self._leaving
        self._leaving = []
        self._renew_messages()
        self._sides = []

    def _forget_jobs(self) -> None:
        self._sends.clear()
        for side in self._sides:
            side.saves.clear()

    def _renew_messages(self) -> None:
        for side in self._sides:
            side.renew_messages()

    def _peer(self, side: BoundarySide) -> int:
        """Return the rank, in the pipeline's group, on the other side of a boundary."""
        return self._stage_ranks[side.boundary + side.earlier]

    def _tag_of(self, side: BoundarySide, direction: Direction, chunk: int) -> int:
        return self._tag + (2 * side.boundary + (direction == "backward")) * self._num_chunks + chunk

    def _post_receives(self, side: BoundarySide) -> None:
        """Post the receives of a whole step at one side, and begin to wait for them."""
        direction = side.inward
        if not side.crosses(direction):
            return
        messages = [side.message(direction, chunk) for chunk in range(self._num_chunks)]
        peer = self._ranks[self._peer(side)]

        def decode(chunk: int) -> list[Tensor]:
            into = side.room(direction, chunk)
            side.unpack(direction, chunk, messages[chunk], into, peer)
            return into

        receives = [
            self.transport.receive(message, self._peer(side), self._tag_of(side, direction, chunk))
            for chunk, message in enumerate(messages)
        ]
        # A gradient cannot be received before the activation is sent.
        expected = 0 if side.earlier else self._num_chunks
        self._arrivals[side.boundary, direction] = Arrivals(receives, decode, expected=expected)

    def _choose(self, stages: list[StageCompression], step: ScheduleStep) -> None:
        """Choose compressors by link, if that is due: all ranks count alike."""
        adapt = stages[0].options.adapt
        if adapt is not None and stages[0].choices.due(
            step.training_step, self._timed, after=adapt.after, every=adapt.every
        ):
            self.rest()
            choose(stages, self.transport, step.training_step)

    def _agree_on_options(self, stages: list[StageCompression]) -> None:
        records = [stage.options.record(stage.num_stages) for stage in stages]
        for stage, record in zip(stages, records, strict=True):
            if record != records[0]:
                raise ValueError(f"stage {stage.index} was given other options than stage {stages[0].index}")
        if self._agreed != records[0]:
            agree(records[0], self.transport)
            self._agreed = records[0]

    def _announced(self, stage: StageCompression, first_micro_batch: int | None) -> ScheduleStep:
        """Return the step that the first stage's rank is about to take, as it announces it: the size, then JSON."""
        data = b""
        if stage.index == 0:
            text = self._prepared(stage, first_micro_batch).to_json()
            data = len(text).to_bytes(_SIZE_BYTES, "little") + text
        received = self._told(data, self._room)
        total = _SIZE_BYTES + int.from_bytes(received[:_SIZE_BYTES], "little")
        if total > _MOST_BYTES:
            raise ValueError(f"the first stage's rank announced a step of {total} bytes, which cannot be")
        if total > self._room:
            received += self._told(data[self._room :], total - self._room)
        self._room = power_of_two(total)
        return ScheduleStep.from_json(received[_SIZE_BYTES:total])

    def _told(self, data: bytes, size: int) -> bytes:
        """Return the first ``size`` bytes of the only rank's data that has any."""
        buffer = torch.frombuffer(bytearray(data[:size].ljust(size, b"\0")), dtype=torch.uint8)
        self.transport.all_reduce(buffer, op="max")
        return buffer.numpy().tobytes()

    def _prepared(self, stage: StageCompression, first_micro_batch: int | None) -> ScheduleStep:
        step = ScheduleStep(self._number, stage.step, stage.training, stage.run)
        try:
            if stage.training and stage.options.keeps and not stage.run:
                step = replace(step, run=stage.existing_run() or _new_run())
            batch = stage.take_batch()
            if batch is None and stage.training and stage.options.keeps:
                raise ValueError(
                    "no sample ids: call stage.set_sample_ids(ids) on the first stage before each schedule.step(), "
                    "with the ids of all samples of the batch in their order"
                )
            _check_first(stage, batch, first_micro_batch)
            return replace(step, batch=batch)
        except Exception as error:  # noqa: BLE001 - sent to all ranks, which raise it together
            return replace(step, error=f"{error}" or type(error).__name__)

    def _set_up(self, stages: list[StageCompression], step: ScheduleStep) -> None:
        keeps = step.training and stages[0].options.keeps
        views: dict[int, list[int]] = {}
        error: Exception | None = None
        try:
            self.rest()
            self.settle()
            self._check(stages, step)
            for stage in stages:
                stage.set_up(step, self.worker, group_seed(stage.options.seed, tuple(self._ranks)))
            self._sides = [side for stage in stages for side in stage.sides]
            self._forget_jobs()
            if keeps:
                views = self._views(stages, step)
        except Exception as problem:
            if not keeps:
                raise
            error = problem  # raised once the others know
        if not keeps:
            return
        assert step.batch is not None, "the first stage's rank checked"
        same = self._compare(step, step.batch, stages[0].num_stages, views, error)
        for side in self._sides:
            if side.store is not None:
                side.decide_encodings(step.batch.samples, same[side.boundary])
                side.store.prefetch(step.batch.upcoming)

    def _views(self, stages: list[StageCompression], step: ScheduleStep) -> dict[int, list[int]]:
        """Return the fingerprints of the batch's samples in this rank's stores, by boundary."""
        batch, views = step.batch, {}
        assert batch is not None, "the first stage's rank checked"
        for stage in stages:
            stage.run = stage.run or step.run
            stage.open_stores()
        compare = step.training_step % stages[0].options.check_every == 0 or not self._compared
        self._compared = True
        for side in self._sides:
            if side.store is not None:
                _check_lengths(side, batch)
                side.store.check_corners(batch.corners)
                views[side.boundary] = side.local_view(batch.samples, compare=compare)
        return views

    def _check(self, stages: list[StageCompression], step: ScheduleStep) -> None:
        for stage in stages:
            mine = (self._number - 1, stage.step, stage.training)
            if mine != (step.number, step.training_step, step.training):
                raise ValueError(
                    f"this rank is at run {mine[0]}, step {mine[1]} of its schedule (training: {mine[2]}), the first "
                    f"stage's at run {step.number}, step {step.training_step} ({step.training}): load the same "
                    "checkpoint on all ranks, and run the same schedule"
                )
            if stage.run and step.run and stage.run != step.run:
                raise ValueError(
                    f"this rank's state is of run {stage.run}, the first stage's of run {step.run}: load the states "
                    "that were saved together"
                )
            own = stage.take_batch() if stage.index else None
            if own is not None and step.batch is not None and own.samples != step.batch.samples:
                pairs = enumerate(zip(own.samples, step.batch.samples, strict=False))
                at, (here, there) = next(((i, p) for i, p in pairs if p[0] != p[1]), (-1, (0, 0)))
                what = f"sample {at} is {here} here and {there} there" if at >= 0 else "their numbers differ"
                raise ValueError(f"stage {stage.index} was given other sample ids than the first stage: {what}")

    def _compare(
        self, step: ScheduleStep, batch: Batch, num_stages: int, views: Mapping[int, list[int]], error: Exception | None
    ) -> list[list[bool]]:
        """Return whether both sides keep the same message of a sample, by boundary and sample.

        Each side gives a number and its negative: the largest of both cancel only where the two sides' are equal.
        """
        count = len(batch.samples)
        table = torch.full((num_stages - 1, 2, count), _MISSING, dtype=torch.int64, device="cpu")
        for boundary, view in views.items():
            table[boundary, 0] = torch.tensor(view, dtype=torch.int64, device="cpu")
            table[boundary, 1] = torch.tensor(
                [value if value == UNSEEN else -value for value in view], dtype=torch.int64, device="cpu"
            )
        words = torch.cat([torch.tensor([int(error is not None)], dtype=torch.int64, device="cpu"), table.view(-1)])
        if error is not None:
            self.report(error)
        self.transport.all_reduce(words, op="max")
        if error is not None:
            raise error
        if int(words[0]):
            text = f"another rank of the pipeline cannot take step {step.training_step}; its own error is in its log"
            raise self.attribute(PeerFailedError(text))
        high, low = words[1:].view(num_stages - 1, 2, count).unbind(1)
        return ((high != UNSEEN) & (high == -low)).tolist()


def _new_run() -> int:
    return int.from_bytes(os.urandom(6), "little") + 1


def _check_first(stage: StageCompression, batch: Batch | None, num_samples: int | None) -> None:
    """Raise unless the first micro-batch has the number of samples that all ranks assume."""
    if num_samples is None:
        return
    expected = stage.first_size if batch is None else chunk_sizes(len(batch.samples), stage.num_chunks)[0]
    if batch is not None and len(batch.samples) < stage.num_chunks:
        raise ValueError(f"{len(batch.samples)} samples do not fill {stage.num_chunks} micro-batches")
    if expected is not None and num_samples != expected:
        known = "as the pipeline was set up" if batch is None else f"by the {len(batch.samples)} ids given"
        raise ValueError(
            f"the first micro-batch has {num_samples} samples, not {expected} {known}: call set_sample_ids() with the "
            "ids of all samples of the batch before schedule.step() or eval()"
        )


def _check_lengths(side: BoundarySide, batch: Batch) -> None:
    assert side.store is not None
    longest = max(batch.lengths) if batch.lengths else (batch.length or 0)
    if longest > side.store.form.length and any(part.grows for part in side.store.form.parts):
        raise ValueError(
            f"the batch has samples of {longest} positions, and messages are kept of {side.store.form.length}: pass "
            "max_length= to the stages"
        )
