"""The stages that one rank has in a pipeline, and what all ranks tell each other before a step."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist

from thinwire.attach.pipeline.boundary import UNSEEN, Side
from thinwire.attach.pipeline.crossing import chunk_sizes
from thinwire.attach.pipeline.links import choose
from thinwire.attach.pipeline.station import Station
from thinwire.attach.pipeline.turn import Batch, Turn
from thinwire.collectives import PeerFailedError, ProcessGroupTransport
from thinwire.compat import group_timeout
from thinwire.wire import agree

_FIRST_ROOM = 256
_UNTOLD = -(2**63)
_HEAD = 10

_crews: weakref.WeakKeyDictionary[dist.ProcessGroup, Crew] = weakref.WeakKeyDictionary()


def crew_of(group: dist.ProcessGroup | None) -> Crew:
    """That of a process group on this rank. Stages of one rank speak once a step, together, and only the group knows
    which they are."""
    group = group or dist.group.WORLD
    assert group is not None, "a stage was made, so there is a process group"
    if group not in _crews:
        _crews[group] = Crew(group)
    return _crews[group]


@dataclass
class _Told:
    """What the first stage's rank tells all others."""

    turn: Turn
    error: str = ""

    def words(self) -> list[int]:
        turn, batch = self.turn, self.turn.batch
        ids = batch or Batch(())
        lengths = ids.lengths or ()
        text = self.error.encode()[:1024]
        packed = [int.from_bytes(text[i : i + 7], "little") for i in range(0, len(text), 7)]
        absent = -1
        head = [
            len(text) if self.error else absent,
            turn.number,
            turn.step,
            int(turn.training),
            turn.run,
            len(ids.samples) if batch else absent,
            absent if ids.length is None else ids.length,
            absent if ids.lengths is None else len(lengths),
            len(ids.upcoming),
        ]
        body = packed if self.error else [*ids.samples, *lengths, *ids.upcoming]
        return [_HEAD + len(body), *head, *body]

    @staticmethod
    def of(words: list[int]) -> _Told:
        text_bytes, number, step, training, run, count, length, num_lengths, num_upcoming = words[1:_HEAD]
        turn = Turn(number, step, bool(training), run)
        if text_bytes >= 0:
            text = b"".join(word.to_bytes(7, "little") for word in words[_HEAD:])[:text_bytes]
            return _Told(turn, text.decode(errors="replace") or "unknown")
        if count < 0:
            return _Told(turn)
        ends = [_HEAD, _HEAD + count]
        ends.append(ends[-1] + max(num_lengths, 0))
        ends.append(ends[-1] + num_upcoming)
        samples, lengths, upcoming = (tuple(words[a:b]) for a, b in pairwise(ends))
        batch = Batch(samples, None if length < 0 else length, None if num_lengths < 0 else lengths, upcoming)
        return _Told(Turn(number, step, bool(training), run, batch))


class Crew:
    """The stages of this rank in one pipeline group.

    Before the first micro-batch of a step, the first stage's rank broadcasts the samples; then, if messages are kept,
    one all-reduce of a few words a sample tells both sides of each boundary which samples they keep alike. A rank that
    cannot go on says so there, and all raise.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        # Not held: it is the key under which this is found.
        self._group = weakref.ref(group)
        self.step = 0
        self.run = 0
        self._number = 0
        self._timed = 0
        self._moving: list[weakref.ref[Station]] = []
        self._agreed: dict[str, str] | None = None
        self._compared = False
        self._present: dict[int, Station] = {}
        self._due = False
        self._room = _FIRST_ROOM

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise RuntimeError("the pipeline's process group is gone: it was destroyed before its last step")
        return group

    def note(self, station: Station) -> None:
        """A stage is about to begin a step. The schedule says so for all of a rank's before the first moves."""
        if not self._due:
            self._due, self._present = True, {}
        self._present[station.index] = station

    def begin(self, first_micro_batch: int | None = None) -> None:
        """Tell each other what the step is about, once, whichever stage comes first.

        ``first_micro_batch`` is its number of samples, where the first stage has it.

        Raises:
            ValueError, TypeError, StoreError: this rank, or the first stage's, cannot take the step.
            PeerFailedError: another rank cannot.
            DisagreementError: ranks have different options.
        """
        if not self._due:
            return
        self._due = False
        stations = [self._present[index] for index in sorted(self._present)]
        self._present = {}  # the crew lives as long as its group, and must not keep models alive
        with stations[0].stats.timed("agree"):
            self._agree_on_options(stations)
            told = self._announce(stations, first_micro_batch)
            self._number += 1
            if told.error:
                raise ValueError(f"the first stage cannot take this step: {told.error}")
            if told.turn.training:
                self._choose(stations, told.turn)
            self._set_up(stations, told.turn)
        self.step += told.turn.training
        self._timed += told.turn.training
        self._moving = [weakref.ref(station) for station in stations]
        for station in stations:
            station.post_receives(told.turn)
            station.stats.steps += told.turn.training
            station.stats.evaluations += not told.turn.training

    def give_up(self) -> None:
        """Tell all neighbours of this rank's stages that this step goes no further here, so that none waits for it."""
        moving, self._moving = self._moving, []
        for station in (of() for of in moving):
            if station is not None:
                station.give_up()

    def _choose(self, stations: list[Station], turn: Turn) -> None:
        """Compressors by link, if it is time to: all ranks count alike."""
        adapt = stations[0].options.adapt
        if adapt is None or not stations[0].choices.due(turn.step, self._timed, after=adapt.after, every=adapt.every):
            return
        choose(stations, ProcessGroupTransport(self.group, group_timeout(self.group)), turn.step)

    def _agree_on_options(self, stations: list[Station]) -> None:
        records = [station.options.record(station.num_stages) for station in stations]
        for station, record in zip(stations, records, strict=True):
            if record != records[0]:
                raise ValueError(f"stage {station.index} was given other options than stage {stations[0].index}")
        if self._agreed != records[0]:
            agree(records[0], ProcessGroupTransport(self.group, group_timeout(self.group)))
            self._agreed = records[0]

    def _announce(self, stations: list[Station], first_micro_batch: int | None) -> _Told:
        root, mine = stations[0].root, stations[0].index == 0
        told = _Told(Turn(self._number, self.step, stations[0].training, self.run))
        if mine:
            told = self._prepare(stations[0], first_micro_batch)
        words = told.words() if mine else []
        buffer = torch.zeros(self._room, dtype=torch.int64)
        first = words[: self._room]
        buffer[: len(first)] = torch.tensor(first, dtype=torch.int64)
        dist.broadcast(buffer, group=self.group, group_src=root)
        total = int(buffer[0])
        if not _HEAD <= total < 1 << 28:
            raise RuntimeError(f"the first stage's rank announced a step of {total} words, which cannot be")
        received = buffer[:total].tolist()
        if total > self._room:
            rest = torch.zeros(total - self._room, dtype=torch.int64)
            if mine:
                rest.copy_(torch.tensor(words[self._room :], dtype=torch.int64))
            dist.broadcast(rest, group=self.group, group_src=root)
            received += rest.tolist()
            self._room = 1 << (total - 1).bit_length()
        return _Told.of(received)

    def _prepare(self, station: Station, first_micro_batch: int | None) -> _Told:
        turn = Turn(self._number, self.step, station.training, self.run)
        try:
            if station.training and station.options.keeps and not self.run:
                turn = Turn(turn.number, turn.step, turn.training, station.found_run() or _new_run())
            batch = station.take_batch()
            if batch is None and station.training and station.options.keeps:
                raise ValueError(
                    "no sample ids: call stage.set_sample_ids(ids) on the first stage before each schedule.step(), "
                    "with the ids of all samples of the batch in their order"
                )
            _check_first(station, batch, first_micro_batch)
            return _Told(Turn(turn.number, turn.step, turn.training, turn.run, batch))
        except Exception as error:  # noqa: BLE001 - told to all ranks, which raise it together
            return _Told(turn, f"{error}" or type(error).__name__)

    def _set_up(self, stations: list[Station], turn: Turn) -> None:
        error: Exception | None = None
        try:
            self._check(stations, turn)
            for station in stations:
                station.set_up(turn)
        except Exception as found:  # noqa: BLE001 - raised once the others know
            error = found
        if not (turn.training and stations[0].options.keeps):
            if error is not None:
                raise error
            return
        assert turn.batch is not None, "the first stage's rank checked"
        self.run = self.run or turn.run
        sides = [side for station in stations for side in station.sides if side.keeps]
        views: dict[int, list[int]] = {}
        if error is None:
            error = self._look(stations, sides, turn, turn.batch, views)
        same = self._compare(turn.batch, stations[0].num_stages, views, error)
        for side in sides:
            side.settle(turn.batch.samples, same[side.boundary])
            assert side.store is not None
            side.store.prefetch(turn.batch.upcoming)

    def _look(
        self, stations: list[Station], sides: list[Side], turn: Turn, batch: Batch, views: dict[int, list[int]]
    ) -> Exception | None:
        """What the stores of this rank know of the batch, or why they cannot say."""
        try:
            for station in stations:
                station.open_stores(turn.run)
            compare = turn.step % stations[0].options.check_every == 0 or not self._compared
            self._compared = True
            for side in sides:
                _check_lengths(side, batch)
                views[side.boundary] = side.local_view(batch.samples, compare=compare)
        except Exception as error:  # noqa: BLE001 - raised once the others know
            return error
        return None

    def _check(self, stations: list[Station], turn: Turn) -> None:
        mine = (self._number - 1, self.step, stations[0].training)
        if mine != (turn.number, turn.step, turn.training):
            raise ValueError(
                f"this rank is at run {mine[0]}, step {mine[1]} of its schedule (training: {mine[2]}), the first "
                f"stage's at run {turn.number}, step {turn.step} ({turn.training}): load the same checkpoint on all "
                "ranks, and run the same schedule"
            )
        if self.run and turn.run and self.run != turn.run:
            raise ValueError(
                f"this rank's state is of run {self.run}, the first stage's of run {turn.run}: load the states that "
                "were saved together"
            )
        for station in stations:
            own = station.take_batch() if station.index else None
            if own is not None and turn.batch is not None and own.samples != turn.batch.samples:
                pairs = enumerate(zip(own.samples, turn.batch.samples, strict=False))
                at, (here, there) = next(((i, p) for i, p in pairs if p[0] != p[1]), (-1, (0, 0)))
                what = f"sample {at} is {here} here and {there} there" if at >= 0 else "their numbers differ"
                raise ValueError(f"stage {station.index} was given other sample ids than the first stage: {what}")

    def _compare(
        self, batch: Batch, num_stages: int, views: Mapping[int, list[int]], error: Exception | None
    ) -> list[list[bool]]:
        """By boundary and sample, whether both sides keep the same message of it.

        Each side gives a number and its negative: the largest of both cancel only where the two sides' are equal.
        """
        count = len(batch.samples)
        table = torch.full((num_stages - 1, 2, count), _UNTOLD, dtype=torch.int64)
        for boundary, view in views.items():
            table[boundary, 0] = torch.tensor(view)
            table[boundary, 1] = torch.tensor([value if value == UNSEEN else -value for value in view])
        words = torch.cat([torch.tensor([int(error is not None)]), table.view(-1)])
        dist.all_reduce(words, op=dist.ReduceOp.MAX, group=self.group)
        if error is not None:
            raise error
        if int(words[0]):
            raise PeerFailedError(
                f"another rank of the pipeline cannot take step {self.step}; its own error is in its log"
            )
        high, low = words[1:].view(num_stages - 1, 2, count).unbind(1)
        return ((high != UNSEEN) & (high == -low)).tolist()


def _new_run() -> int:
    return int.from_bytes(os.urandom(6), "little") + 1


def _check_first(station: Station, batch: Batch | None, found: int | None) -> None:
    """Raise unless the first micro-batch has as many samples as all ranks will take it to have."""
    if found is None:
        return
    expected = station.first_size if batch is None else chunk_sizes(len(batch.samples), station.num_chunks)[0]
    if batch is not None and len(batch.samples) < station.num_chunks:
        raise ValueError(f"{len(batch.samples)} samples do not fill {station.num_chunks} micro-batches")
    if expected is not None and found != expected:
        known = "as the pipeline was set up" if batch is None else f"by the {len(batch.samples)} ids given"
        raise ValueError(
            f"the first micro-batch has {found} samples, not {expected} {known}: call set_sample_ids() with the ids of "
            "all samples of the batch before schedule.step() or eval()"
        )


def _check_lengths(side: Side, batch: Batch) -> None:
    assert side.store is not None
    longest = max(batch.lengths) if batch.lengths else (batch.length or 0)
    if longest > side.store.form.length and any(part.grows for part in side.store.form.parts):
        raise ValueError(
            f"the batch has samples of {longest} positions, and messages are kept of {side.store.form.length}: pass "
            "max_length= to the stages"
        )
