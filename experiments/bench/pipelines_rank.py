"""One rank of ``python -m experiments bench pipelines``: stages that sleep as if an accelerator computed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

import thinwire
from thinwire.store import Disk
from thinwire_tools.bench.rank import serve
from thinwire_tools.planner import PYTORCH_CLASSES, ScheduleName

_WARM_UP = 2


class _Input(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Emulated) -> Tensor:
        ctx.layer = layer
        time.sleep(layer.forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.layer.backward_s - ctx.layer.weights_s)
        return grads[0], None


class _Weight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, layer: Emulated) -> Tensor:
        ctx.layer = layer
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.layer.weights_s)
        return grads[0], None


class Emulated(nn.Module):
    """A layer that scales and shifts, and sleeps forward, for the gradient of its input, and for its weights'."""

    def __init__(self, width: int, forward_s: float, backward_s: float, weights_s: float) -> None:
        super().__init__()
        self.forward_s, self.backward_s, self.weights_s = forward_s, backward_s, weights_s
        self.scale = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return _Input.apply(x + self.shift, self) * _Weight.apply(self.scale, self)


class _Receive:
    """A receive that a thread of its own waits for, to note when it has ended."""

    def __init__(self, work: Any, arrived: Callable[[], None]) -> None:
        self._work, self._arrived, self._error = work, arrived, None
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        try:
            self._work.wait()
            self._arrived()
        except RuntimeError as error:
            self._error = error

    def wait(self, *_: Any) -> bool:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return True


class Recorder:
    """Notes when this rank's stages compute and when their messages arrive, in seconds of the machine's clock."""

    def __init__(self, stages: Sequence[Any]) -> None:
        self.tasks: list[tuple[str, int, int, float, float]] = []
        self.arrivals: list[tuple[str, int, int, float]] = []
        for stage in stages:
            if isinstance(stage, thinwire.CompressedStage):
                self._follow_compressed(stage)
            else:
                self._follow(stage)
            self._time(stage, "weights", "backward_weight_one_chunk")

    def clear(self) -> None:
        """Forget the step before."""
        self.tasks.clear()
        self.arrivals.clear()

    @contextmanager
    def computing(self, kind: str, stage: int) -> Iterator[None]:
        """Note what the body computes, for the next micro-batch of this kind and stage."""
        began = time.perf_counter()
        yield
        chunk = sum(task[:2] == (kind, stage) for task in self.tasks)
        self.tasks.append((kind, stage, chunk, began, time.perf_counter()))

    def _time(self, stage: Any, kind: str, name: str) -> None:
        run = getattr(stage, name)

        def timed(*args: Any, **options: Any) -> Any:
            with self.computing(kind, stage.stage_index):
                return run(*args, **options)

        setattr(stage, name, timed)

    def _noted(self, work: Any, kind: str, stage: int, chunk: int) -> _Receive:
        """``stage``: the one that sends."""
        return _Receive(work, lambda: self.arrivals.append((kind, stage, chunk, time.perf_counter())))

    def _follow(self, stage: Any) -> None:
        """PyTorch's stage: it computes in these calls, and asks for its receives in those."""
        self._time(stage, "forward", "forward_one_chunk")
        self._time(stage, "backward", "backward_one_chunk")
        for kind, name, source in (("forward", "get_fwd_recv_ops", -1), ("backward", "get_bwd_recv_ops", 1)):
            setattr(stage, name, partial(self._asked, getattr(stage, name), kind, stage.stage_index + source))

    def _asked(self, ask: Callable[[int], list[Any]], kind: str, stage: int, chunk: int) -> list[Any]:
        ops = ask(chunk)
        for op in ops:
            op.op = partial(self._received, op.op, kind, stage, chunk)
        return ops

    def _received(self, receive: Any, kind: str, stage: int, chunk: int, *args: Any, **options: Any) -> _Receive:
        return self._noted(receive(*args, **options), kind, stage, chunk)

    def _follow_compressed(self, stage: Any) -> None:
        """A compressed stage: its calls include waiting, and its receives are posted at once."""
        compression, index = stage._compression, stage.stage_index
        compression.computing = lambda direction: self.computing(direction, index)
        post = compression.receive

        def receive(message: Tensor, side: Any, direction: str, chunk: int) -> _Receive:
            source = index - 1 if direction == "forward" else index + 1
            return self._noted(post(message, side, direction, chunk), direction, source, chunk)

        compression.receive = receive


def run(
    method: list[str] | None,
    schedule: str,
    stages: list[list[list[float]]],
    chunks: int,
    batch: int,
    length: int,
    width: int,
    steps: int,
) -> dict[str, Any]:
    """Train, and return what the step of median length was, and the seconds of all.

    Args:
        method: forward and backward compressors of `thinwire.compress_stage`, and the folder that messages are kept in
            if it is not memory; None for PyTorch's own stages.
        schedule: by its name in `thinwire_tools.planner`.
        stages: by stage, for each of its layers the seconds forward, backward, and of the weights.
        chunks: micro-batches of a step.
        batch: samples of a micro-batch.
        length: of a sample.
        width: of each position.
        steps: to take.
    """
    rank, num_ranks, cpu = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    mine: list[Any] = []
    for index in range(rank, len(stages), num_ranks):
        module = nn.Sequential(*(Emulated(width, *times) for times in stages[index]))
        stage = PipelineStage(module, index, len(stages), cpu)
        specs = None if method is None else [json.loads(spec) if spec.startswith("[") else spec for spec in method]
        mine.append(stage if specs is None else _compressed(stage, specs, chunks * batch))
    recorder = Recorder(mine)
    kind = getattr(pipelining, PYTORCH_CLASSES[cast("ScheduleName", schedule)])
    single = schedule in ("gpipe", "1f1b")
    plan = kind(mine[0] if single else mine, chunks, loss_fn=nn.functional.mse_loss)
    x = torch.randn(chunks * batch, length, width, generator=torch.Generator().manual_seed(0))
    first, last = mine[0].is_first, mine[-1].is_last
    optimizer = torch.optim.SGD([p for stage in mine for p in stage.submod.parameters()], lr=1e-3)
    taken: list[tuple[float, Any]] = []
    for step in range(_WARM_UP + steps):
        recorder.clear()
        optimizer.zero_grad()
        if first and method is not None:
            mine[0].set_sample_ids(range(len(x)))
        dist.barrier()
        plan.step(*([x] if first else []), target=x.tanh() if last else None, return_outputs=False)
        optimizer.step()
        recorded: list[Any] = [None] * num_ranks
        dist.all_gather_object(recorded, (recorder.tasks, recorder.arrivals))
        began = min(task[3] for tasks, _ in recorded for task in tasks)
        tasks = [[(*task[:3], task[3] - began, task[4] - began) for task in rank_tasks] for rank_tasks, _ in recorded]
        arrivals = [[(*arrival[:3], arrival[3] - began) for arrival in arrived] for _, arrived in recorded]
        if step >= _WARM_UP:
            taken.append((max(task[4] for rank_tasks in tasks for task in rank_tasks), (tasks, arrivals)))
    taken.sort(key=lambda timed: timed[0])
    stats: list[Any] = [None] * num_ranks
    dist.all_gather_object(stats, [] if method is None else [stage.stats.to_dict() for stage in mine])
    middle = taken[len(taken) // 2]
    return {
        "step_s": [seconds for seconds, _ in taken],
        "tasks": middle[1][0],
        "arrivals": middle[1][1],
        "stats": [pair_stats for rank_stats in stats for pair_stats in rank_stats],
    }


def _compressed(stage: PipelineStage, method: list[Any], num_samples: int) -> thinwire.CompressedStage:
    forward, backward, *folder = method
    store = Disk(*folder, num_samples=num_samples) if folder else None
    return thinwire.compress_stage(stage, forward=forward, backward=backward, store=store)


def main() -> None:
    serve(run)
