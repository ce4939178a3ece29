"""One rank of ``thinwire bench doctor``: foretells steps from what doctor measures, then takes them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
from torch import nn

import thinwire
from thinwire.bench.doctor_sharded import sharded_gpt, sharded_way
from thinwire.bench.rank import serve
from thinwire.bench.turns import Turns, gpt, token_batch
from thinwire.doctor.choices import Choice, ceiling
from thinwire.doctor.choices_sharded import ShardedChoice
from thinwire.doctor.foretell import foretold, measure_for
from thinwire.doctor.measure import Measured
from thinwire.doctor.observe import Observer
from thinwire.doctor.script import Seen

NOTHING = Choice("nothing sent")


def look(model: nn.Module, batch: int, steps: int, specs: Sequence[str]) -> tuple[Measured, list[Choice]]:
    """What doctor measures while a model trains, and the choices that it sees."""
    turns, tokens = Turns({"watched": model}), token_batch(batch)
    found: list[tuple[Measured, list[Choice]]] = []

    def done(observer: Observer) -> None:
        found.append(measure_for(observer, specs))
        raise Seen(0)

    with Observer(steps, done), contextlib.suppress(Seen):
        while True:
            turns.step("watched", tokens)
    return found[0]


def way(choice: Choice, cap_mb: float) -> tuple[nn.Module, Callable[[], object]]:
    """A DDP model that trains like this, and what ends its communication."""
    model = gpt(cap_mb)
    if choice == NOTHING:
        model.register_comm_hook(None, _noop)
    if choice.spec is None:
        return model, lambda: None
    wire = thinwire.compress(model, choice.spec, decline=False)
    return model, wire.detach


def _noop(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _taken(choice: Choice, specs: Sequence[str]) -> bool:
    """Whether steps are taken with it."""
    if isinstance(choice, ShardedChoice):
        return choice.times == 1 and (choice.care < choice.care.CHECK or choice.spec in specs)
    return choice.is_today or (choice.spec in specs and choice.topology == "sra")


def foretell_and_take(
    specs: list[str], cap_mb: float, batch: int, watched: int, rounds: int, steps: int, sharded: bool
) -> dict[str, Any]:
    """Predictions and times."""
    measured, seen = look(sharded_gpt() if sharded else gpt(cap_mb), batch, watched, specs)
    choices = [choice for choice in seen if _taken(choice, specs)]
    predictions = {choice.title: asdict(foretold(choice, measured)) for choice in choices}
    models, ends = {}, []
    for choice in (*choices, NOTHING):
        models[choice.title], end = sharded_way(choice) if sharded else way(choice, cap_mb)
        ends.append(end)
    times = Turns(models).seconds(token_batch(batch), rounds, steps)
    for end in ends:
        end()
    middle, pace = measured.links[len(measured.links) // 2], measured.watched.paces[0]
    return {
        "predictions": predictions | {NOTHING.title: {"step": asdict(ceiling(measured))}},
        "times": times,
        "watched_s": list(measured.watched.step_s),
        "exposed_share": measured.watched.exposed_share,
        "compute_s": median(pace.compute_s for pace in measured.watched.paces),
        "ready_s": [bucket.ready_s for bucket in pace.buckets],
        "bytes": [bucket.num_bytes for bucket in pace.buckets],
        "bucket_s": [median(took) for took in zip(*measured.watched.bucket_s, strict=True)],
        "shared": pace.shared,
        "native": list(middle.native.points),
        "exchange": list(middle.exchange.points),
        "native_cpu": middle.native_cpu,
        "exchange_cpu": middle.exchange_cpu,
    }


def main() -> None:
    serve(foretell_and_take)
