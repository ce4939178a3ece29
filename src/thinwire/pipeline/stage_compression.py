"""The compression of one pipeline stage: its sides of the boundaries before and behind it, and its statistics."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.transport import Failing
from thinwire.compat import stage_tensors
from thinwire.kernels import FORMAT_VERSION
from thinwire.pipeline.arrivals import Arrivals, Receive
from thinwire.pipeline.boundary import BoundarySide
from thinwire.pipeline.boundary_tensors import BoundaryTensors, Direction, Spec
from thinwire.pipeline.link_choices import DIRECTIONS, LinkChoices
from thinwire.pipeline.options import PipelineOptions
from thinwire.pipeline.schedule_step import Batch, ScheduleStep
from thinwire.pipeline.stats import PipelineStats
from thinwire.policies import LinkChoice
from thinwire.runtime import group_seed
from thinwire.runtime.checkpoint import check_sealed, integers, sealed
from thinwire.runtime.warning import warn_caller
from thinwire.store import Background, Disk, StoreError
from thinwire.threads import Worker

_TIMED = 64
_FAILURE_TIMEOUT = timedelta(seconds=2)
"""How long a stage that fails waits until its neighbours have received that: its own error must not come late."""
_LARGE_CHANGE = 0.3
"""Share of an activation. Dropout of 0.1 leaves changes at half of it: in 3 bits their error is then three quarters of
that of activations that are sent directly."""
_STEPS = 4096
"""Number of steps after which tags repeat."""


class StageCompression:
    """What a compressed stage adds to PyTorch's: options, boundary sides, stores, receives and statistics."""

    def __init__(self, stage: Any, options: PipelineOptions, beside: Worker) -> None:
        self._stage = stage
        self._beside = beside
        self.options = options
        self.stats = PipelineStats()
        self.sides: list[BoundarySide] = []
        self._background: Background | None = None
        self._batch: Batch | None = None
        self._loaded: dict[str, dict[str, Tensor]] = {}
        self._number = 0
        self.choices = LinkChoices()
        self.links: tuple[Mapping[Direction, LinkChoice], ...] = ()
        """By boundary, the measurements behind the choices, if this process made them."""
        self._computed: dict[Direction, deque[float]] = {name: deque(maxlen=_TIMED) for name in DIRECTIONS}
        self.arrivals: dict[Direction, Arrivals] = {}
        """The receives of this step."""
        self._sends: dict[tuple[int, int], Future[None]] = {}
        """By boundary and micro-batch, the messages of this step that were handed over to be sent."""
        self._leaving: list[tuple[dist.Work, Failing]] = []
        """Those of them that are on their way."""
        self._abandoned: list[object] = []
        self._changes_warned = False

    @property
    def index(self) -> int:
        return self._stage.stage_index

    @property
    def num_stages(self) -> int:
        return self._stage.num_stages

    @property
    def group_ranks(self) -> Mapping[int, int]:
        """The rank, in the pipeline's group, that has each stage."""
        return self._stage.stage_index_to_group_rank

    @property
    def training(self) -> bool:
        return self._stage.has_backward

    @property
    def root(self) -> int:
        """The rank in the pipeline's group that has the first stage."""
        return self._stage.stage_index_to_group_rank[0]

    @property
    def num_chunks(self) -> int:
        """Micro-batches of a step."""
        return self._stage.chunks or len(self._stage.args_recv_info)

    @property
    def first_size(self) -> int | None:
        """Number of samples in a micro-batch of the first stage's input, as the pipeline was set up."""
        shapes = stage_tensors(self._stage)["inputs"]
        return shapes[0][0][0] if shapes and shapes[0][0] else None

    @contextmanager
    def computing(self, direction: Direction) -> Iterator[None]:
        """Time what the stage computes for a micro-batch, if compressors are chosen by link."""
        started = time.perf_counter()
        yield
        if self.options.adapt is not None and self.training:
            if self._stage.device.type == "cuda":
                torch.cuda.synchronize(self._stage.device)
            self._computed[direction].append(time.perf_counter() - started)

    def compute_s(self, direction: Direction) -> float:
        """Median seconds of computation for a micro-batch; 0 if there was none."""
        return median(self._computed[direction] or [0.0])

    def give_batch(self, batch: Batch | None) -> None:
        """Set the batch of the next step."""
        self._batch = batch

    def take_batch(self) -> Batch | None:
        """The batch that was set for this step. It is used once."""
        batch, self._batch = self._batch, None
        return batch

    def side(self, *, earlier: bool) -> BoundarySide:
        """This stage's side of the boundary behind it (``earlier``) or before it."""
        boundary = self.index if earlier else self.index - 1
        return next(side for side in self.sides if side.boundary == boundary)

    def set_up(self, step: ScheduleStep) -> None:
        """Prepare the sides for a step. Neighbours on the same rank pass tensors directly and have no boundary."""
        ranks, mine = self._stage.stage_index_to_group_rank, self._stage.group_rank
        wanted = {
            boundary: earlier
            for boundary, earlier, other in (
                (self.index - 1, False, self.index - 1),
                (self.index, True, self.index + 1),
            )
            if 0 <= other < self.num_stages and ranks[other] != mine
        }
        if {side.boundary for side in self.sides} != set(wanted):
            self.sides = [
                BoundarySide(boundary, earlier, self.options, self.stats, self._beside)
                for boundary, earlier in wanted.items()
            ]
        tensors = stage_tensors(self._stage)
        for side in self.sides:
            side.chosen = self.choices.rows.get(side.boundary, {})
            side.seed = group_seed(self.options.seed, tuple(dist.get_process_group_ranks(self._stage.group)))
            names = ("outputs", "output_grads") if side.earlier else ("inputs", "input_grads")
            forward, backward = (BoundaryTensors(tuple(Spec(*spec) for spec in tensors[name])) for name in names)
            side.set_up(step, self.num_chunks, forward, backward if step.training else None)
            if side.earlier and side.keeps:
                self._warn_of_large_changes(side.boundary)

    def _warn_of_large_changes(self, boundary: int) -> None:
        """Warn once where `delta` gains little, because activations never settle."""
        change = self.stats.lasting_change()
        if change < _LARGE_CHANGE or self._changes_warned:
            return
        self._changes_warned = True
        warn_caller(
            f"boundary {boundary}: activations still change by {change:.0%} between two visits of a sample, and by no "
            "less from visit to visit, so that delta(...) gains little over sending them directly. Dropout, and "
            "augmentation at random, do that: turn them off before this boundary, in stages 0 to "
            f"{boundary} (dropout: p=0), or do without the memory of delta(...): forward='gaussian(bits=4)'"
        )

    def tag(self, boundary: int, direction: Direction, chunk: int) -> int:
        """The tag of a message, which no other one between the same ranks has, also of a step that was abandoned."""
        place = (self._number % _STEPS * self.num_stages + boundary) * 2 + (direction == "backward")
        return 1 + place * self.num_chunks + chunk

    def send(self, side: BoundarySide, chunk: int, tensors: Sequence[Tensor], failing: Failing) -> None:
        """Compress the tensors of a micro-batch and send them, in the thread beside. `settle` waits for that.

        Raises:
            ValueError: They are not of the shapes that the other side expects.
        """
        direction: Direction = "forward" if side.earlier else "backward"
        side.prepare(direction, chunk, tensors)
        message = side.message(direction, chunk)
        start = partial(self._start, message, self.peer(side), self.tag(side.boundary, direction, chunk), failing)
        ready = None
        if any(tensor.is_cuda for tensor in tensors):
            ready = torch.cuda.Event()
            ready.record()

        def pack_and_send() -> None:
            try:
                if ready is not None:
                    ready.synchronize()
                side.pack(direction, chunk, tensors, message)
            except Exception:
                side.fail(direction, chunk, message)
                start()
                raise
            start()
            side.keep()

        self._sends[side.boundary, chunk] = self._beside.submit(pack_and_send)
        if side.earlier and "backward" in self.arrivals:
            self.arrivals["backward"].expect()

    def _start(self, message: Tensor, peer: int, tag: int, failing: Failing) -> None:
        with failing:
            work = dist.isend(message, peer, self._stage.group, tag)
        assert work is not None, "this rank is in the group"
        self._leaving.append((work, failing))

    def sent_all(self, side: BoundarySide) -> bool:
        """Whether all messages of this step in the direction of ``side`` were handed over."""
        return sum(boundary == side.boundary for boundary, _ in self._sends) == self.num_chunks

    @property
    def _jobs(self) -> list[Future[None]]:
        """What this step has handed over to the thread beside."""
        return [*self._sends.values(), *(save for side in self.sides for save in side.saves)]

    def check(self, *, wait: bool = False) -> None:
        """Raise what went wrong in the thread beside so far, or, with ``wait``, until all its jobs are done."""
        for job in self._jobs:
            if wait or job.done():
                job.result()

    def failure(self) -> BaseException | None:
        """Wait for the worker thread, and return its first error, or None."""
        self._beside.wait()
        return next((error for error in (job.exception() for job in self._jobs) if error is not None), None)

    def settle(self) -> None:
        """Wait until all records are saved and all messages of this step have left.

        Raises:
            TransportError: A message could not be sent.
            StoreError: A record could not be saved.
        """
        error = self.failure()
        leaving, self._leaving = self._leaving, []
        if error is not None:
            self._forget_jobs()
            raise error
        for work, failing in leaving:
            with failing:
                work.wait()

    def rest(self) -> None:
        """Give up what has not arrived, if anything, and wait until no thread works on this stage's sides."""
        unfinished = [arrivals for arrivals in self.arrivals.values() if not arrivals.complete]
        for arrivals in unfinished:
            arrivals.stop()
        if unfinished:
            # A receive of a step that was given up may not be let go of before it has ended, and its memory is its own.
            self._abandoned += unfinished
            for side in self.sides:
                side.renew_messages()
        self.arrivals = {}
        self._beside.wait()

    def _forget_jobs(self) -> None:
        self._sends.clear()
        for side in self.sides:
            side.saves.clear()

    def give_up(self) -> None:
        """Send the neighbours' stages a failed message in place of the next one: they raise, and do the same."""
        self.rest()
        sends: list[dist.Work | None] = []
        for side in self.sides:
            direction: Direction = "forward" if side.earlier else "backward"
            if not side.crosses(direction):
                continue
            left = [chunk for chunk in range(self.num_chunks) if (side.boundary, chunk) not in self._sends]
            if not left:
                continue
            message = side.message(direction, left[0]).clone()
            side.fail(direction, left[0], message)
            peer, group = self.peer(side), self._stage.group
            with suppress(RuntimeError):
                sends.append(dist.isend(message, peer, group, self.tag(side.boundary, direction, left[0])))
                self._abandoned.append(message)
        for work in sends:
            # Otherwise the process might end before the messages have left. A neighbour that is alive has posted the
            # receive; one that is gone does not need it.
            with suppress(RuntimeError):
                if work is not None:
                    work.wait(_FAILURE_TIMEOUT)
        # Messages whose receive nobody waits for may be under way for long: their memory is no longer that of others.
        self._forget_jobs()
        self._abandoned += self._leaving
        self._leaving = []
        for side in self.sides:
            side.renew_messages()

    def peer(self, side: BoundarySide) -> int:
        """The rank, among all, on the other side of a boundary."""
        group, other = self._stage.group, self._group_peer(side)
        return other if group is None else dist.get_global_rank(group, other)

    def _group_peer(self, side: BoundarySide) -> int:
        """The same rank in the pipeline's group."""
        return self.group_ranks[self.index + 1 if side.earlier else self.index - 1]

    def post_receives(self, step: ScheduleStep, failing: Callable[[str, int], Failing]) -> None:
        """Post the receives of a whole step, once it is known what they bring, and begin to wait for them.

        ``failing`` makes the context in which what it names, with a rank of the group, is waited for.
        """
        self._number = step.number
        self._forget_jobs()
        for side in self.sides:
            direction: Direction = "backward" if side.earlier else "forward"
            if side.crosses(direction):
                self.arrivals[direction] = self._arrivals(side, direction, failing)

    def _arrivals(self, side: BoundarySide, direction: Direction, failing: Callable[[str, int], Failing]) -> Arrivals:
        peer, chunks = self.peer(side), range(self.num_chunks)
        messages = [side.message(direction, chunk) for chunk in chunks]

        def decode(chunk: int) -> list[Tensor]:
            into = side.room(direction, chunk)
            side.unpack(direction, chunk, messages[chunk], into, peer)
            return into

        receives = [self.receive(messages[chunk], side, direction, chunk) for chunk in chunks]
        context = failing(f"receiving from rank {peer}", self._group_peer(side))
        # A gradient cannot come before the activation has left.
        return Arrivals(receives, decode, context, expected=0 if side.earlier else self.num_chunks)

    def receive(self, message: Tensor, side: BoundarySide, direction: Direction, chunk: int) -> Receive:
        """Post the receive of a micro-batch's message."""
        tag = self.tag(side.boundary, direction, chunk)
        work = dist.irecv(message, self.peer(side), self._stage.group, tag)
        assert work is not None, "this rank is in the group"
        return work

    def existing_run(self) -> int | None:
        """The run of the stores on disk that this training continues, if there are any."""
        return self.options.store.run_of(self._folder(f"boundary{self.index}-earlier"))

    def open_stores(self, run: int) -> None:
        """Open the store of each side that has none, as it was when a state was saved, if one was loaded."""
        for side in self.sides:
            if side.store is not None or not side.keeps:
                continue
            if self._background is None:
                place = self.options.store
                self._background = Background(place.waiting_bytes) if isinstance(place, Disk) else Background()
            name = self._folder(side.name)
            side.store = self.options.store.open(side.record_format(), name, run=run, background=self._background)
            if side.name in self._loaded:
                side.store.load_state_dict(self._loaded.pop(side.name))

    def _folder(self, name: str) -> str:
        return f"rank{dist.get_rank()}-{name}"

    def present_stats(self) -> PipelineStats:
        """A copy of the statistics, with what the stores hold now."""
        self._beside.wait()
        return self.stats.holding([side.store for side in self.sides if side.store is not None])

    def state_dict(self, step: int, run: int) -> dict[str, Tensor]:
        """The step, the run, and the records of both sides (those on disk: which ones they are), as tensors."""
        self.rest()
        state = {
            "step": torch.tensor(step, dtype=torch.int64, device="cpu"),
            "run": torch.tensor(run, dtype=torch.int64, device="cpu"),
            "seed": torch.tensor(self.options.seed, dtype=torch.int64, device="cpu"),
            "format_version": torch.tensor(FORMAT_VERSION, dtype=torch.int64, device="cpu"),
        }
        if self.options.adapt is not None:
            state["choices"] = self.choices.to_tensor(self.num_stages - 1)
        for side in self.sides:
            if side.store is not None:
                state |= {f"{side.name}/{name}": value for name, value in side.store.state_dict().items()}
        for name, store_state in self._loaded.items():
            state |= {f"{name}/{key}": value for key, value in store_state.items()}
        return sealed(state)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> tuple[int, int]:
        """Load a state, and return its step and run.

        Raises:
            ValueError: It is not the state of a stage, or one of another seed or wire format.
            StoreError: Its records are not those of this stage's stores.
        """
        self.rest()
        missing = {"step", "run", "seed", "format_version"} - set(state)
        if missing:
            raise ValueError(f"this is not the state of a pipeline stage: {', '.join(sorted(missing))} missing")
        saved = {name: integers(state, name)[0] for name in ("step", "run", "seed", "format_version")}
        mine = {"seed": self.options.seed, "format_version": FORMAT_VERSION}
        for name, value in mine.items():
            if saved[name] != value:
                raise ValueError(f"the state has {name} {saved[name]}, this stage {value}: resume with the same")
        if self.options.adapt is not None and "choices" in state:
            counts: dict[Direction, int] = {name: len(self.options.choices(name)) for name in DIRECTIONS}
            self.choices = LinkChoices.from_tensor(state["choices"], self.num_stages - 1, counts)
        check_sealed(state, [key for key in state if key != "checksums"])
        step, run = saved["step"], saved["run"]
        if step < 0 or run < 0:
            raise ValueError(f"the state is of step {step} of run {run}, which cannot be")
        names = {key.rsplit("/", 1)[0] for key in state if "/" in key}
        expected = {f"boundary{self.index}-earlier", f"boundary{self.index - 1}-later"}
        if not names <= expected:
            raise StoreError(f"the state has messages of {', '.join(sorted(names - expected))}: it is another stage's")
        self._loaded = {name: {} for name in names}
        for key, value in state.items():
            if "/" in key:
                if not isinstance(value, Tensor):
                    raise StoreError(f"{key} in the state is no tensor")
                name, entry = key.rsplit("/", 1)
                self._loaded[name][entry] = value.detach().cpu().clone()
        for side in self.sides:
            if side.store is None:
                continue
            if side.name in self._loaded:
                side.store.load_state_dict(self._loaded.pop(side.name))
            else:
                side.store.clear()
        return step, run

    def close(self) -> None:
        """Write what is pending, and close files. Records in memory stay."""
        self.rest()
        if not isinstance(self.options.store, Disk):
            return
        for side in self.sides:
            if side.store is not None:
                side.store.close()
                side.store = None
        self._background = None
