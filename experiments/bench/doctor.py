"""``python -m experiments bench doctor``: steps that doctor predicted beside steps that were taken."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from experiments.framework.pages import show
from thinwire.local import send_nothing
from thinwire.plan import DEFAULT_RULES
from thinwire_tools import lab
from thinwire_tools.bench.step import Turns, gpt, token_batch
from thinwire_tools.compare.gpt import GPT, GPTConfig
from thinwire_tools.doctor.examine import StopScript
from thinwire_tools.doctor.measure import Measured
from thinwire_tools.doctor.observer import Observer
from thinwire_tools.doctor.settings import Setting, ceiling
from thinwire_tools.doctor.settings_sharded import ShardedSetting, measure_for, predict_step
from thinwire_tools.ranks import run_ranks
from thinwire_tools.results import OutputFile, Results

_RATES = ("100mbit", "200mbit", "500mbit", "1gbit")
_RTTS = ("0ms", "10ms")
_SPECS = ("cast(bf16)", DEFAULT_RULES)
_CLAIMED = 0.15


def doctor(
    *,
    rates: tuple[str, ...] = _RATES,
    rtts: tuple[str, ...] = _RTTS,
    specs: tuple[str, ...] | None = None,
    ranks: int = 2,
    batch: int = 8,
    bucket_cap_mb: float = 5.0,
    watched: int = 14,
    rounds: int = 5,
    steps: int = 2,
    sharded: bool = False,
    json: OutputFile = None,
) -> int:
    """Let doctor predict training steps of the demo's GPT over emulated links, then take these steps and compare.

    Predictions come from a model that is watched while it trains uncompressed, and from probes of links and codecs;
    none of the steps that they are held against is known to them. Methods take turns. Takes about ten minutes.

    Examples:
      python -m experiments bench doctor --json doctor.json
      python -m experiments bench doctor --rates 1gbit --rtts 0ms
      python -m experiments bench doctor --sharded --json doctor-fsdp.json

    Args:
        rates: of each rank's link, in both directions.
        rtts: round-trip times to add.
        specs: compressors, beside fp32 and nothing sent; by default bf16 and 4 bits, or none where SHARDED.
        ranks: number of ranks.
        batch: windows of 64 tokens a rank.
        bucket_cap_mb: DDP's bucket size.
        watched: steps that doctor looks at.
        rounds: turns of each method.
        steps: steps a turn.
        sharded: a model under FSDP2, in place of one under DDP; with doctor's own methods beside SPECS.
        json: write the figures to this file.
    """
    console = Console(highlight=False)
    lab.need_network()
    config = {
        "specs": list(specs if specs is not None else () if sharded else _SPECS),
        "cap_mb": bucket_cap_mb,
        "batch": batch,
        "watched": watched,
        "rounds": rounds,
        "steps": steps,
        "sharded": sharded,
    }
    results = Results(
        "python -m experiments bench doctor",
        about={"ranks": ranks, "batch": batch, "sharded": sharded, "claimed": _CLAIMED, "cells": {}},
    )
    for rtt in rtts:
        for rate in rates:
            shape: dict[str, Any] = {"rate": rate} | ({} if rtt in ("0ms", "0") else {"rtt": rtt})
            cell = f"{rate}/{rtt}"
            with lab.Network(ranks, **shape) as network, console.status(f"{rate}, +{rtt} ..."):
                answer = run_ranks(predict_and_take, config, ranks, network)
            results.about["cells"][cell] = {k: v for k, v in answer.items() if k not in ("predictions", "times")}
            _add(results, cell, answer)
    errors = [abs(row["value"]) for row in results.results if row["name"].startswith("error/")]
    results.add("largest_error", max(errors), "")
    results.add("within_claimed", sum(error <= _CLAIMED for error in errors) / len(errors), "")
    show("doctor-fsdp" if sharded else "doctor", results, json)
    return 0


def _add(results: Results, cell: str, answer: dict[str, Any]) -> None:
    for title, times in answer["times"].items():
        step = answer["predictions"][title]["step"]
        taken = median(times)
        results.add(f"predicted_step_s/{title}/{cell}", step["value"], "s", low=step["low"], high=step["high"])
        results.add(f"step_s/{title}/{cell}", taken, "s", all=times)
        results.add(f"error/{title}/{cell}", step["value"] / taken - 1, "")


# --- on a rank


def sharded_gpt(*, halved: bool = False, kept: bool = False) -> nn.Module:
    """The demo's GPT under FSDP2, block by block, the same each time and on every rank.

    ``halved``: PyTorch reduces gradients in bf16. ``kept``: weights stay gathered after forward.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # a second that only this is worth

    torch.manual_seed(0)
    model = GPT(GPTConfig())
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if halved else None)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, reshard_after_forward=not kept)
    fully_shard(model, mp_policy=policy)
    return model


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


def trained_by(setting: Setting, cap_mb: float, *, sharded: bool) -> tuple[nn.Module, Callable[[], object]]:
    """A model that trains like this, and what ends its communication."""
    of_shards = setting if isinstance(setting, ShardedSetting) else ShardedSetting(setting.title)
    model = sharded_gpt(halved=of_shards.halved, kept=of_shards.kept) if sharded else gpt(cap_mb)
    if setting == NOTHING and sharded:
        from experiments.papers.qsdp.sharding import cut_short

        cut_short(model, math.inf, math.inf)
    elif setting == NOTHING:
        assert isinstance(model, DistributedDataParallel)
        send_nothing(model)
    if setting.spec is None:
        return model, lambda: None
    if not sharded:
        return model, thinwire.compress(model, setting.spec, skip_if_slower=False).detach
    gradients = of_shards.gradients or setting.spec
    wire = thinwire.compress(model, weights=setting.spec, gradients=gradients, skip_if_slower=False)
    thinwire.prefetch(model)
    return model, wire.detach


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
        models[setting.title], end = trained_by(setting, cap_mb, sharded=sharded)
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
