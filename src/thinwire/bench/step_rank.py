"""One rank of ``thinwire bench step``. Prints its measurements as one line of JSON."""

from __future__ import annotations

import json
import sys
import warnings
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import thinwire
from thinwire.bench.turns import Turns, gpt, token_batch

_TIMEOUT = timedelta(seconds=120)


class Contest(Turns):
    """The same model three times: stock DDP, thinwire, and with a hook that sends nothing, which is the ceiling."""

    def __init__(self, cap_mb: float, spec: str, decline: bool) -> None:
        models = {name: gpt(cap_mb) for name in ("fp32", "thinwire", "noop")}
        self.wire = thinwire.compress(models["thinwire"], spec, decline=decline)
        models["noop"].register_comm_hook(None, _noop)
        super().__init__(models)


def _noop(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _measure(contest: Contest, batch: int, rounds: int, steps: int) -> dict[str, Any]:
    times = contest.seconds(token_batch(batch), rounds, steps)
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
