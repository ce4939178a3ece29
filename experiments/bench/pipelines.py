"""``python -m experiments bench pipelines``: steps of pipelines over emulated links."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

import thinwire
from experiments.framework.pages import show
from thinwire_tools import lab
from thinwire_tools.ranks import run_ranks
from thinwire_tools.results import OutputFile, Results

RANKS, CHUNKS, BATCH, LENGTH, WIDTH = 4, 8, 2, 128, 512
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
METHODS: dict[str, dict[str, Any] | None] = {
    "PyTorch": None,
    "raw": {"forward": "raw", "backward": "raw"},
    "fw3 bw6": {"forward": "delta(maxabs(bits=3))", "backward": "maxabs(bits=6)"},
}
LAYER_MS = (5.0, 10.0, 5.0)
"""Of each of eight layers: forward, backward, and the part of that which is the weights'."""
LINKS = (("100mbit", 1.0), ("1gbit", 4.0))
"""Rates, and how many times `LAYER_MS` layers take there: 1F1B cannot hide its messages, and nearly can."""


def pipelines(*, steps: int = 5, json: OutputFile = None) -> int:
    """Steps of four stages over emulated links: PyTorch's stages and thinwire's, under four schedules.

    Stages sleep as if an accelerator computed, so that four fit on two cores. Layers take as long as a small
    accelerator's on the slow link, and four times as long on the fast one, which leaves a schedule room to hide its
    messages.

    Examples:
      python -m experiments bench pipelines --json benchmarks/pipelines/pipelines.json

    Args:
        steps: of each run; the median counts.
        json: write the figures to this file.
    """
    lab.need_network()
    results = Results("python -m experiments bench pipelines")
    results.about = {"ranks": RANKS, "micro_batches": CHUNKS, "activation_bytes": 4 * BATCH * LENGTH * WIDTH}
    results.about |= {"steps": steps, "layer_ms": list(LAYER_MS), "times": dict(LINKS)}
    for rate, times in LINKS:
        with lab.Network(RANKS, rate=rate) as network:
            for schedule in SCHEDULES:
                for name, method in METHODS.items():
                    taken = run(method, schedule, even_stages(schedule, times), steps, network)
                    results.add(f"step_s/{name}/{schedule}/{rate}", median(taken), "s", all=taken)
    show("pipelines", results, json)
    return 0


def even_stages(schedule: str, times: float) -> list[list[list[float]]]:
    """By stage and layer the seconds to sleep: two layers on each rank, which take ``times`` `LAYER_MS`."""
    layer = [times * ms / 1e3 for ms in LAYER_MS]
    return [[layer]] * (2 * RANKS) if schedule == "interleaved" else [[layer, layer]] * RANKS


def run(
    method: dict[str, Any] | None,
    schedule: str,
    stages: Sequence[Sequence[Sequence[float]]],
    steps: int,
    network: lab.Network | None,
) -> list[float]:
    """Return the seconds of the steps that `measure` takes; ``network`` None: over loopback."""
    config = {"method": method, "schedule": schedule, "stages": stages, "steps": steps}
    return run_ranks(measure, config, RANKS, network)["step_s"]


# --- on a rank

_WARM_UP = 2
_SCHEDULES = {
    "1f1b": "Schedule1F1B",
    "gpipe": "ScheduleGPipe",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero-bubble": "ScheduleInterleavedZeroBubble",
}


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


class Recorder:
    """Notes when this rank's stages began to compute, and when they last ended."""

    def __init__(self, stages: Sequence[Any]) -> None:
        self.spans: list[tuple[float, float]] = []
        for stage in stages:
            if isinstance(stage, thinwire.CompressedStage):
                # Its calls include waiting.
                stage.computing = lambda direction: self.computing()
            else:
                self._time(stage, "forward_one_chunk")
                self._time(stage, "backward_one_chunk")
            self._time(stage, "backward_weight_one_chunk")

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Note when the body computes."""
        began = time.perf_counter()
        yield
        self.spans.append((began, time.perf_counter()))

    def _time(self, stage: Any, name: str) -> None:
        compute = getattr(stage, name)

        def timed(*args: Any, **options: Any) -> Any:
            with self.computing():
                return compute(*args, **options)

        setattr(stage, name, timed)


def measure(
    method: dict[str, Any] | None, schedule: str, stages: Sequence[Sequence[Sequence[float]]], steps: int
) -> dict[str, Any]:
    """Train, and return the seconds of each step, from the first task of any rank to the end of the last.

    Args:
        method: options of `thinwire.compress_stage`; None for PyTorch's own stages.
        schedule: a key of `_SCHEDULES`.
        stages: by stage, for each of its layers the seconds forward, backward, and of the weights.
        steps: to take.
    """
    rank, num_ranks, cpu = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    mine: list[Any] = []
    for index in range(rank, len(stages), num_ranks):
        module = nn.Sequential(*(Emulated(WIDTH, *times) for times in stages[index]))
        stage = PipelineStage(module, index, len(stages), cpu)
        mine.append(stage if method is None else thinwire.compress_stage(stage, **method))
    recorder = Recorder(mine)
    kind = getattr(pipelining, _SCHEDULES[schedule])
    single = schedule in ("gpipe", "1f1b")
    plan = kind(mine[0] if single else mine, CHUNKS, loss_fn=nn.functional.mse_loss)
    x = torch.randn(CHUNKS * BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
    first, last = mine[0].is_first, mine[-1].is_last
    optimizer = torch.optim.SGD([p for stage in mine for p in stage.submod.parameters()], lr=1e-3)
    taken: list[float] = []
    for _ in range(_WARM_UP + steps):
        recorder.spans.clear()
        optimizer.zero_grad()
        if first and method is not None:
            mine[0].set_sample_ids(range(len(x)))
        dist.barrier()
        plan.step(*([x] if first else []), target=x.tanh() if last else None, return_outputs=False)
        optimizer.step()
        recorded: list[Any] = [None] * num_ranks
        dist.all_gather_object(recorded, recorder.spans)
        spans = [span for rank_spans in recorded for span in rank_spans]
        taken.append(max(end for _, end in spans) - min(begin for begin, _ in spans))
    return {"step_s": sorted(taken[_WARM_UP:])}
