"""The results of an examination as JSON, from which the tables in the terminal and the page are made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from thinwire.compressors import Raw
from thinwire.plan.forecast import Curve, Links
from thinwire.runtime.probe import Pair
from thinwire_tools.doctor.advice import Verdict
from thinwire_tools.doctor.forecast import Move
from thinwire_tools.doctor.measure import Measured
from thinwire_tools.doctor.settings import Prediction, ceiling, make_plan
from thinwire_tools.doctor.settings_sharded import ShardedSetting, plan_for
from thinwire_tools.results import Results

_HOUR_S = 3600.0


@dataclass(frozen=True)
class Prices:
    """Price of a step, for costs as in the thesis's Table 3.10."""

    per_hour: float
    """Price of all ranks together for an hour, in any currency."""
    samples_per_step: float
    """Samples that all ranks together process in one step."""
    unit: str = "samples"
    """Unit of the price: ``tokens`` where those were counted."""

    def per_million(self, step_s: float) -> float:
        return 1e6 * self.per_hour / _HOUR_S * step_s / self.samples_per_step


def record(
    measured: Measured,
    predictions: Sequence[Prediction],
    verdict: Verdict,
    *,
    about: dict[str, Any],
    prices: Prices | None = None,
    elsewhere: Sequence[tuple[float, Sequence[Prediction]]] = (),
) -> Results:
    """Return everything that was measured and predicted.

    Args:
        measured: the training, the links and the processors.
        predictions: a step with each setting, over these links.
        verdict: the recommendations.
        about: facts about the training and its link.
        prices: the price of a step, if it is known.
        elsewhere: rates of other links in bytes per second, and predictions over these.
    """
    watched, by_rate = measured.watched, sorted(measured.links, key=lambda links: links.native.per_byte)
    links = by_rate[len(by_rate) // 2]
    least = ceiling(measured)
    rows = [prediction_row(p, prices) for p in predictions]
    codecs = _codecs(measured, predictions, links)
    results = Results(
        "thinwire doctor",
        about=about
        | {
            "ranks": measured.num_ranks,
            "nodes": measured.nodes,
            "cores_each": measured.cores,
            "threads": measured.threads,
            "parameters": watched.parameters,
            "dtypes": list(watched.dtypes),
            "batches_per_step": watched.batches,
            "sharded": measured.sharded,
            "crossings": measured.crossings,
            "interface": measured.interface,
            "line_rate": measured.line_rate,
            "verdict": verdict.sentence,
            "advice": [{"title": a.title, "why": a.why, "lines": list(a.lines)} for a in verdict.advice],
            "today_s": verdict.today,
            "steps_s": list(watched.step_s),
            "compute_s": asdict(least),
            "exposed_share": watched.exposed_share,
            "shared": watched.paces[0].shared,
            "buckets": _buckets(measured),
            "pairs": [asdict(pair) | {"inside": _inside(pair, links)} for pair in measured.pairs],
            "native": _curve(links.native),
            "exchange": _curve(links.exchange),
            "predictions": rows,
            "elsewhere": [
                {"rate": rate, "predictions": [prediction_row(p, prices) for p in others]} for rate, others in elsewhere
            ],
            "codecs": codecs,
            "prices": asdict(prices) if prices else None,
        },
    )
    results.add("step_s/today", verdict.today, "s", all=list(watched.step_s))
    results.add("compute_s", least.value, "s", low=least.low, high=least.high)
    results.add("exposed_share", watched.exposed_share, "")
    for pair in measured.pairs:
        results.add(f"bandwidth/{pair.first}-{pair.second}", pair.bandwidth, "B/s")
        results.add(f"latency_s/{pair.first}-{pair.second}", pair.latency_s, "s")
    for row in rows:
        bounds = {"low": row["low_s"], "high": row["high_s"]}
        results.add(f"predicted_step_s/{row['title']}", row["step_s"], "s", spec=row["spec"], **bounds)
        if row["cost"] is not None:
            assert prices is not None
            results.add(f"cost/{row['title']}", row["cost"], f"per million {prices.unit}")
    for row in codecs:
        results.add(f"encode/{row['spec']}", row["encode"], "B/s")
        results.add(f"decode/{row['spec']}", row["decode"], "B/s")
    return results


def _inside(pair: Pair, links: Links) -> bool:
    """Whether two ranks share a node while there are other nodes, so that their link is not the line."""
    nodes = links.legs.world.nodes if links.legs is not None else range(links.num_ranks)
    return nodes[pair.first] == nodes[pair.second]


def _curve(curve: Curve) -> dict[str, Any]:
    return {"points": [list(point) for point in curve.points], "bandwidth": curve.bandwidth}


def _buckets(measured: Measured) -> list[dict[str, Any]]:
    """Return the buckets of the middle one of the measured steps."""
    paces, rows = measured.watched.paces, []
    for i, bucket in enumerate(paces[0].buckets):
        ready = median(pace.buckets[i].ready_s for pace in paces)
        alone = median(took[i] for took in measured.watched.bucket_s)
        kind = bucket.kind if isinstance(bucket, Move) else "all_reduce"
        rows.append({"kind": kind, "bytes": bucket.num_bytes, "ready_s": ready, "took_s": alone})
    return rows


def prediction_row(p: Prediction, prices: Prices | None) -> dict[str, Any]:
    cost = None if prices is None else prices.per_million(p.step.value)
    return {
        "title": p.setting.title,
        "spec": p.setting.spec,
        "algorithm": p.setting.algorithm,
        "times": p.setting.times,
        "every": p.setting.every,
        "care": p.setting.care.name.lower(),
        "step_s": p.step.value,
        "low_s": p.step.low,
        "high_s": p.step.high,
        "sent_bytes": p.sent_bytes,
        "wait_share": p.wait_share,
        "lines": list(p.setting.lines),
        "cost": cost,
    }


def _codecs(measured: Measured, predictions: Sequence[Prediction], links: Links) -> list[dict[str, Any]]:
    """Return each compressor's speed in bytes of fp32, and the ratio above which its speed pays (FFT paper, eq. 4)."""
    rows, uncompressed = [], next(p.sent_bytes for p in predictions if p.setting.is_today)
    for p in predictions:
        if p.setting.spec is None or p.setting.every or p.setting.algorithm != "sra":
            continue
        if isinstance(p.setting, ShardedSetting):
            plan = plan_for(p.setting, measured.watched.shapes)
        else:
            plan = make_plan(p.setting, measured)
        lossy = [compressor for compressor in plan.layers.values() if not isinstance(compressor, Raw)]
        if not lossy:
            continue
        compressor = max(lossy, key=lossy.count)
        encode, decode = measured.codecs[compressor]
        both = measured.codec_s(compressor) / 4
        # The cost of a byte without compression: it crosses the link so many times.
        bandwidth = links.native.bandwidth / measured.crossings
        ratio = minimal_ratio(bandwidth, both)
        rows.append(
            {
                "title": p.setting.title,
                "spec": str(compressor),
                "encode": 4 / encode,
                "decode": 4 / decode,
                "seconds_per_byte": both,
                "ratio": uncompressed / p.sent_bytes if p.sent_bytes else 1.0,
                "minimal_ratio": ratio if ratio < float("inf") else None,
                "useful_bandwidth": useful_bandwidth(both) * measured.crossings,
            }
        )
    return rows


def minimal_ratio(bandwidth: float, both_ways_s_per_byte: float) -> float:
    """Return the least compression ratio that makes steps faster on a link of ``bandwidth`` bytes per second: equation
    4 of the FFT paper (section 3.3).

    It is infinite where none does. ``both_ways_s_per_byte``: seconds to compress and decompress a byte.
    """
    spent = bandwidth * both_ways_s_per_byte
    return 1 / (1 - spent) if spent < 1 else math.inf


def useful_bandwidth(both_ways_s_per_byte: float) -> float:
    """Return the bandwidth, in bytes per second, above which no ratio makes steps faster (where equation 4 ends)."""
    return 1 / both_ways_s_per_byte
