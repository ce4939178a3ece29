"""What doctor found, as the JSON that every command writes: the terminal's tables and the page are made from it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from thinwire.compressors import Compressor, Raw
from thinwire.doctor.advice import Verdict
from thinwire.doctor.choices import Choice, Prediction, ceiling, plan_of
from thinwire.doctor.choices_sharded import ShardedChoice, plan_for
from thinwire.doctor.measure import Measured
from thinwire.plan.forecast import Curve, Links
from thinwire.plan.forecast_sharded import Move
from thinwire.repro.fft.cost import minimal_ratio, useful_bandwidth
from thinwire.results import Results
from thinwire.wire.link import Pair

_HOUR_S = 3600.0


@dataclass(frozen=True)
class Prices:
    """What a step is worth, for costs as in the thesis's Table 3.10."""

    per_hour: float
    """Of all ranks together, in any currency."""
    samples_per_step: float
    """That all ranks together take in one step."""
    unit: str = "samples"
    """``tokens`` where those were counted."""

    def per_million(self, step_s: float) -> float:
        """Price of a million samples or tokens."""
        return 1e6 * self.per_hour / _HOUR_S * step_s / self.samples_per_step


def record(
    measured: Measured,
    predictions: Sequence[Prediction],
    verdict: Verdict,
    *,
    about: dict[str, Any],
    prices: Prices | None = None,
) -> Results:
    """Everything that was measured and foretold. ``about``: what was trained, and over which link."""
    watched, links = measured.watched, _middle(measured.links)
    least = ceiling(measured)
    rows = [_prediction(p, prices) for p in predictions]
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


def read(path: Path) -> dict[str, Any]:
    """What a rank wrote."""
    return json.loads(path.read_text())


def write(path: Path, found: dict[str, Any]) -> None:
    """Write a record that was read."""
    path.write_text(json.dumps(found, indent=1) + "\n")


def _inside(pair: Pair, links: Links) -> bool:
    """Whether two ranks share a node beside other nodes, so that their link is not the line."""
    nodes = links.legs.world.nodes if links.legs is not None else range(links.num_ranks)
    return nodes[pair.first] == nodes[pair.second]


def _middle(links: Sequence[Links]) -> Links:
    return sorted(links, key=lambda of: of.native.per_byte)[len(links) // 2]


def _curve(curve: Curve) -> dict[str, Any]:
    return {"points": [list(point) for point in curve.points], "bandwidth": curve.bandwidth}


def _buckets(measured: Measured) -> list[dict[str, Any]]:
    """Of the middle one of the measured steps."""
    paces, found = measured.watched.paces, []
    for i, bucket in enumerate(paces[0].buckets):
        ready = median(pace.buckets[i].ready_s for pace in paces)
        alone = median(took[i] for took in measured.watched.bucket_s)
        kind = bucket.kind if isinstance(bucket, Move) else "all_reduce"
        found.append({"kind": kind, "bytes": bucket.num_bytes, "ready_s": ready, "took_s": alone})
    return found


def _prediction(p: Prediction, prices: Prices | None) -> dict[str, Any]:
    cost = None if prices is None else prices.per_million(p.step.value)
    return {
        "title": p.choice.title,
        "spec": p.choice.spec,
        "topology": p.choice.topology,
        "times": p.choice.times,
        "care": p.choice.care.name.lower(),
        "step_s": p.step.value,
        "low_s": p.step.low,
        "high_s": p.step.high,
        "sent_bytes": p.sent_bytes,
        "wait_share": p.wait_share,
        "lines": list(p.choice.lines),
        "cost": cost,
    }


def _codecs(measured: Measured, predictions: Sequence[Prediction], links: Links) -> list[dict[str, Any]]:
    """Each compressor's speed in bytes of fp32, and the ratio from which on one of its speed pays (S3, equation 4)."""
    found = []
    for p in predictions:
        if p.choice.spec is None or p.choice.topology != "sra":
            continue
        compressor = _main(_compressors(p.choice, measured))
        if compressor is None:
            continue
        encode, decode = measured.codecs[compressor]
        both = measured.codec_s(compressor) / 4
        # What a byte costs without compression: it crosses the link so many times.
        bandwidth = links.native.bandwidth / measured.crossings
        ratio = minimal_ratio(bandwidth, both)
        uncompressed = sent_bytes_of_today(predictions)
        found.append(
            {
                "title": p.choice.title,
                "spec": str(compressor),
                "encode": 4 / encode,
                "decode": 4 / decode,
                "seconds_per_byte": both,
                "ratio": uncompressed / p.sent_bytes if p.sent_bytes else 1.0,
                "minimal_ratio": ratio if ratio < float("inf") else None,
                "useful_bandwidth": useful_bandwidth(both) * measured.crossings,
            }
        )
    return found


def sent_bytes_of_today(predictions: Sequence[Prediction]) -> float:
    """By a rank in a step, without compression."""
    return next(p.sent_bytes for p in predictions if p.choice.is_today)


def _compressors(choice: Choice, measured: Measured) -> Iterable[Compressor]:
    """Of layers, in the order in which they travel."""
    if not isinstance(choice, ShardedChoice):
        return plan_of(choice, measured).layers.values()
    return plan_for(choice, measured.watched.shapes).layers.values()


def _main(compressors: Iterable[Compressor]) -> Compressor | None:
    """The one that is not raw, if there is one."""
    found = [compressor for compressor in compressors if not isinstance(compressor, Raw)]
    return max(found, key=found.count) if found else None
