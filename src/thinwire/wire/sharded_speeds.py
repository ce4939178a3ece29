"""How fast the ranks and links of a sharded model are, and what is left raw therefore: the same on all of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from thinwire.compressors import Compressor, Raw
from thinwire.plan import Plan, Speeds, declined
from thinwire.wire.sharded_engine import AnyEngine, ShardedEngine
from thinwire.wire.speeds import measure_speeds


def slowest_speeds(
    engine: ShardedEngine, compressors: Collection[Compressor], of: AnyEngine | None = None
) -> Speeds | None:
    """Of the links of ``of`` (by default those among which the first unit is sharded), on the slowest of all ranks;
    None if there is nothing to measure."""
    links = of or engine.engines[0]
    if links.transport.world_size == 1 or not compressors:
        return None
    found: list[Speeds] = []
    links.alone(lambda: found.append(measure_speeds(compressors, links.transport, links.topology, links.world)))
    speeds = found[0]
    ordered = sorted(speeds.codec_s, key=str)
    figures = torch.tensor([*(speeds.codec_s[c] for c in ordered), 1 / speeds.bandwidth, speeds.latency_s]).double()
    # Replicas, and the groups of their shards, must come to the same decision.
    for other in engine.all_engines:
        told: list[Tensor] = []
        other.alone(partial(_tell, other, figures, told))
        figures = told[0].amax(0)
    *codecs, per_byte, latency = figures.tolist()
    codec_s = dict(zip(ordered, codecs, strict=True))
    return replace(speeds, codec_s=codec_s, bandwidth=1 / per_byte, latency_s=latency)


def _tell(engine: AnyEngine, figures: Tensor, told: list[Tensor]) -> None:
    told.append(engine.transport.all_gather(figures))


def declined_plan(engine: ShardedEngine) -> Plan:
    """The engine's plan without what would not pay: sums across replicas are judged by the links between these."""
    layers = dict(engine.plan.layers)
    for across, links in ((False, None), (True, engine.across)):
        if across and links is None:
            continue
        mine = {name: c for name, c in layers.items() if name.startswith("across/") == across}
        speeds = slowest_speeds(engine, {c for c in mine.values() if not isinstance(c, Raw)}, links)
        if speeds is not None:
            # What it is weighed against goes by the same messages.
            layers |= declined(Plan(mine), replace(speeds, native=0.0)).layers
    return replace(engine.plan, layers=layers)
