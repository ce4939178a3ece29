"""The stages of one rank in a pipeline: their agreement on each step, and the messages that they exchange."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives import CommunicationError, PeerFailedError, Pending, Transport, TransportError
from thinwire.compat import stage_tensors
from thinwire.integrations.transports import bare_transport
from thinwire.kernels import power_of_two
from thinwire.pipeline.boundary import UNSEEN, BoundarySide
from thinwire.pipeline.links import choose
from thinwire.pipeline.message import Batch, Direction, ScheduleStep, chunk_sizes
from thinwire.runtime import agree
from thinwire.threads import Worker

if TYPE_CHECKING:
    from thinwire.pipeline.stage import CompressedStage

_FIRST_ROOM = 1024
"""Bytes of the first announcement; later ones have as many as the last one took."""
_SIZE_BYTES = 8
_MOST_BYTES = 1 << 28
"""Largest size of an announcement."""
_MISSING = -(2**63)
AHEAD = 2
"""Micro-batches that are decoded ahead of the stage: more would double the memory of GPipe's receives."""
_FAILURE_TIMEOUT = timedelta(seconds=2)
"""Time that a stage that fails waits for its neighbors to receive that: its own error must not be late."""

_forming: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[Pipeline]] = weakref.WeakKeyDictionary()
"""Last pipeline of each process group: other stages of this rank may join it in its first step."""


class Arrivals:
    """The receives of one step at one side of a boundary.

    A worker's thread waits for them in the order of micro-batches, and decodes each while the stage computes. If a
    schedule works on another micro-batch first, the training's thread waits for that message and decodes it itself:
    the worker's message may be sent only after that.

    Args:
        receives: the pending receive of each micro-batch.
        decode: decodes the message of a micro-batch.
        expected: messages that the worker waits for, in its order, from the beginning. `expect` adds to them: the
            group's timeout counts from when a message is waited for.
    """

    def __init__(self, receives: Sequence[Pending], decode: Callable[[int], list[Tensor]], *, expected: int) -> None:
        self._receives, self._decode, self._expected = receives, decode, expected
        self.worker = Worker("thinwire arrivals")
        self._jobs: dict[int, Future[list[Tensor]]] = {}
        """Micro-batches that the worker was given and that were not taken."""
        self._given = 0
        self._begun: set[int] = set()
        """Micro-batches that a thread waits for, or has decoded."""
        self._taken: set[int] = set()
        self._end: BaseException | None = None
        """Error after which nothing is decoded."""
        self._choosing, self._decoding = threading.Lock(), threading.Lock()
        self._give()

    @property
    def complete(self) -> bool:
        """Whether all micro-batches were taken."""
        return len(self._taken) == len(self._receives)

    def expect(self) -> None:
        """Wait for one more message."""
        self._expected += 1
        self._give()

    def take(self, chunk: int) -> list[Tensor]:
        """Return the tensors of a micro-batch, once they are received. They are taken once.

        Raises:
            TransportError: the message was not received.
            PeerFailedError, MessageError: the message is not the expected one.
        """
        self._taken.add(chunk)
        job = self._jobs.pop(chunk, None)
        self._give()
        # Messages are decoded in the order of the sender, which keeps in that order: this thread goes first only where
        # the worker waits for an earlier message that the schedule has not asked for yet.
        if job is None or (min(self._jobs, default=chunk) < chunk and self._begin(chunk)):
            return self._receive(chunk)
        return job.result()

    def stop(self) -> None:
        """Decode nothing from now on: the step is given up. A decoding under way is finished before this returns.

        The worker may still wait for a message. The neighbor, which gives up as well, sends a failed one in place of
        the next, so that this wait ends.
        """
        self._end = self._end or TransportError("the step was given up")
        self.worker.close()
        with self._decoding:
            pass

    def _give(self) -> None:
        """Give the worker the next micro-batches, as long as there is room for what is decoded of them."""
        while self._given < min(self._expected, len(self._receives)) and len(self._jobs) < AHEAD:
            chunk, self._given = self._given, self._given + 1
            if chunk not in self._taken:
                self._jobs[chunk] = self.worker.submit(partial(self._work, chunk))
        if self._given == len(self._receives):
            self.worker.close()

    def _work(self, chunk: int) -> list[Tensor]:
        return self._receive(chunk) if self._begin(chunk) else []

    def _begin(self, chunk: int) -> bool:
        """Whether the calling thread is the first that turns to a micro-batch."""
        with self._choosing:
            first = chunk not in self._begun
            self._begun.add(chunk)
            return first

    def _receive(self, chunk: int) -> list[Tensor]:
        try:
            if self._end is None:
                self._receives[chunk].wait()
            with self._decoding, torch.no_grad():
                if self._end is not None:
                    raise self._end
                return self._decode(chunk)
        except BaseException as error:
            self._end = error
            raise


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
            PeerFailedError: another rank failed before its first step.
            TransportError: another rank did not join in time, or is gone.
        """
        # The group is the pipeline's own: messages of others in the user's group may have the same tags.
        try:
            self.transport = bare_transport(group)
        except TransportError as error:
            error.add_note("Ranks meet in the first step of new stages: make new stages on all ranks, or on none.")
            raise
        self.closed = False
        self.worker = Worker("thinwire pipeline")
        """Worker that compresses and sends messages, loads and saves records, while the training's thread computes.

        Nothing else touches the stores during a step: a record that is loaded ahead and one that is saved behind cannot
        meet. The order of the jobs is that of the calls, so that both sides of a boundary, and a run that is resumed,
        do the same. No job waits for another rank, so that `Worker.wait` ends.
        """
        self.ranks = dist.get_process_group_ranks(group)
        self._number = 0
        self._timed = 0
        self._compared = False
        self._room = _FIRST_ROOM
        self._present: dict[int, CompressedStage] = {}
        """Stages that are about to begin a step; none are kept alive afterwards."""
        self._sides: list[BoundarySide] = []
        """Sides of the step under way."""
        self._stage_ranks: Mapping[int, int] = {}
        """Rank, in the pipeline's group, of each stage."""
        self._num_chunks = 0
        self._tag = 0
        self._arrivals: dict[tuple[int, Direction], Arrivals] = {}
        """Receives of this step, by boundary and direction."""
        self._leaving: list[Pending] = []
        """Messages of this step that are being sent."""
        self._abandoned: list[object] = []

    @staticmethod
    def note(stage: CompressedStage) -> Pipeline:
        """Note a stage that is about to begin a step. Called for all of a rank, before the first one moves.

        The first call meets the other ranks, before PyTorch's own first messages: those would fail without a cause
        where another rank cannot take the step.

        Returns:
            The pipeline of the stage. Stages of a rank that begin their first step together have the same.
        """
        group = stage.group or dist.group.WORLD
        assert group is not None, "a stage was made, so there is a process group"
        pipeline = stage.pipeline
        if pipeline is None or pipeline.closed:
            forming = _forming.get(group)
            pipeline = None if forming is None else forming()
            if pipeline is None or not pipeline._may_join(stage):
                pipeline = Pipeline(group)
                _forming[group] = weakref.ref(pipeline)
        pipeline._present[stage.stage_index] = stage
        return pipeline

    def _may_join(self, stage: CompressedStage) -> bool:
        return not self.closed and not self._number and bool(self._present) and stage.stage_index not in self._present

    def begin(self, first_micro_batch: int | None = None) -> None:
        """Agree on the step with all ranks. The first stage that moves calls it; for the others it does nothing.

        ``first_micro_batch`` is its number of samples, if it is known here.

        Raises:
            ValueError, TypeError, StoreError: this rank, or the first stage's, cannot take the step.
            PeerFailedError: another rank cannot.
            DisagreementError: ranks have different options.
        """
        if not self._present:
            return
        stages = [self._present[index] for index in sorted(self._present)]
        self._present = {}
        with stages[0].totals.timed("agree"):
            if not self._number:
                self._agree_on_options(stages)
            step = self._announced(stages[0], first_micro_batch)
            self._number += 1
            self._num_chunks, self._stage_ranks = stages[0].num_chunks, stages[0].stage_index_to_group_rank
            # Messages of a step that was abandoned have other tags.
            self._tag = self.transport.new_tag(max(1, 2 * (stages[0].num_stages - 1) * self._num_chunks))
            if step.error:
                raise ValueError(f"the first stage cannot take this step: {step.error}")
            adapt = stages[0].options.adapt
            if step.training and adapt is not None and stages[0].choices.is_due(adapt, step.training_step, self._timed):
                self.rest()
                choose(stages, self.transport, step.training_step)
            self._set_up(stages, step)
        self._timed += step.training
        for side in self._sides:
            self._post_receives(side)
        for stage in stages:
            stage.training_step += step.training
            stage.totals.steps += step.training
            stage.totals.evaluations += not step.training

    def attribute(self, error: PeerFailedError) -> PeerFailedError:
        """Return ``error`` with the rank that was the first to fail."""
        detector = self.transport.detector
        return error if detector is None else detector.attribute(error)

    def send(self, side: BoundarySide, chunk: int, tensors: Sequence[Tensor]) -> None:
        """Compress the tensors of a micro-batch and send them, in the worker's thread. `settle` waits for that.

        Raises:
            ValueError: they are not of the shapes that the other side expects.
        """
        side.prepare(chunk, tensors)
        message, tag = side.message(side.outward, chunk), self._message_tag(side, side.outward, chunk)
        ready = None
        if side.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(side.device))

        def start() -> None:
            self._leaving.append(self.transport.send(message, self._peer(side), tag))

        side.jobs.append(self.worker.submit(lambda: side.pack(chunk, tensors, message, start, ready)))
        side.sent.add(chunk)
        if (side.boundary, "backward") in self._arrivals and side.earlier:
            self._arrivals[side.boundary, "backward"].expect()
        # Gradients tell a stage that its activations were received. Messages without an answer must be sent before the
        # step ends, after which the training may.
        if len(side.sent) == self._num_chunks and not (side.earlier and side.crosses("backward")):
            self.settle()

    def take(self, boundary: int, direction: Direction, chunk: int) -> list[Tensor] | None:
        """Return a micro-batch's tensors that cross a boundary to this rank; None where nothing does. See
        `Arrivals.take`."""
        arrivals = self._arrivals.get((boundary, direction))
        return None if arrivals is None else arrivals.take(chunk)

    def check(self, *, wait: bool = False) -> None:
        """Raise the error of the worker's thread so far, or, with ``wait``, once all its jobs are done."""
        for job in self._jobs:
            if wait or job.done():
                job.result()

    @property
    def _jobs(self) -> list[Future[None]]:
        return [job for side in self._sides for job in side.jobs]

    def failure(self) -> BaseException | None:
        """Wait for the worker's thread, and return its first error, or None."""
        self.worker.wait()
        return next((error for error in (job.exception() for job in self._jobs) if error is not None), None)

    def settle(self) -> None:
        """Wait until all records are saved and all messages of this step are sent.

        Raises:
            TransportError: a message could not be sent.
            StoreError: a record could not be saved.
        """
        error = self.failure()
        leaving, self._leaving = self._leaving, []
        if error is not None:
            for side in self._sides:
                side.forget_jobs()
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
            for side in self._sides:
                side.renew_messages()
        self._arrivals = {}
        self.worker.wait()

    def close(self) -> None:
        """Close the connections to the other ranks. The next step of a stage, on all ranks, makes new ones."""
        self.rest()
        if not self.closed:
            self.closed = True
            self.worker.close()
            if self.transport.detector is not None:
                self.transport.detector.close(RuntimeError("the pipeline's stages were closed there"))
            self.transport.close()

    def give_up(self) -> None:
        """Send the neighbors' stages a failed message in place of the next one: they raise, and do the same."""
        self.rest()
        sends: list[dist.Work] = []
        for side in self._sides:
            left = next((chunk for chunk in range(self._num_chunks) if chunk not in side.sent), None)
            if left is None or not side.crosses(side.outward):
                continue
            message = side.message(side.outward, left).clone()
            side.seal(left, message, failed=True)
            self._abandoned.append(message)
            # `Transport.send` would look for the rank that is to blame if this fails.
            with suppress(RuntimeError):
                tag = self._message_tag(side, side.outward, left)
                sends.append(self.transport.group.send([message], self._peer(side), tag))
        for work in sends:
            # Otherwise the process might end before the messages are sent. A neighbor that is alive has posted the
            # receive; one that is gone does not need it.
            with suppress(RuntimeError):
                work.wait(_FAILURE_TIMEOUT)
        # Messages whose receive nobody waits for may be under way for long: others must not use their memory.
        self._abandoned += self._leaving
        self._leaving = []
        for side in self._sides:
            side.forget_jobs()
            side.renew_messages()
        self._sides = []

    def _peer(self, side: BoundarySide) -> int:
        """Return the rank, in the pipeline's group, on the other side of a boundary."""
        return self._stage_ranks[side.boundary + side.earlier]

    def _message_tag(self, side: BoundarySide, direction: Direction, chunk: int) -> int:
        return self._tag + (2 * side.boundary + (direction == "backward")) * self._num_chunks + chunk

    def _post_receives(self, side: BoundarySide) -> None:
        """Post the receives of a whole step at one side, and begin to wait for them."""
        direction = side.inward
        if not side.crosses(direction):
            return
        messages = [side.message(direction, chunk) for chunk in range(self._num_chunks)]
        peer = self.ranks[self._peer(side)]

        def decode(chunk: int) -> list[Tensor]:
            return side.unpack(chunk, messages[chunk], peer)

        receives = [
            self.transport.receive(message, self._peer(side), self._message_tag(side, direction, chunk))
            for chunk, message in enumerate(messages)
        ]
        # A gradient cannot be received before the activation is sent.
        expected = 0 if side.earlier else self._num_chunks
        self._arrivals[side.boundary, direction] = Arrivals(receives, decode, expected=expected)

    def _agree_on_options(self, stages: list[CompressedStage]) -> None:
        records = [stage.options.record(stage.num_stages) for stage in stages]
        for stage, record in zip(stages, records, strict=True):
            if record != records[0]:
                raise ValueError(
                    f"stage {stage.stage_index} was given other options than stage {stages[0].stage_index}"
                )
        agree(records[0], self.transport)

    def _announced(self, stage: CompressedStage, first_micro_batch: int | None) -> ScheduleStep:
        """Return the step that the first stage's rank is about to take, as it announces it: the size, then JSON."""
        data = b""
        if stage.is_first:
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

    def _prepared(self, stage: CompressedStage, first_micro_batch: int | None) -> ScheduleStep:
        step = ScheduleStep(self._number, stage.training_step, stage.has_backward, stage.run)
        try:
            keeps = stage.has_backward and stage.options.keeps
            if keeps and not stage.run:
                step = replace(step, run=stage.existing_run() or int.from_bytes(os.urandom(6), "little") + 1)
            batch = stage.take_batch()
            if batch is None and keeps:
                raise ValueError(
                    "no sample ids: call stage.set_sample_ids(ids) on the first stage before each schedule.step(), "
                    "with the ids of all samples of the batch in their order"
                )
            _check_first(stage, batch, first_micro_batch)
            return replace(step, batch=batch)
        except Exception as error:  # noqa: BLE001 - sent to all ranks, which raise it together
            return replace(step, error=f"{error}" or type(error).__name__)

    def _set_up(self, stages: list[CompressedStage], step: ScheduleStep) -> None:
        keeps = step.training and stages[0].options.keeps
        views: dict[int, list[int]] = {}
        error: Exception | None = None
        try:
            self.rest()
            self.settle()
            self._check(stages, step)
            for stage in stages:
                stage.set_up(step, self)
            self._sides = [side for stage in stages for side in stage.sides]
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

    def _views(self, stages: list[CompressedStage], step: ScheduleStep) -> dict[int, list[int]]:
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

    def _check(self, stages: list[CompressedStage], step: ScheduleStep) -> None:
        for stage in stages:
            mine = (self._number - 1, stage.training_step, stage.has_backward)
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
            own = None if stage.is_first else stage.take_batch()
            if own is not None and step.batch is not None and own.samples != step.batch.samples:
                pairs = enumerate(zip(own.samples, step.batch.samples, strict=False))
                at, (here, there) = next(((i, p) for i, p in pairs if p[0] != p[1]), (-1, (0, 0)))
                what = f"sample {at} is {here} here and {there} there" if at >= 0 else "their numbers differ"
                raise ValueError(f"stage {stage.stage_index} was given other sample ids than the first stage: {what}")

    def _compare(
        self, step: ScheduleStep, batch: Batch, num_stages: int, views: Mapping[int, list[int]], error: Exception | None
    ) -> list[list[bool]]:
        """Return whether both sides keep the same message of a sample, by boundary and sample.

        Each side gives a number and its negative: the largest of both cancel only where the two sides' are equal.
        """
        count = len(batch.samples)
        table = torch.full((num_stages - 1, 2, count), _MISSING, dtype=torch.int64, device="cpu")
        for boundary, values in views.items():
            view = torch.tensor(values, dtype=torch.int64, device="cpu")
            table[boundary] = torch.stack([view, torch.where(view == UNSEEN, view, -view)])
        words = torch.cat([torch.tensor([int(error is not None)], dtype=torch.int64, device="cpu"), table.view(-1)])
        if error is not None:
            report(error, self.transport)
        self.transport.all_reduce(words, op="max")
        if error is not None:
            raise error
        if int(words[0]):
            text = f"another rank of the pipeline cannot take step {step.training_step}; its own error is in its log"
            raise self.attribute(PeerFailedError(text))
        high, low = words[1:].view(num_stages - 1, 2, count).unbind(1)
        return ((high != UNSEEN) & (high == -low)).tolist()


def report(error: BaseException, transport: Transport) -> None:
    """Tell the other ranks, which will get a `PeerFailedError`, what went wrong on this one."""
    if transport.detector is not None and not isinstance(error, CommunicationError):
        transport.detector.report(error)


def _check_first(stage: CompressedStage, batch: Batch | None, num_samples: int | None) -> None:
    """Raise unless the first micro-batch has the number of samples that all ranks assume."""
    if num_samples is None:
        return
    if batch is None:
        shapes = stage_tensors(stage)["inputs"]
        expected, known = (shapes[0][0][0] if shapes and shapes[0][0] else num_samples), "as the pipeline was set up"
    else:
        if len(batch.samples) < stage.num_chunks:
            raise ValueError(f"{len(batch.samples)} samples do not fill {stage.num_chunks} micro-batches")
        expected = chunk_sizes(len(batch.samples), stage.num_chunks)[0]
        known = f"by the {len(batch.samples)} ids given"
    if num_samples != expected:
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
