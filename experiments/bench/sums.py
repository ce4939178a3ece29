"""``python -m experiments bench sums``: tensor parallelism whose sums of activations are compressed."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from statistics import fmean, stdev
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

from experiments.bench.keeping import first
from experiments.papers.fullstack.tasks import SUMS, SUMS_SMOKE
from experiments.papers.fullstack.tensors import fine_tune
from thinwire.collectives import LoopbackTransport
from thinwire.compressors import parse
from thinwire.pipeline.stats import PipelineStats
from thinwire.pipeline.tensor_parallel import SampleSum
from thinwire.store import Memory
from thinwire_tools.compare.gpt import GPT, Block
from thinwire_tools.results import OutputFile, Results

FP32, CONTROL = "fp32", "direct(maxabs(bits=2, rounding=stochastic))"
METHODS = (
    FP32,
    "delta(gaussian(bits=2))",
    "direct(gaussian(bits=2))",
    "delta(maxabs(bits=3))",
    "direct(maxabs(bits=3))",
    "delta(maxabs(bits=4))",
    "direct(maxabs(bits=4))",
    CONTROL,
)


def sums(*, seeds: int = 3, num_ranks: int = 2, smoke: bool = False, json: OutputFile = None) -> int:
    """Fine-tune a GPT for five epochs whose sums behind attention and behind the MLP are compressed over ranks.

    The ranks are threads of one process, which exchange the messages of `CompressedRowwiseParallel`. ``delta(...)``
    sends changes since a sample's last visit (AQ-SGD, appendix F), ``direct(...)`` activations; the control, three
    levels rounded at random, must be worse than all. Bytes include first visits.

    Examples:
      python -m experiments bench sums
      python -m experiments bench sums --num-ranks 4 --seeds 1

    Args:
        seeds: trainings of each method.
        num_ranks: ranks that share a layer.
        smoke: a tiny model and few steps: the same path, no figures worth keeping.
        json: write the figures to this file.
    """
    console = Console(highlight=False)
    task = SUMS_SMOKE if smoke else SUMS
    about = {"seeds": seeds, "num_ranks": num_ranks, "epochs": task.epochs, "smoke": smoke}
    results = Results("python -m experiments bench sums", about=about)
    table = Table("sums", "loss", "held out", "±", "fewer bytes")
    begun, exact = first(task), None
    with console.status("training ...") as status:
        for spec in METHODS:
            status.update(f"training: {spec}")
            runs = [_train(spec, begun, seed, num_ranks, smoke=smoke) for seed in range(seeds)]
            exact = exact or runs
            above = [[own[i] / base[i] - 1 for own, base in zip(runs, exact, strict=True)] for i in (0, 1)]
            figures = {
                "loss": fmean(above[0]),
                "held_out": fmean(above[1]),
                "deviation": stdev(above[0]) if seeds > 1 else 0.0,
                "fewer": fmean(run[2] for run in runs),
            }
            for figure, value in figures.items():
                results.add(f"{figure}/{spec}", value, "")
            loss, out, deviation, fewer = figures.values()
            table.add_row(spec, f"{loss:+.2%}", f"{out:+.2%}", f"{deviation:.2%}", f"{fewer:.1f}x")
    console.print(table)
    if json:
        results.write(json)
    return 0


class _Sum:
    """One layer's sum, of ranks that are threads."""

    def __init__(self, spec: str, index: int, num_ranks: int, seed: int) -> None:
        self.stats = [PipelineStats() for _ in range(num_ranks)]
        self._sums = [
            SampleSum(transport, parse(spec), Memory(), name=f"layer{index}", seed=seed, stats=stats)
            for transport, stats in zip(LoopbackTransport.world(num_ranks), self.stats, strict=True)
        ]
        self._threads = ThreadPoolExecutor(num_ranks)

    def __call__(self, parts: Sequence[Tensor], samples: Sequence[int]) -> Tensor:
        pending = [self._threads.submit(own, part, samples) for own, part in zip(self._sums, parts, strict=True)]
        results = [one.result() for one in pending]
        assert all(torch.equal(one, results[0]) for one in results), "ranks have the same"
        return results[0]


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: _Sum, samples: Sequence[int], *parts: Tensor) -> Tensor:
        ctx.num = len(parts)
        return own([part.detach() for part in parts], samples)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, *gradients * ctx.num


class _Rowwise(nn.Module):
    """A linear layer whose input features are shared by ranks."""

    def __init__(self, linear: nn.Linear, own: _Sum, num_ranks: int) -> None:
        super().__init__()
        self.linear, self.own, self._num_ranks = linear, own, num_ranks
        self.samples: Sequence[int] = ()

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self.linear(x)
        shares = zip(x.chunk(self._num_ranks, -1), self.linear.weight.chunk(self._num_ranks, 1), strict=True)
        parts = [functional.linear(share, weight) for share, weight in shares]
        return _Summed.apply(self.own, self.samples, *parts) + self.linear.bias  # pyright: ignore[reportOperatorIssue]


def _train(spec: str, begun: GPT, seed: int, num_ranks: int, *, smoke: bool) -> tuple[float, float, float]:
    """The last epoch's loss, that on what is held out, and how many times fewer bytes were sent than in fp32."""
    task, gpt, layers = SUMS_SMOKE if smoke else SUMS, deepcopy(begun), []
    for block in gpt.blocks if spec != FP32 else ():
        assert isinstance(block, Block)
        for name in ("attention_out", "mlp_out"):
            layer = _Rowwise(getattr(block, name), _Sum(spec, len(layers), num_ranks, seed), num_ranks)
            setattr(block, name, layer)
            layers.append(layer)
    losses, held_out = fine_tune(gpt, task, layers, seed, lambda *_: None)
    stats = [stats for layer in layers for stats in layer.own.stats]
    dense, sent = (sum(getattr(own, name) for own in stats) for name in ("dense_bytes", "forward_sent_bytes"))
    return fmean(losses[-task.steps_per_epoch :]), fmean(held_out), dense / sent if sent else 1.0
