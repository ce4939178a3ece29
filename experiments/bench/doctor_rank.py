"""One rank of ``python -m experiments bench doctor``: predicts steps from what doctor measures, then takes them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
from torch import nn

import thinwire
from experiments.bench.doctor_sharded import sharded_gpt, sharded_way
from thinwire_tools.bench.rank import serve
from thinwire_tools.bench.turns import Turns, gpt, token_batch
from thinwire_tools.doctor.measure import Measured
from thinwire_tools.doctor.observer import Observer
from thinwire_tools.doctor.predict import measure_for, predict_step
from thinwire_tools.doctor.probe import StopScript
from thinwire_tools.doctor.settings import Setting, ceiling
from thinwire_tools.doctor.settings_sharded import ShardedSetting

NOTHING = Setting("nothing sent")


def look(model: nn.Module, batch: int, steps: int, specs: Sequence[str]) -> tuple[Measured, list[Setting]]:
    """What doctor measures while a model trains, and the settings that it sees."""
    turns, tokens = Turns({"watched": model}), token_batch(batch)
    measured: list[tuple[Measured, list[Setting]]] = []

    def done(observer: Observer) -> None:
        measured.append(measure_for(observer, specs))
        raise StopScript(0)

    with Observer(steps, done), contextlib.suppress(StopScript):
        while True:
            turns.step("watched", tokens)
    return measured[0]


def compressed_model(setting: Setting, cap_mb: float) -> tuple[nn.Module, Callable[[], object]]:
    """A DDP model that trains like this, and what ends its communication."""
    model = gpt(cap_mb)
    if setting == NOTHING:
        model.register_comm_hook(None, _noop)
    if setting.spec is None:
        return model, lambda: None
    wire = thinwire.compress(model, setting.spec, skip_if_slower=False)
    return model, wire.detach


def _noop(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _taken(setting: Setting, specs: Sequence[str]) -> bool:
    """Whether steps are taken with it."""
    if isinstance(setting, ShardedSetting):
        return setting.times == 1 and (setting.care < setting.care.CHECK or setting.spec in specs)
    return setting.is_today or (setting.spec in specs and setting.algorithm == "sra")


def predict_and_take(
    specs: list[str], cap_mb: float, batch: int, watched: int, rounds: int, steps: int, sharded: bool
) -> dict[str, Any]:
    """Predictions and times."""
    measured, seen = look(sharded_gpt() if sharded else gpt(cap_mb), batch, watched, specs)
    settings = [setting for setting in seen if _taken(setting, specs)]
    predictions = {setting.title: {"step": asdict(predict_step(setting, measured).step)} for setting in settings}
    models, ends = {}, []
    for setting in (*settings, NOTHING):
        models[setting.title], end = sharded_way(setting) if sharded else compressed_model(setting, cap_mb)
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
    serve(predict_and_take)
