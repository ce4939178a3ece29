"""The stages of one rank in a pipeline, and the agreement of all ranks before each step."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist

from thinwire.collectives import CommunicationError, FailureDetector, ForeignGroupTransport, PeerFailedError
from thinwire.collectives.transport import Failing
from thinwire.compat import group_timeout
from thinwire.integrations.transports import bare_transport, detector_of, failing_before_meeting
from thinwire.kernels import power_of_two
from thinwire.pipeline.boundary import UNSEEN, BoundarySide
from thinwire.pipeline.boundary_tensors import chunk_sizes
from thinwire.pipeline.links import choose
from thinwire.pipeline.schedule_step import Batch, ScheduleStep
from thinwire.pipeline.stage_compression import StageCompression
from thinwire.runtime import agree
from thinwire.threads import Worker

_FIRST_ROOM = 1024
"""Bytes of the first announcement, which grow with those that come."""
_SIZE_BYTES = 8
_MOST_BYTES = 1 << 28
"""Largest size of an announcement."""
_MISSING = -(2**63)

_stage_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, StageGroup] = weakref.WeakKeyDictionary()


def stage_group_of(group: dist.ProcessGroup | None) -> StageGroup:
    """The `StageGroup` of a process group on this rank; it is made at the first call. The stages of one rank take part
    in each step's agreement together, and the process group is all that they have in common."""
    group = group or dist.group.WORLD
    assert group is not None, "a stage was made, so there is a process group"
    if group not in _stage_groups:
        _stage_groups[group] = StageGroup(group)
    return _stage_groups[group]


class StageGroup:
    """The stages of this rank in one pipeline group.

    Before the first micro-batch of a step, the first stage's rank broadcasts the samples; then, if messages are kept,
    one all-reduce of a few words for each sample shows both sides of each boundary which samples they keep alike. If a
    rank cannot go on, all raise.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        # Not held: it is the key under which this is found.
        self._group = weakref.ref(group)
        self.beside = Worker("thinwire pipeline")
        """Compresses and sends messages, loads and saves records, while the training's thread computes.

        Nothing else touches the stores during a step: a record that is loaded ahead and one that is saved behind cannot
        meet. The order of the jobs is that of the calls, so that both sides of a boundary, and a run that is resumed,
        do the same. No job waits for another rank, so that `Worker.wait` ends.
        """
        self.step = 0
        self.run = 0
        self._number = 0
        self._timed = 0
        self._moving: list[weakref.ref[StageCompression]] = []
        self._agreed: dict[str, str] | None = None
        self._compared = False
        self._present: dict[int, StageCompression] = {}
        self._due = False
        self.detector: FailureDetector | None = None
        self._room = _FIRST_ROOM

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise RuntimeError("the pipeline's process group is gone: it was destroyed before its last step")
        return group

    def note(self, stage: StageCompression) -> None:
        """Called by each stage that is about to begin a step: by all stages of a rank, before the first one moves.

        The first call meets the other ranks, before PyTorch's own first messages: those would fail without a cause
        where another rank cannot take the step.

        Raises:
            PeerFailedError: Another rank failed before its first step.
            TransportError: Another rank did not come in time, or is gone.
        """
        if self.detector is None:
            self.detector = detector_of(self.group, group_timeout(self.group))
        if not self._due:
            self._due, self._present = True, {}
        self._present[stage.index] = stage

    def begin(self, first_micro_batch: int | None = None) -> None:
        """Agree on the step with all ranks. The first stage that moves calls it; for the others it does nothing.

        ``first_micro_batch`` is its number of samples, if it is known here.

        Raises:
            ValueError, TypeError, StoreError: This rank, or the first stage's, cannot take the step.
            PeerFailedError: Another rank cannot.
            DisagreementError: Ranks have different options.
        """
        if not self._due:
            return
        self._due = False
        stages = [self._present[index] for index in sorted(self._present)]
        self._present = {}  # the stage group lives as long as its process group, and must not keep models alive
        if self.detector is not None:
            self.detector.advance()
        with stages[0].stats.timed("agree"):
            self._agree_on_options(stages)
            step = self._announce(stages, first_micro_batch)
            self._number += 1
            if step.error:
                raise ValueError(f"the first stage cannot take this step: {step.error}")
            if step.training:
                self._choose(stages, step)
            self._set_up(stages, step)
        self.step += step.training
        self._timed += step.training
        self._moving = [weakref.ref(stage) for stage in stages]
        for stage in stages:
            with self.failing("posting receives"):
                stage.post_receives(step, self.failing)
            stage.stats.steps += step.training
            stage.stats.evaluations += not step.training

    def failing_where_given(self) -> AbstractContextManager[None]:
        """A context in which an error ends the other ranks' first step, too, where they have not met yet. Later, they
        learn of an error that ends this rank's program, and of none that it goes on after."""
        return failing_before_meeting(self.group) if self.detector is None else nullcontext()

    def failing(self, doing: str, peer: int | None = None) -> Failing:
        """A context in which a failure of communication, with ``peer`` in the group, becomes a `TransportError`."""
        return Failing(doing, group_timeout(self.group), peer, self.detector)

    def report(self, error: BaseException) -> None:
        """Tell the other ranks, which will get a `PeerFailedError`, what went wrong on this one."""
        if self.detector is not None and not isinstance(error, CommunicationError):
            self.detector.report(error)

    def attribute(self, error: PeerFailedError) -> PeerFailedError:
        """``error`` with the rank that was the first to fail."""
        return error if self.detector is None else self.detector.attribute(error)

    def give_up(self) -> None:
        """Send failed messages to all neighbours of this rank's stages, so that none waits for this step."""
        moving, self._moving = self._moving, []
        for stage in (reference() for reference in moving):
            if stage is not None:
                stage.give_up()

    def _choose(self, stages: list[StageCompression], step: ScheduleStep) -> None:
        """Choose compressors by link, if that is due: all ranks count alike."""
        adapt = stages[0].options.adapt
        if adapt is None or not stages[0].choices.due(
            step.training_step, self._timed, after=adapt.after, every=adapt.every
        ):
            return
        # Not over the pipeline's group, in which messages of others may be under way.
        with closing(bare_transport(self.group, group_timeout(self.group))) as transport:
            choose(stages, transport, step.training_step)

    def _agree_on_options(self, stages: list[StageCompression]) -> None:
        records = [stage.options.record(stage.num_stages) for stage in stages]
        for stage, record in zip(stages, records, strict=True):
            if record != records[0]:
                raise ValueError(f"stage {stage.index} was given other options than stage {stages[0].index}")
        if self._agreed != records[0]:
            agree(records[0], ForeignGroupTransport(self.group, group_timeout(self.group), detector=self.detector))
            self._agreed = records[0]

    def _announce(self, stages: list[StageCompression], first_micro_batch: int | None) -> ScheduleStep:
        """The step that the first stage's rank is about to take, which it broadcasts: its size, then JSON."""
        root, data = stages[0].root, b""
        if stages[0].index == 0:
            text = self._prepare(stages[0], first_micro_batch).to_json()
            data = len(text).to_bytes(_SIZE_BYTES, "little") + text
        received = self._broadcast(data, self._room, root)
        total = _SIZE_BYTES + int.from_bytes(received[:_SIZE_BYTES], "little")
        if total > _MOST_BYTES:
            raise ValueError(f"the first stage's rank announced a step of {total} bytes, which cannot be")
        if total > self._room:
            received += self._broadcast(data[self._room :], total - self._room, root)
        self._room = power_of_two(total)
        return ScheduleStep.from_json(received[_SIZE_BYTES:total])

    def _broadcast(self, data: bytes, size: int, root: int) -> bytes:
        """The first ``size`` bytes of the root's data."""
        buffer = torch.frombuffer(bytearray(data[:size].ljust(size, b"\0")), dtype=torch.uint8)
        with self.failing("the broadcast of the samples", root):
            dist.broadcast(buffer, group=self.group, group_src=root)
        return buffer.numpy().tobytes()

    def _prepare(self, stage: StageCompression, first_micro_batch: int | None) -> ScheduleStep:
        step = ScheduleStep(self._number, self.step, stage.training, self.run)
        try:
            if stage.training and stage.options.keeps and not self.run:
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
        error: Exception | None = None
        try:
            for stage in stages:
                stage.rest()
                stage.settle()
            self._check(stages, step)
            for stage in stages:
                stage.set_up(step)
        except Exception as problem:  # noqa: BLE001 - raised once the others know
            error = problem
        if not (step.training and stages[0].options.keeps):
            if error is not None:
                raise error
            return
        assert step.batch is not None, "the first stage's rank checked"
        self.run = self.run or step.run
        sides = [side for stage in stages for side in stage.sides if side.keeps]
        views: dict[int, list[int]] = {}
        if error is None:
            error = self._view_stores(stages, sides, step, step.batch, views)
        same = self._compare(step.batch, stages[0].num_stages, views, error)
        for side in sides:
            side.decide_encodings(step.batch.samples, same[side.boundary])
            assert side.store is not None
            side.store.prefetch(step.batch.upcoming)

    def _view_stores(
        self,
        stages: list[StageCompression],
        sides: list[BoundarySide],
        step: ScheduleStep,
        batch: Batch,
        views: dict[int, list[int]],
    ) -> Exception | None:
        """Fill ``views`` with what this rank's stores keep of the batch. Returns the error if that fails."""
        try:
            for stage in stages:
                stage.open_stores(step.run)
            compare = step.training_step % stages[0].options.check_every == 0 or not self._compared
            self._compared = True
            for side in sides:
                _check_lengths(side, batch)
                assert side.store is not None
                side.store.check_corners(batch.corners)
                views[side.boundary] = side.local_view(batch.samples, compare=compare)
        except Exception as error:  # noqa: BLE001 - raised once the others know
            return error
        return None

    def _check(self, stages: list[StageCompression], step: ScheduleStep) -> None:
        mine = (self._number - 1, self.step, stages[0].training)
        if mine != (step.number, step.training_step, step.training):
            raise ValueError(
                f"this rank is at run {mine[0]}, step {mine[1]} of its schedule (training: {mine[2]}), the first "
                f"stage's at run {step.number}, step {step.training_step} ({step.training}): load the same checkpoint "
                "on all ranks, and run the same schedule"
            )
        if self.run and step.run and self.run != step.run:
            raise ValueError(
                f"this rank's state is of run {self.run}, the first stage's of run {step.run}: load the states that "
                "were saved together"
            )
        for stage in stages:
            own = stage.take_batch() if stage.index else None
            if own is not None and step.batch is not None and own.samples != step.batch.samples:
                pairs = enumerate(zip(own.samples, step.batch.samples, strict=False))
                at, (here, there) = next(((i, p) for i, p in pairs if p[0] != p[1]), (-1, (0, 0)))
                what = f"sample {at} is {here} here and {there} there" if at >= 0 else "their numbers differ"
                raise ValueError(f"stage {stage.index} was given other sample ids than the first stage: {what}")

    def _compare(
        self, batch: Batch, num_stages: int, views: Mapping[int, list[int]], error: Exception | None
    ) -> list[list[bool]]:
        """By boundary and sample, whether both sides keep the same message of it.

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
        with self.failing("the comparison of messages kept"):
            dist.all_reduce(words, op=dist.ReduceOp.MAX, group=self.group)
        if error is not None:
            raise error
        if int(words[0]):
            text = f"another rank of the pipeline cannot take step {self.step}; its own error is in its log"
            raise self.attribute(PeerFailedError(text))
        high, low = words[1:].view(num_stages - 1, 2, count).unbind(1)
        return ((high != UNSEEN) & (high == -low)).tolist()


def _new_run() -> int:
    return int.from_bytes(os.urandom(6), "little") + 1


def _check_first(stage: StageCompression, batch: Batch | None, num_samples: int | None) -> None:
    """Raise unless the first micro-batch has as many samples as all ranks will take it to have."""
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
