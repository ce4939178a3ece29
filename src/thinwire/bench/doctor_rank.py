"""One rank of ``thinwire bench doctor``: foretells steps from what doctor measures, then takes them."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from statistics import median
from typing import Any

import torch

import thinwire
from thinwire.bench.rank import serve
from thinwire.bench.turns import Turns, gpt, token_batch
from thinwire.doctor.choices import CHOICES, Choice, ceiling, predict, to_time
from thinwire.doctor.measure import Measured, measure
from thinwire.doctor.observe import Observer
from thinwire.doctor.script import Seen


def foretell(cap_mb: float, batch: int, steps: int, choices: list[Choice]) -> tuple[Measured, dict[str, Any]]:
    """What doctor measures while a model trains, and its predictions by title."""
    model = gpt(cap_mb)
    turns, tokens, found = Turns({"watched": model}), token_batch(batch), []

    def done(observer: Observer) -> None:
        shapes = {name: tuple(p.shape) for name, p in model.module.named_parameters()}
        found.append(measure(observer, to_time(choices, shapes)))
        raise Seen(0)

    with Observer(steps, done), contextlib.suppress(Seen):
        while True:
            turns.step("watched", tokens)
    measured = found[0]
    predictions = {choice.title: asdict(predict(choice, measured)) for choice in choices}
    return measured, predictions | {"nothing sent": {"step": asdict(ceiling(measured))}}


def take(cap_mb: float, batch: int, rounds: int, steps: int, choices: list[Choice]) -> dict[str, list[float]]:
    """Seconds of real steps by title and round, the ways in turn."""
    models = {choice.title: gpt(cap_mb) for choice in choices} | {"nothing sent": gpt(cap_mb)}
    wires = [thinwire.compress(models[choice.title], choice.spec, decline=False) for choice in choices if choice.spec]
    models["nothing sent"].register_comm_hook(None, _noop)
    times = Turns(models).seconds(token_batch(batch), rounds, steps)
    for wire in wires:
        wire.detach()
    return times


def _noop(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def foretell_and_take(
    specs: list[str], cap_mb: float, batch: int, watched: int, rounds: int, steps: int
) -> dict[str, Any]:
    """Predictions and times."""
    known = {choice.spec: choice for choice in CHOICES if choice.times == 1}
    choices = [known[None], *(known.get(spec, Choice(spec, spec)) for spec in specs)]
    measured, predictions = foretell(cap_mb, batch, watched, choices)
    times = take(cap_mb, batch, rounds, steps, choices)
    middle = measured.links[len(measured.links) // 2]
    return {
        "predictions": predictions,
        "times": times,
        "watched_s": list(measured.watched.step_s),
        "exposed_share": measured.watched.exposed_share,
        "compute_s": median(pace.compute_s for pace in measured.watched.paces),
        "ready_s": [bucket.ready_s for bucket in measured.watched.paces[0].buckets],
        "bytes": [bucket.num_bytes for bucket in measured.watched.paces[0].buckets],
        "bucket_s": [median(took) for took in zip(*measured.watched.bucket_s, strict=True)],
        "shared": measured.watched.paces[0].shared,
        "native": list(middle.native.points),
        "exchange": list(middle.exchange.points),
        "native_cpu": middle.native_cpu,
        "exchange_cpu": middle.exchange_cpu,
    }


def main() -> None:
    serve(foretell_and_take)
