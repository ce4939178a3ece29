"""One rank of ``thinwire bench step``."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import thinwire
from thinwire_tools.bench.rank import serve
from thinwire_tools.bench.turns import Turns, gpt, token_batch


class Contest(Turns):
    """Three copies of a model: with stock DDP, thinwire, and a hook that sends nothing, which is the ceiling."""

    def __init__(self, cap_mb: float, spec: str, skip_if_slower: bool) -> None:
        models = {name: gpt(cap_mb) for name in ("fp32", "thinwire", "noop")}
        self.wire = thinwire.compress(models["thinwire"], spec, skip_if_slower=skip_if_slower)
        models["noop"].register_comm_hook(None, _noop)
        super().__init__(models)


def _noop(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


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


def main() -> None:
    serve(measure)
