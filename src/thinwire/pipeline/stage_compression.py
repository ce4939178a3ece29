"""The compression of a stage: its sides of the boundaries before and behind it, and their state."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.arguments import warn_caller
from thinwire.compat import stage_tensors
from thinwire.kernels import FORMAT_VERSION
from thinwire.pipeline.boundary import BoundarySide
from thinwire.pipeline.links import DIRECTIONS, LinkChoices
from thinwire.pipeline.message import BoundaryTensors, Direction, Spec
from thinwire.pipeline.options import PipelineOptions
from thinwire.pipeline.schedule_step import Batch, ScheduleStep
from thinwire.pipeline.stats import PipelineStats
from thinwire.policies import LinkChoice
from thinwire.runtime.checkpoint import check_sealed, integers, sealed
from thinwire.store import Background, Disk, StoreError
from thinwire.threads import Worker

if TYPE_CHECKING:
    from thinwire.pipeline.pipeline import Pipeline

_TIMED = 64
_LARGE_CHANGE = 0.3
"""Share of an activation. Dropout of 0.1 leaves changes at half of it: in 3 bits their error is then three quarters of
that of activations that are sent directly."""


class StageCompression:
    """The compression of a stage: options, boundary sides, stores, statistics, and their state."""

    def __init__(self, stage: Any, options: PipelineOptions) -> None:
        self._stage = stage
        self.options = options
        self.pipeline: Pipeline | None = None
        """Pipeline in which the stage has begun steps."""
        self.step = 0
        """Number of training steps so far."""
        self.run = 0
        """Number that identifies the training through all restarts; 0 before the first step that keeps messages."""
        self.stats = PipelineStats()
        self.sides: list[BoundarySide] = []
        self._background: Background | None = None
        self._batch: Batch | None = None
        self._loaded: dict[str, dict[str, Tensor]] = {}
        self.choices = LinkChoices()
        self.links: tuple[Mapping[Direction, LinkChoice], ...] = ()
        """Measurements behind the choices, by boundary, if this process made them."""
        self._computed: dict[Direction, deque[float]] = {name: deque(maxlen=_TIMED) for name in DIRECTIONS}
        self._changes_warned = False

    @property
    def index(self) -> int:
        return self._stage.stage_index

    @property
    def num_stages(self) -> int:
        return self._stage.num_stages

    @property
    def group_ranks(self) -> Mapping[int, int]:
        """Rank, in the pipeline's group, of each stage."""
        return self._stage.stage_index_to_group_rank

    @property
    def training(self) -> bool:
        return self._stage.has_backward

    @property
    def num_chunks(self) -> int:
        """Number of micro-batches of a step."""
        return self._stage.chunks or len(self._stage.args_recv_info)

    @property
    def first_size(self) -> int | None:
        """Number of samples in a micro-batch of the first stage's input, as the pipeline was set up."""
        shapes = stage_tensors(self._stage)["inputs"]
        return shapes[0][0][0] if shapes and shapes[0][0] else None

    @contextmanager
    def computing(self, direction: Direction) -> Iterator[None]:
        """Time the computation of the stage for a micro-batch, if compressors are chosen by link."""
        started = time.perf_counter()
        yield
        if self.options.adapt is not None and self.training:
            if self._stage.device.type == "cuda":
                torch.cuda.synchronize(self._stage.device)
            self._computed[direction].append(time.perf_counter() - started)

    def compute_s(self, direction: Direction) -> float:
        """Return the median seconds of computation for a micro-batch; 0 if there was none."""
        return median(self._computed[direction] or [0.0])

    def give_batch(self, batch: Batch | None) -> None:
        """Set the batch of the next step."""
        self._batch = batch

    def take_batch(self) -> Batch | None:
        """Return the batch that was set for this step. It is used once."""
        batch, self._batch = self._batch, None
        return batch

    def set_up(self, step: ScheduleStep, worker: Worker, seed: int) -> None:
        """Prepare the sides for a step. Neighbors on the same rank pass tensors directly and have no boundary.

        Args:
            step: The step.
            worker: The thread that loads and saves records.
            seed: The seed of the random draws.
        """
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
                BoundarySide(boundary, earlier, self.options, self.stats, worker)
                for boundary, earlier in wanted.items()
            ]
        tensors = stage_tensors(self._stage)
        for side in self.sides:
            side.chosen = self.choices.rows.get(side.boundary, {})
            side.seed = seed
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

    def existing_run(self) -> int | None:
        """Return the run of the stores on disk that this training continues, if there are any."""
        return self.options.store.run_of(self._folder(f"boundary{self.index}-earlier"))

    def open_stores(self) -> None:
        """Open the store of each side that has none, as it was when a state was saved, if one was loaded."""
        for side in self.sides:
            if side.store is not None or not side.keeps:
                continue
            if self._background is None:
                place = self.options.store
                self._background = Background(place.waiting_bytes) if isinstance(place, Disk) else Background()
            name = self._folder(side.name)
            side.store = self.options.store.open(side.record_format(), name, run=self.run, background=self._background)
            if side.name in self._loaded:
                side.store.load_state_dict(self._loaded.pop(side.name))

    def _folder(self, name: str) -> str:
        return f"rank{dist.get_rank()}-{name}"

    def present_stats(self) -> PipelineStats:
        """Return a copy of the statistics, with the present contents of the stores."""
        if self.pipeline is not None:
            self.pipeline.worker.wait()
        return self.stats.holding([side.store for side in self.sides if side.store is not None])

    def _rest(self) -> None:
        if self.pipeline is not None:
            self.pipeline.rest()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the step, the run, and the records of both sides (those on disk: which ones they are), as tensors."""
        self._rest()
        state = {
            "step": torch.tensor(self.step, dtype=torch.int64, device="cpu"),
            "run": torch.tensor(self.run, dtype=torch.int64, device="cpu"),
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

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state.

        Raises:
            ValueError: It is not the state of a stage, or one of another seed or wire format.
            StoreError: Its records are not those of this stage's stores.
        """
        self._rest()
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
        self.step, self.run = step, run

    def close(self) -> None:
        """Write what is pending, and close files. Records in memory stay."""
        self._rest()
        if not isinstance(self.options.store, Disk):
            return
        for side in self.sides:
            if side.store is not None:
                side.store.close()
                side.store = None
        self._background = None
