"""One rank of ``thinwire bench step``. Prints its measurements as one line of JSON."""

from __future__ import annotations

import json
import sys
import time
import warnings
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.repro.gpt import GPT, GPTConfig, next_token_loss

_TIMEOUT = timedelta(seconds=120)
_WARM_UP = 4
_VOCABULARY = 256


class Contest:
    """The same model three times: stock DDP, thinwire, and with a hook that sends nothing, which is the ceiling."""

    def __init__(self, cap_mb: float, spec: str, decline: bool) -> None:
        self.models = {}
        for name in ("fp32", "thinwire", "noop"):
            torch.manual_seed(0)
            self.models[name] = DistributedDataParallel(GPT(GPTConfig()), bucket_cap_mb=cap_mb)
        self.wire = thinwire.compress(self.models["thinwire"], spec, decline=decline)
        self.models["noop"].register_comm_hook(None, _noop)
        self.optimizers = {name: torch.optim.AdamW(m.parameters(), lr=1e-4) for name, m in self.models.items()}

    def step(self, name: str, tokens: Tensor) -> None:
        self.optimizers[name].zero_grad()
        next_token_loss(self.models[name](tokens[:, :-1]), tokens[:, 1:]).backward()
        self.optimizers[name].step()

    def seconds(self, name: str, tokens: Tensor, steps: int) -> float:
        """Seconds a step, on the slowest rank."""
        dist.barrier()
        started = time.perf_counter()
        for _ in range(steps):
            self.step(name, tokens)
        mine = torch.tensor((time.perf_counter() - started) / steps)
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
        return float(mine)


def _noop(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _measure(contest: Contest, batch: int, rounds: int, steps: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    context = GPTConfig().context
    tokens = torch.randint(0, _VOCABULARY, (batch, context + 1), generator=generator)
    for name in contest.models:
        for _ in range(_WARM_UP):
            contest.step(name, tokens)
    times: dict[str, list[float]] = {name: [] for name in contest.models}
    for _ in range(rounds):
        for name, found in times.items():
            found.append(contest.seconds(name, tokens, steps))
    seconds = {name: median(found) for name, found in times.items()}
    # Round by round, so that a machine that slows down slows both down.
    shares = {name: median(n / t for n, t in zip(times["noop"], times[name], strict=True)) for name in times}
    over_fp32 = median(f / t for f, t in zip(times["fp32"], times["thinwire"], strict=True))
    return {"batch": batch, "seconds": seconds, "share": shares, "over_fp32": over_fp32, "all": times}


def main(spec: str, cap_mb: float, decline: bool, rounds: int, steps: int, target: float, batches: list[int]) -> None:
    """Measure with growing batches until stock DDP reaches ``target`` of the ceiling (0: the first batch alone)."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*find_unused_parameters.*")
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    contest = Contest(cap_mb, spec, decline)
    measured = []
    for batch in batches:
        measured.append(_measure(contest, batch, rounds, steps))
        reached = torch.tensor(measured[-1]["share"]["fp32"])
        dist.broadcast(reached, 0)
        if float(reached) >= target:
            break
    if dist.get_rank() == 0:
        answer = {
            "measured": measured,
            "declined_layers": contest.wire.stats.declined_layers,
            "bytes_per_step": contest.wire.wire_bytes_per_step(),
            "stats": contest.wire.stats.to_dict(),
        }
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _, its_spec, its_cap, its_decline, its_rounds, its_steps, its_target, its_batches = sys.argv
    main(
        its_spec,
        float(its_cap),
        its_decline == "decline",
        int(its_rounds),
        int(its_steps),
        float(its_target),
        [int(batch) for batch in its_batches.split(",")],
    )
