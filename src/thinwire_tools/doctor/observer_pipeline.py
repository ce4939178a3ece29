"""Sees the stages of a pipeline that PyTorch's schedules train, on the CPU."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Literal

import torch
import torch.distributed as dist

from thinwire.compat import stage_tensors
from thinwire_tools.doctor.watched import DoctorError, check_size
from thinwire_tools.planner import SCHEDULES, Schedule, ScheduleName, StageTimes

WARM_UP = 2
"""Steps that do not count: in the first one PyTorch finds shapes."""
_Kind = Literal["forward", "backward", "weights"]
_KINDS: tuple[_Kind, ...] = ("forward", "backward", "weights")
_PIPELINING = "torch.distributed.pipelining"


@dataclass
class PipelineStep:
    """One training step of this rank: its tasks, and what they took."""

    began: float
    tasks: list[tuple[_Kind, int, int]] = field(default_factory=list)
    """Kind, stage and micro-batch, in order."""
    spans: list[tuple[float, float]] = field(default_factory=list)
    seconds: float = 0.0
    """From its beginning to that of the next step."""


@dataclass(frozen=True)
class WatchedPipeline:
    """What some steps have shown, the same on every rank."""

    schedule: Schedule
    stages: tuple[tuple[StageTimes, ...], ...]
    """By step, what each stage computed for a micro-batch: medians over micro-batches."""
    step_s: tuple[float, ...]
    """By step, of the slowest rank."""
    pipeline_s: tuple[float, ...]
    """By step, the part from the first stage's first task to the last one of its rank."""
    activation_bytes: tuple[float, ...]
    """By boundary, of a micro-batch."""
    parameters: int


class PipelineObserver:
    """A context manager within which ``torch.distributed.pipelining.PipelineStage`` is a subclass of itself that notes
    when it computes. It leaves all else alone, so that every step shows what training takes as it is. A script that has
    not imported that module yet gets the subclass when it does; nothing else imports it, which would take seconds.

    ``done`` is called as the step after the last one that is watched begins, on every rank; ``on_step`` as each begins.
    """

    def __init__(
        self,
        steps: int,
        done: Callable[[PipelineObserver], None],
        on_step: Callable[[int, int], None] = lambda step, total: None,
    ) -> None:
        self.finished = False
        self.stages: dict[int, Any] = {}
        """Those of this rank that have trained."""
        self._total, self._done, self._on_step = WARM_UP + steps, done, on_step
        self._steps: list[PipelineStep] = []
        self._present: PipelineStep | None = None
        self._finder: _AfterImport | None = None
        self._pipelining: Any = None
        self._original: Any = None

    def __enter__(self) -> PipelineObserver:
        if _PIPELINING in sys.modules:
            self._watch(sys.modules[_PIPELINING])
        else:
            self._finder = _AfterImport(_PIPELINING, self._watch)
            sys.meta_path.insert(0, self._finder)
        return self

    def __exit__(self, *_: object) -> None:
        if self._finder is not None:
            with suppress(ValueError):
                sys.meta_path.remove(self._finder)
        if self._pipelining is not None:
            self._pipelining.PipelineStage = self._pipelining.stage.PipelineStage = self._original

    def _watch(self, pipelining: Any) -> None:
        self._pipelining, self._original = pipelining, pipelining.PipelineStage
        pipelining.PipelineStage = pipelining.stage.PipelineStage = _watched(self, self._original)

    @property
    def group(self) -> dist.ProcessGroup:
        """The pipeline's."""
        group = next(iter(self.stages.values())).group or dist.group.WORLD
        assert group is not None, "a stage has trained"
        return group

    def begin(self, stage: Any) -> None:
        """A run of the schedule begins; each stage of this rank calls it, before any computes."""
        if self.finished or (self._present is not None and not self._present.tasks):
            self.stages[stage.stage_index] = stage
            return
        from thinwire.pipeline.stage import CompressedStage

        if isinstance(stage, CompressedStage):
            raise DoctorError(
                "this stage is compressed, and doctor looks at training without: take thinwire.compress() out of the "
                "script for now"
            )
        if stage.device.type != "cpu":
            raise DoctorError(
                "doctor looks at pipelines on the CPU: on a GPU a stage computes beside what it is asked for next, and "
                "what that takes is not seen"
            )
        self.stages[stage.stage_index] = stage
        now = time.perf_counter()
        if self._present is not None:
            self._present.seconds = now - self._present.began
            self._steps.append(self._present)
            self._present = None
        if not stage.has_backward:  # an evaluation
            return
        if len(self._steps) >= self._total:
            self.finished = True
            self._done(self)
            return
        self._on_step(len(self._steps), self._total)
        self._present = PipelineStep(time.perf_counter())

    @contextmanager
    def computing(self, kind: _Kind, stage: int, chunk: int) -> Iterator[None]:
        """Note what the body computes."""
        step, began = self._present, time.perf_counter()
        yield
        if step is not None:
            step.tasks.append((kind, stage, chunk))
            step.spans.append((began, time.perf_counter()))

    def result(self) -> WatchedPipeline:
        """What was watched, of all ranks together. All must call it between two steps.

        Raises:
            DoctorError: it is a schedule that is not known, or steps are not alike.
        """
        group, steps = self.group, self._steps[WARM_UP:]
        check_size(group)
        stage = next(iter(self.stages.values()))
        num_stages, rank = stage.num_stages, dist.get_rank(group)
        schedule = _schedule_of(steps, num_stages, rank, group)
        times = torch.zeros(len(steps), num_stages, len(_KINDS), dtype=torch.float64, device="cpu")
        for i, step in enumerate(steps):
            for index in self.stages:
                for k, kind in enumerate(_KINDS):
                    pairs = zip(step.tasks, step.spans, strict=True)
                    taken = [end - begin for task, (begin, end) in pairs if task[:2] == (kind, index)]
                    times[i, index, k] = torch.tensor(taken or [0.0], dtype=torch.float64, device="cpu").median()
        sizes = torch.zeros(num_stages, 2, dtype=torch.float64, device="cpu")
        for index, stage in self.stages.items():
            crossing = [
                torch.Size(shape).numel() * 4.0
                for shape, kind in stage_tensors(stage)["outputs"]
                if kind.is_floating_point
            ]
            sizes[index] = torch.tensor(
                [sum(crossing), sum(p.numel() for p in stage.submod.parameters())], dtype=torch.int64, device="cpu"
            )
        taken_s = torch.tensor([step.seconds for step in steps], dtype=torch.float64, device="cpu")
        own = [step.spans[-1][1] - step.spans[0][0] if 0 in self.stages else 0.0 for step in steps]
        spans = torch.tensor(own, dtype=torch.float64, device="cpu")
        for tensor, op in ((times, "SUM"), (sizes, "SUM"), (taken_s, "MAX"), (spans, "MAX")):
            dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op), group=group)
        stages = tuple(tuple(StageTimes(f, b + w, w) for f, b, w in rows) for rows in times.tolist())
        return WatchedPipeline(
            schedule,
            stages,
            tuple(taken_s.tolist()),
            tuple(spans.tolist()),
            tuple(sizes[:-1, 0].tolist()),
            int(sizes[:, 1].sum()),
        )


class _AfterImport(MetaPathFinder):
    """Calls ``then`` with the module ``name`` as soon as somebody has imported it."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name, self._then = name, then

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                execute(module)
                self._then(module)

            spec.loader.exec_module = execute_and_call
        return spec


def _schedule_of(steps: list[PipelineStep], num_stages: int, rank: int, group: dist.ProcessGroup) -> Schedule:
    """The schedule whose tasks all ranks have computed in each of these steps."""
    num_ranks, num_chunks = dist.get_world_size(group), 1 + max(chunk for _, _, chunk in steps[-1].tasks)
    names: list[ScheduleName] = list(SCHEDULES)
    known: list[Schedule | None] = []
    for name in names:
        try:
            known.append(Schedule.build(name, num_ranks, num_chunks, num_stages // num_ranks))
        except ValueError:
            known.append(None)
    fits = [
        schedule is not None and all(step.tasks == list(schedule.ranks[rank]) for step in steps) for schedule in known
    ]
    agreed = torch.tensor(fits, dtype=torch.int64, device="cpu")
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=group)
    followed = next((schedule for schedule, fit in zip(known, agreed.tolist(), strict=True) if fit), None)
    if followed is None:
        raise DoctorError(
            "doctor knows the orders in which PyTorch's GPipe, 1F1B, interleaved 1F1B and interleaved zero-bubble "
            f"schedules compute, and these {num_stages} stages on {num_ranks} ranks train in another"
        )
    return followed


def _watched(observer: PipelineObserver, kind: Any) -> Any:
    """A subclass of PyTorch's stage whose work is noted."""

    class PipelineStage(kind):
        def clear_runtime_states(self) -> None:
            # A schedule begins each run with this.
            super().clear_runtime_states()
            observer.begin(self)

        def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
            with observer.computing("forward", self.stage_index, fwd_chunk_id):
                return super().forward_one_chunk(fwd_chunk_id, *args, **options)

        def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> None:
            with observer.computing("backward", self.stage_index, bwd_chunk_id):
                super().backward_one_chunk(bwd_chunk_id, *args, **options)

        def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> None:
            with observer.computing("weights", self.stage_index, bwd_chunk_id):
                super().backward_weight_one_chunk(bwd_chunk_id, *args, **options)

    PipelineStage.__module__, PipelineStage.__qualname__ = kind.__module__, kind.__qualname__
    return PipelineStage
