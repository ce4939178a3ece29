"""What one pipeline stage has to do with compression: its sides of the boundaries before and behind it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.attach.pipeline.boundary import Side
from thinwire.attach.pipeline.choices import DIRECTIONS, Choices
from thinwire.attach.pipeline.crossing import Crossing, Direction, Spec
from thinwire.attach.pipeline.options import PipelineOptions
from thinwire.attach.pipeline.stats import PipelineStats
from thinwire.attach.pipeline.turn import Batch, Turn
from thinwire.compat import stage_tensors
from thinwire.kernels import FORMAT_VERSION
from thinwire.plan import LinkChoice
from thinwire.store import Background, Disk, StoreError
from thinwire.wire.checkpoint import integers

_TIMED = 64
_LAST_WORDS = timedelta(seconds=30)
_STEPS = 4096
"""After so many steps tags come again."""


class Station:
    """Compression's share of one stage, which owns it."""

    def __init__(self, stage: Any, options: PipelineOptions) -> None:
        self._stage = stage
        self.options = options
        self.stats = PipelineStats()
        self.sides: list[Side] = []
        self._background: Background | None = None
        self._batch: Batch | None = None
        self._loaded: dict[str, dict[str, Tensor]] = {}
        self._number = 0
        self.choices = Choices()
        self.links: tuple[Mapping[Direction, LinkChoice], ...] = ()
        """By boundary, what these rest on, where this process chose."""
        self._computed: dict[Direction, deque[float]] = {name: deque(maxlen=_TIMED) for name in DIRECTIONS}
        self.arriving: dict[tuple[Direction, int], tuple[Tensor, int, dist.Work]] = {}
        """What this step's receives bring: the messages, from which ranks, and the receives."""
        self.sent: set[tuple[int, int]] = set()
        """Boundary and micro-batch of what this step has sent."""
        self._abandoned: list[object] = []

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
        """Samples of a micro-batch of what the first stage is given, as the pipeline was set up."""
        shapes = stage_tensors(self._stage)["inputs"]
        return shapes[0][0][0] if shapes and shapes[0][0] else None

    @contextmanager
    def computing(self, direction: Direction) -> Iterator[None]:
        """Times what the stage computes for a micro-batch, where somebody asks."""
        started = time.perf_counter()
        yield
        if self.options.adapt is not None and self.training:
            if self._stage.device.type == "cuda":
                torch.cuda.synchronize(self._stage.device)
            self._computed[direction].append(time.perf_counter() - started)

    def compute_s(self, direction: Direction) -> float:
        """Median seconds of a micro-batch; 0 if there was none."""
        return median(self._computed[direction] or [0.0])

    def give_batch(self, batch: Batch | None) -> None:
        self._batch = batch

    def take_batch(self) -> Batch | None:
        """The batch that was given for this step: ids are of one step only."""
        batch, self._batch = self._batch, None
        return batch

    def side(self, *, earlier: bool) -> Side:
        """That of the boundary behind this stage (``earlier``), or of the one before it."""
        boundary = self.index if earlier else self.index - 1
        return next(side for side in self.sides if side.boundary == boundary)

    def set_up(self, turn: Turn) -> None:
        """Before a step: know what crosses. Neighbours on the same rank hand tensors over and have no boundary."""
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
            self.sides = [Side(boundary, earlier, self.options, self.stats) for boundary, earlier in wanted.items()]
        tensors = stage_tensors(self._stage)
        for side in self.sides:
            side.chosen = self.choices.rows.get(side.boundary, {})
            names = ("outputs", "output_grads") if side.earlier else ("inputs", "input_grads")
            forward, backward = (Crossing(tuple(Spec(*spec) for spec in tensors[name])) for name in names)
            side.set_up(turn, self.num_chunks, forward, backward if turn.training else None)

    def tag(self, boundary: int, direction: Direction, chunk: int) -> int:
        """Tells a message from all others between its two ranks, those of a step that was given up among them."""
        place = (self._number % _STEPS * self.num_stages + boundary) * 2 + (direction == "backward")
        return 1 + place * self.num_chunks + chunk

    def give_up(self) -> None:
        """Tell the neighbours' stages that what they wait for will not come: they raise, and tell theirs."""
        told: list[dist.Work | None] = []
        for side in self.sides:
            direction: Direction = "forward" if side.earlier else "backward"
            if direction == "backward" and not self.training:
                continue
            left = [chunk for chunk in range(self.num_chunks) if (side.boundary, chunk) not in self.sent]
            if not left:
                continue
            message = side.message(direction, left[0]).clone()
            side.fail(direction, left[0], message)
            peer, group = self.peer(side), self._stage.group
            with suppress(RuntimeError):
                told.append(dist.isend(message, peer, group, self.tag(side.boundary, direction, left[0])))
                self._abandoned.append(message)
        for work in told:
            # Or this process is gone before its words are. A neighbour that is there has posted the receive; one that
            # is gone needs no word.
            with suppress(RuntimeError):
                if work is not None:
                    work.wait(_LAST_WORDS)

    def peer(self, side: Side) -> int:
        """The rank, among all, on the other side of a boundary."""
        group = self._stage.group
        other = self.group_ranks[self.index + 1 if side.earlier else self.index - 1]
        return other if group is None else dist.get_global_rank(group, other)

    def post_receives(self, turn: Turn) -> None:
        """Post the receives of a whole step, once it is known what they bring."""
        self._number = turn.number
        if self.arriving:
            # A receive of a step that was given up may not be let go of before it has ended, and its memory is its own.
            self._abandoned += self.arriving.values()
            self.arriving = {}
            for side in self.sides:
                side.renew_messages()
        self.sent = set()
        group = self._stage.group
        for side in self.sides:
            direction: Direction = "backward" if side.earlier else "forward"
            if direction == "backward" and not turn.training:
                continue
            peer = self.peer(side)
            for chunk in range(self.num_chunks):
                message = side.message(direction, chunk)
                work = dist.irecv(message, peer, group, self.tag(side.boundary, direction, chunk))
                assert work is not None, "this rank is in the group"
                self.arriving[direction, chunk] = message, peer, work

    def found_run(self) -> int | None:
        """The run whose stores on disk are to be gone on with."""
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
        """A copy, with what the stores hold now."""
        stores = [side.store for side in self.sides if side.store is not None]
        return replace(
            self.stats,
            epochs=[replace(epoch) for epoch in self.stats.epochs],
            evicted=sum(store.counts.evicted for store in stores),
            turned_away=sum(store.counts.turned_away for store in stores),
            kept_samples=sum(len(store) for store in stores),
            store_bytes=sum(store.num_bytes for store in stores),
        )

    def state_dict(self, step: int, run: int) -> dict[str, Tensor]:
        """Tensors only: where the training is, and the messages of both sides (on disk: which records they are)."""
        state = {
            "step": torch.tensor(step),
            "run": torch.tensor(run),
            "seed": torch.tensor(self.options.seed),
            "format_version": torch.tensor(FORMAT_VERSION),
        }
        if self.options.adapt is not None:
            state["choices"] = self.choices.to_tensor(self.num_stages - 1)
        for side in self.sides:
            if side.store is not None:
                state |= {f"{side.name}/{name}": value for name, value in side.store.state_dict().items()}
        for name, of in self._loaded.items():
            state |= {f"{name}/{key}": value for key, value in of.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> tuple[int, int]:
        """Take over a state; its step and run.

        Raises:
            ValueError: it is not the state of a stage, or one of another seed or wire format.
            StoreError: its messages are not those of this stage's stores.
        """
        missing = {"step", "run", "seed", "format_version"} - set(state)
        if missing:
            raise ValueError(f"this is not the state of a pipeline stage: {', '.join(sorted(missing))} missing")
        said = {name: integers(state, name)[0] for name in ("step", "run", "seed", "format_version")}
        mine = {"seed": self.options.seed, "format_version": FORMAT_VERSION}
        for name, value in mine.items():
            if said[name] != value:
                raise ValueError(f"the state has {name} {said[name]}, this stage {value}: resume with the same")
        if self.options.adapt is not None and "choices" in state:
            counts: dict[Direction, int] = {name: len(self.options.choices(name)) for name in DIRECTIONS}
            self.choices = Choices.of_tensor(state["choices"], self.num_stages - 1, counts)
        step, run = said["step"], said["run"]
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
                for sample in side.store.samples:
                    side.store.forget(sample)
        return step, run

    def close(self) -> None:
        """Write what waits, and let go of files. What is in memory stays there."""
        if not isinstance(self.options.store, Disk):
            return
        for side in self.sides:
            if side.store is not None:
                side.store.close()
                side.store = None
        self._background = None
