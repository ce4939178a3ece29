"""The command ``thinwire bench step``: a training step, compared to stock DDP and to the ceiling of sending nothing."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.local import send_nothing
from thinwire_tools.compare.gpt import GPT, GPTConfig, next_token_loss
from thinwire_tools.results import Results, figures_table

_KINDS = ("fp32", "thinwire", "noop")
_WARM_UP = 4
_VOCABULARY = 256


def make_table(measured: Sequence[Mapping[str, Any]]) -> Table:
    milliseconds = [f"{name}\nms" for name in ("fp32", "thinwire", "ceiling")]
    shares = [f"{name},\nof ceiling" for name in ("fp32", "thinwire")]
    table = figures_table("batch", (*milliseconds, *shares, "against\nfp32"))
    for row in measured:
        times = [f"{row['seconds'][name] * 1e3:.0f}" for name in _KINDS]
        shares = [f"{row['share'][name]:.0%}" for name in ("fp32", "thinwire")]
        table.add_row(str(row["batch"]), *times, *shares, f"{row['over_fp32']:.2f}x")
    return table


def remarks(answer: Mapping[str, Any]) -> Iterator[str]:
    """Yield the costs of compression in a step of the largest batch, and whether thinwire compressed at all."""
    last = answer["measured"][-1]
    taken, worked = (1e3 * (by["thinwire"] - by["noop"]) for by in (last["seconds"], answer["processor_s"]))
    yield (
        "The ceiling is the speed of steps that send nothing; ratios are medians over turns. "
        f"At batch {last['batch']} thinwire takes {taken:.0f} ms longer than those, and {worked:.0f} ms more processor "
        "time of rank 0, which cores that training leaves idle would take."
    )
    if answer["declined_layers"]:
        yield f"thinwire declined to compress {answer['declined_layers']} layers: it would not have been faster."


def make_results(answer: Mapping[str, Any], about: Mapping[str, object]) -> Results:
    results = Results("thinwire bench step", about=dict(about))
    for row in answer["measured"]:
        for name in _KINDS:
            results.add(f"step_s/{name}/batch{row['batch']}", row["seconds"][name], "s", all=row["all"][name])
    last, stats = answer["measured"][-1], answer["stats"]
    for name, seconds in answer["processor_s"].items():
        results.add(f"processor_s/{name}", seconds, "s", batch=last["batch"])
    for name in ("fp32", "thinwire"):
        results.add(f"share_of_ceiling/{name}", last["share"][name], "", batch=last["batch"])
    results.add("speedup_over_fp32", last["over_fp32"], "x", batch=last["batch"])
    results.add("declined_layers", answer["declined_layers"], "layers")
    results.add("payload_bytes_per_step", answer["bytes_per_step"], "B")
    for stage in ("encode", "wire", "reduce", "decode"):
        results.add(f"stage_s/{stage}", stats[f"{stage}_s"] / stats["steps"], "s")
    return results


# --- on a rank


def gpt(cap_mb: float) -> DistributedDataParallel:
    """Return the demo's GPT, the same each time and on every rank."""
    torch.manual_seed(0)
    return DistributedDataParallel(GPT(GPTConfig()), bucket_cap_mb=cap_mb)


def token_batch(batch: int) -> Tensor:
    """Return ``[batch, context + 1]`` random tokens, different on each rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(
        0, _VOCABULARY, (batch, GPTConfig().context + 1), generator=generator, dtype=torch.int64, device="cpu"
    )


def backward(model: nn.Module, tokens: Tensor) -> None:
    """Leave the mean gradient of a batch in the model's parameters."""
    model.zero_grad()
    next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()


class Turns:
    """Models that differ in how gradients are sent, each with an optimizer. They take turns, so that a machine that
    slows down slows all of them down."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self.models = models
        self._optimizers = {name: torch.optim.AdamW(m.parameters(), lr=1e-4) for name, m in models.items()}

    def seconds(self, tokens: Tensor, rounds: int, steps: int) -> dict[str, list[float]]:
        """Return the seconds of a step on the slowest rank, after some warm-up steps, by model and round."""
        for name in self.models:
            for _ in range(_WARM_UP):
                self.step(name, tokens)
        times: dict[str, list[float]] = {name: [] for name in self.models}
        for _ in range(rounds):
            for name, by_round in times.items():
                by_round.append(self._turn(name, tokens, steps))
        return times

    def processor_seconds(self, tokens: Tensor, rounds: int, steps: int) -> dict[str, float]:
        """Return the processor time of a step in this process, by model, all threads together; run `seconds` before."""
        taken = dict.fromkeys(self.models, 0.0)
        for _ in range(rounds):
            for name in taken:
                dist.barrier()
                started = time.process_time()
                for _ in range(steps):
                    self.step(name, tokens)
                taken[name] += (time.process_time() - started) / (rounds * steps)
        return taken

    def _turn(self, name: str, tokens: Tensor, steps: int) -> float:
        dist.barrier()
        started = time.perf_counter()
        for _ in range(steps):
            self.step(name, tokens)
        mine = torch.tensor((time.perf_counter() - started) / steps, dtype=torch.float32, device="cpu")
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
        return float(mine)

    def step(self, name: str, tokens: Tensor) -> None:
        backward(self.models[name], tokens)
        self._optimizers[name].step()


class Contest(Turns):
    """Three copies of a model: with stock DDP, thinwire, and a hook that sends nothing, which is the ceiling."""

    def __init__(self, cap_mb: float, spec: str, skip_if_slower: bool) -> None:
        models = {name: gpt(cap_mb) for name in ("fp32", "thinwire", "noop")}
        self.wire = thinwire.compress(models["thinwire"], spec, skip_if_slower=skip_if_slower)
        send_nothing(models["noop"])
        super().__init__(models)


def _measure(contest: Contest, batch: int, rounds: int, steps: int) -> dict[str, Any]:
    times = contest.seconds(token_batch(batch), rounds, steps)
    seconds = {name: median(by_round) for name, by_round in times.items()}
    # The median over rounds, so that a machine that slows down slows both down.
    shares = {name: median(n / t for n, t in zip(times["noop"], times[name], strict=True)) for name in times}
    over_fp32 = median(f / t for f, t in zip(times["fp32"], times["thinwire"], strict=True))
    return {"batch": batch, "seconds": seconds, "share": shares, "over_fp32": over_fp32, "all": times}


def measure(
    spec: str, cap_mb: float, skip_if_slower: bool, rounds: int, steps: int, target: float, batches: list[int]
) -> dict[str, Any]:
    """Measure with growing batches until stock DDP reaches ``target`` of the ceiling (0: the first batch alone)."""
    warnings.filterwarnings("ignore", message=".*find_unused_parameters.*")
    contest = Contest(cap_mb, spec, skip_if_slower)
    measured, batch = [], batches[0]
    for batch in batches:
        measured.append(_measure(contest, batch, rounds, steps))
        reached = torch.tensor(measured[-1]["share"]["fp32"], dtype=torch.float32, device="cpu")
        dist.broadcast(reached, 0)
        if float(reached) >= target:
            break
    return {
        "measured": measured,
        "processor_s": contest.processor_seconds(token_batch(batch), 3, steps),
        "declined_layers": contest.wire.stats.declined_layers,
        "bytes_per_step": contest.wire.sent_bytes(),
        "stats": contest.wire.stats.to_dict(),
    }
