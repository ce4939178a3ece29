"""Advice of doctor: settings in order, with reasons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from thinwire_tools.doctor.measure import Measured
from thinwire_tools.doctor.settings import Care, Prediction, Setting
from thinwire_tools.doctor.settings_sharded import predict_step
from thinwire_tools.lab.units import duration

HARMLESS_SHARE = 0.05
"""Share of the step time waiting for communication below which nothing is worth doing."""
LEAST_GAIN = 0.05
"""Smallest share of the step time that a setting must save to be recommended."""
_CLOSE = 1.05
_TRUSTED = 0.15
"""Relative error of the prediction of a step as it is beyond which the others are in doubt."""
_ONE_BUCKET_BYTES = 4 << 20


@dataclass(frozen=True)
class Advice:
    """One recommendation."""

    title: str
    why: str
    lines: tuple[str, ...] = ()
    setting: Setting | None = None


@dataclass(frozen=True)
class Verdict:
    """The advice of doctor."""

    sentence: str
    advice: tuple[Advice, ...]
    """Recommendations, best first; never empty: where nothing helps it is to do nothing."""
    today: float
    """Seconds of a step now."""


_CARE = {
    Care.NONE: "the same numbers",
    Care.MEMORY: "the same numbers; each rank holds all weights until their gradients are there",
    Care.ROUNDED: "gradients in 16 bits, exact enough for nearly everything",
    Care.KEPT: "kept the loss in the comparisons of the README",
    Care.BATCH: "a larger batch between two updates, so the learning rate may want another value",
    Care.LOCAL: "workers train alone in between: compare the loss at the end of a training (docs/local.md)",
    Care.CHECK: "may change the loss: try it with `thinwire compare` first",
}


def verdict(measured: Measured, predictions: Sequence[Prediction]) -> Verdict:
    """Return the verdict on measured steps and predictions, warning where the prediction of today's step is off."""
    watched = measured.watched
    buckets = watched.paces[0].buckets
    first: tuple[Advice, ...] = ()
    if not measured.sharded and len(buckets) == 1 and buckets[0].num_bytes >= _ONE_BUCKET_BYTES:
        cap = max(1, round(buckets[0].num_bytes / 5 / 2**20))
        why = "all gradients are in one DDP bucket, so nothing is sent before backward ends; the same numbers"
        first = (Advice("smaller buckets", why, (f"DistributedDataParallel(model, bucket_cap_mb={cap})",)),)
    at_once = replace(measured, codecs=dict.fromkeys(measured.codecs, (0.0, 0.0)))
    return conclude(
        median(watched.step_s), watched.exposed_share, predictions, lambda p: predict_step(p.setting, at_once), first
    )


def conclude(
    today: float,
    share: float,
    predictions: Sequence[Prediction],
    free: Callable[[Prediction], Prediction],
    first: Sequence[Advice] = (),
) -> Verdict:
    """Return the verdict on steps of ``today`` seconds, of which ``share`` waits for communication.

    ``free``: a prediction as if compressing took no time. ``first``: recommendations to put first, where communication
    is waited for.
    """
    as_is = next(p for p in predictions if p.setting.is_today)
    others = [p for p in predictions if not p.setting.is_today]
    doubtful = _doubt(as_is, today)
    faster = [p for p in others if _faster(p, as_is, today)]
    ranked, step = _ranked(faster), duration(today)
    if share <= HARMLESS_SHARE:
        nothing = Advice("nothing", "backward hides the communication, or there is little of it")
        sentence = f"Not bound by communication: {share:.1%} of a step ({step}) waits for it. Leave it as it is."
        return Verdict(sentence + doubtful, (nothing, *(_advice(p, today) for p in ranked[:1])), today)
    advice = [*first, *(_advice(p, today) for p in ranked)]
    waits = f"{share:.0%} of a step ({step}) waits for communication"
    if not ranked:
        least = min((p for p in others if _may_be_faster(p, as_is, today)), key=lambda p: p.step.value, default=None)
        if least is not None:
            ratio = least.relative_to(as_is)
            sentence = (
                f"{waits}. Whether anything here would make it at least {LEAST_GAIN:.0%} faster is too noisy to tell: "
                f"with {least.setting.title} a step would take {duration(least.step.value)}, which is "
                f"{ratio.low:.0%} to {ratio.high:.0%} of the same step as it is."
            )
            return Verdict(sentence + doubtful, (*advice, _AGAIN), today)
        sentence = f"{waits}, and nothing here would make it at least {LEAST_GAIN:.0%} faster."
        return Verdict(sentence + doubtful, (*advice, Advice("nothing", _why_nothing(others, free, today))), today)
    best = ranked[0]
    sentence = (
        f"Bound by communication: {share:.0%} of a step ({step}) waits for it. With {best.setting.title} a step "
        f"would take {duration(best.step.value)} ({duration(best.step.low)} to {duration(best.step.high)}), "
        f"{today / best.step.value:.1f} times as fast."
    )
    return Verdict(sentence + doubtful, tuple(advice), today)


def _doubt(as_is: Prediction, today: float) -> str:
    """Return a sentence on the error of the prediction of a step as it is; empty if that is small."""
    off = as_is.step.value / today - 1
    if abs(off) <= _TRUSTED:
        return ""
    return (
        f" In doubt: the same prediction of a step as it is comes out {off:+.0%} off the measured one, so something "
        "here, other work or other traffic, is not in the measurements."
    )


def _faster(p: Prediction, as_is: Prediction, today: float) -> bool:
    """Whether a setting makes the measured step faster by enough, and is faster in all but 5 % of the draws."""
    return p.step.value < (1 - LEAST_GAIN) * today and p.relative_to(as_is).high < 1


def _may_be_faster(p: Prediction, as_is: Prediction, today: float) -> bool:
    """Whether the measurements allow that a setting makes a step faster by enough."""
    return min(p.step.value, p.relative_to(as_is).low * today) < (1 - LEAST_GAIN) * today


_AGAIN = Advice("measure again", "with more --steps, and with nothing else on these machines and links meanwhile")


def _why_nothing(others: Sequence[Prediction], free: Callable[[Prediction], Prediction], today: float) -> str:
    """Return the reason why no setting helps, as far as it follows from steps whose compression is free."""
    best = min((free(p).step.value for p in others if p.setting.spec and not p.setting.every), default=today)
    if best < (1 - LEAST_GAIN) * today:
        return (
            f"if compressing took no time a step would take {duration(best)}: it costs more here than it saves, the "
            "processors are slow beside the link"
        )
    return f"even if compressing took no time, none of the settings would make a step {LEAST_GAIN:.0%} faster"


def _ranked(faster: Sequence[Prediction]) -> list[Prediction]:
    """Return first, of those close to the fastest that keeps the loss, what changes training least; then by speed."""
    safe = [p for p in faster if p.setting.care <= Care.KEPT]
    by_speed = sorted(faster, key=lambda p: (p.setting.care > Care.KEPT, p.step.value))
    if not safe:
        return by_speed
    close = min(p.step.value for p in safe) * _CLOSE
    first = min((p for p in safe if p.step.value <= close), key=lambda p: (p.setting.care, p.step.value))
    return [first, *(p for p in by_speed if p != first)]


def _advice(p: Prediction, today: float) -> Advice:
    why = f"{today / p.step.value:.1f} times as fast; {_CARE[p.setting.care]}"
    return Advice(p.setting.title, why, p.setting.lines, p.setting)
