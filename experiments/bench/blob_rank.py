"""One rank of ``python -m experiments bench blob``."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import thinwire
from thinwire_tools.bench.rank import TIMEOUT, serve
from thinwire_tools.bench.turns import Turns, backward, gpt, token_batch

_REPEATS = 5
# DDP has formed its last buckets, and has fixed their order, by then.
_PASSES = 4


class Contest(Turns):
    """The same model four times: stock DDP, over a process group that compresses, with registered layers and without,
    and layer by layer."""

    def __init__(self, cap_mb: float, spec: str) -> None:
        self.groups: dict[str, thinwire.ProcessGroup] = {}
        models = {"fp32": gpt(cap_mb)}
        for name in ("uniform", "registered"):
            options = thinwire.ProcessGroupOptions(spec, where=lambda _: True)
            group = dist.new_group(backend="thinwire", pg_options=options, timeout=TIMEOUT)
            assert isinstance(group, thinwire.ProcessGroup)
            self.groups[name], models[name] = group, gpt(cap_mb, group)
        self.groups["registered"].register_model(models["registered"])
        models["layerwise"] = gpt(cap_mb)
        self.wire = thinwire.compress(models["layerwise"], spec, skip_if_slower=False)
        super().__init__(models)

    def sent_bytes(self) -> dict[str, int]:
        """Bytes that each method has sent so far, without those of stock DDP."""
        sent = {name: group.stats for name, group in self.groups.items()}
        num_bytes = {name: stats.payload_sent_bytes + stats.passed_bytes for name, stats in sent.items()}
        return {**num_bytes, "layerwise": self.wire.stats.payload_sent_bytes}

    def errors(self, tokens: Tensor) -> dict[str, dict[str, float]]:
        """Relative error of each method's mean of the same gradient, as the mean of some draws: of all layers, and of
        those with one dimension (biases and norms)."""
        for model in self.models.values():
            for _ in range(_PASSES):
                backward(model, tokens)
        exact = _gradients(self.models["fp32"])
        errors: dict[str, dict[str, float]] = {}
        for name, model in self.models.items():
            total = {"all": 0.0, "flat": 0.0}
            for _ in range(_REPEATS):
                backward(model, tokens)
                pairs = list(zip(_gradients(model), exact, strict=True))
                total["all"] += _relative(pairs) / _REPEATS
                total["flat"] += _relative([pair for pair in pairs if pair[1].dim() < 2]) / _REPEATS
            errors[name] = total
        return errors


def _gradients(model: torch.nn.Module) -> list[Tensor]:
    return [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]


def _relative(pairs: list[tuple[Tensor, Tensor]]) -> float:
    off = sum(float((got - want).double().square().sum()) for got, want in pairs)
    return (off / sum(float(want.double().square().sum()) for _, want in pairs)) ** 0.5


def measure(spec: str, cap_mb: float, batch: int, rounds: int, steps: int) -> dict[str, Any]:
    """Measure errors while all models are still the same, then train in turns."""
    contest, tokens = Contest(cap_mb, spec), token_batch(batch)
    errors = contest.errors(tokens)
    before = contest.sent_bytes()
    backward(contest.models["uniform"], tokens)
    backward(contest.models["registered"], tokens)
    backward(contest.models["layerwise"], tokens)
    sent: dict[str, Any] = {name: total - before[name] for name, total in contest.sent_bytes().items()}
    world_size = dist.get_world_size()
    num_bytes = sum(p.numel() * p.element_size() for p in contest.models["fp32"].parameters())
    sent["fp32"] = 2 * (world_size - 1) * num_bytes // world_size
    times = contest.seconds(tokens, rounds, steps)
    return {
        "seconds": {name: median(seconds) for name, seconds in times.items()},
        # Round by round, so that a machine that slows down slows both down.
        "over_fp32": {
            name: median(f / t for f, t in zip(times["fp32"], seconds, strict=True)) for name, seconds in times.items()
        },
        "all": times,
        "bytes_per_step": sent,
        "errors": errors,
        "buffers": {
            name: {"matched": group.stats.matched, "uniform": group.stats.uniform, "passed": group.stats.passed}
            for name, group in contest.groups.items()
        },
    }


def main() -> None:
    serve(measure)
