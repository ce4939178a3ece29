"""From a watched pipeline to what is measured, and the results as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from statistics import fmean, median
from typing import Any

from thinwire.compat import group_timeout
from thinwire.integrations.transports import bare_transport
from thinwire.runtime.probe import measure_codecs, measure_pairs
from thinwire_tools.doctor.advice import conclude
from thinwire_tools.doctor.observer_pipeline import PipelineObserver
from thinwire_tools.doctor.record import Prices, prediction_row
from thinwire_tools.doctor.settings import Prediction
from thinwire_tools.doctor.settings_pipeline import (
    MeasuredPipeline,
    PipelineSetting,
    pipeline_compressors,
    pipeline_settings,
    predict_pipeline,
    simulated,
)
from thinwire_tools.planner.command import timeline
from thinwire_tools.results import Results


def measure_pipeline(
    observer: PipelineObserver, specs: Sequence[str] = ()
) -> tuple[MeasuredPipeline, list[PipelineSetting]]:
    """Measure links and codecs, between two steps and on every rank of the pipeline; and the settings that there are.

    Raises:
        DoctorError: what was watched makes no steps that can be predicted.
        TransportError: a rank is gone or silent.
    """
    watched, timeout = observer.result(), group_timeout(observer.group)
    settings = pipeline_settings(watched.schedule, specs)
    transport = bare_transport(observer.group, timeout)
    try:
        pairs = tuple(measure_pairs(transport))
        codecs = measure_codecs(pipeline_compressors(settings), transport)
    finally:
        transport.close()
    return MeasuredPipeline(watched, pairs, codecs), settings


def record_pipeline(
    measured: MeasuredPipeline,
    predictions: Sequence[Prediction],
    *,
    about: dict[str, Any],
    prices: Prices | None = None,
) -> Results:
    """Everything that was measured and predicted, and the verdict."""
    watched = measured.watched
    middle = sorted(watched.stages, key=lambda stages: sum(s.forward_s + s.backward_s for s in stages))[
        len(watched.stages) // 2
    ]
    today_setting = next(p.setting for p in predictions if p.setting.is_today)
    assert isinstance(today_setting, PipelineSetting)
    now = simulated(today_setting, measured, middle)
    today = median(watched.step_s)
    free = now.unbound.step_s + measured.rest_s
    share = max(0.0, 1 - free / today)
    at_once = replace(measured, codecs=dict.fromkeys(measured.codecs, (0.0, 0.0)))

    def at_no_cost(prediction: Prediction) -> Prediction:
        assert isinstance(prediction.setting, PipelineSetting)
        return predict_pipeline(prediction.setting, at_once)

    verdict = conclude(today, share, predictions, at_no_cost)
    rows = [prediction_row(p, prices) for p in predictions]
    results = Results(
        "thinwire doctor",
        about=about
        | {
            "ranks": len(watched.schedule.ranks),
            "parameters": watched.parameters,
            "schedule": watched.schedule.name,
            "stages": watched.schedule.num_stages,
            "micro_batches": watched.schedule.num_chunks,
            "verdict": verdict.sentence,
            "advice": [{"title": a.title, "why": a.why, "lines": list(a.lines)} for a in verdict.advice],
            "today_s": today,
            "steps_s": list(watched.step_s),
            "compute_s": {"value": free, "low": free, "high": free},
            "rest_s": measured.rest_s,
            "bubble_share": fmean(now.bubble_s) / today,
            "exposed_share": share,
            "line_rate": None,
            "pairs": [asdict(pair) | {"inside": False} for pair in measured.pairs],
            "stage_s": [asdict(stage) for stage in middle],
            "boundaries": _boundaries(measured, now),
            "timeline": timeline(now),
            "predictions": rows,
            "elsewhere": [],
            "prices": asdict(prices) if prices else None,
        },
    )
    results.add("step_s/today", today, "s", all=list(watched.step_s))
    results.add("compute_s", free, "s")
    results.add("exposed_share", share, "")
    results.add("bubble_share", fmean(now.bubble_s) / today, "")
    for row in rows:
        bounds = {"low": row["low_s"], "high": row["high_s"]}
        results.add(f"predicted_step_s/{row['title']}", row["step_s"], "s", spec=row["spec"], **bounds)
    return results


def _boundaries(measured: MeasuredPipeline, now: Any) -> list[dict[str, Any]]:
    by_link = measured.specs(PipelineSetting("", by_link=True))
    rows = []
    for b, size in enumerate(measured.watched.activation_bytes):
        pair, stages = measured.pair(b), now.stages
        rows.append(
            {
                "bytes": size,
                "rate": pair.bandwidth,
                "latency_s": pair.latency_s,
                "takes_s": size / pair.bandwidth + pair.latency_s,
                "computes_s": stages[b].forward_s + stages[b].backward_s,
                "exposed_s": now.exposed_at(b),
                "forward": by_link[b][0],
                "backward": by_link[b][1],
            }
        )
    return rows
