"""What to do, in order, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from thinwire.doctor.measure import Measured
from thinwire.doctor.settings import Care, Prediction, Setting

HARMLESS_SHARE = 0.05
"""Of a step: where less waits for communication, nothing is worth doing."""
LEAST_GAIN = 0.05
"""Of a step, that a setting must be faster by to be advised."""
_CLOSE = 1.05
_TRUSTED = 0.15
"""By how much the prediction of a step as it is may be off before the others are in doubt."""
_ONE_BUCKET_BYTES = 4 << 20


@dataclass(frozen=True)
class Advice:
    """One thing to do."""

    title: str
    why: str
    lines: tuple[str, ...] = ()
    setting: Setting | None = None


@dataclass(frozen=True)
class Verdict:
    """The advice of doctor."""

    sentence: str
    advice: tuple[Advice, ...]
    """Best first; never empty: where nothing helps it is to do nothing."""
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
    return conclude(median(watched.step_s), watched.exposed_share, predictions, first)


def conclude(today: float, share: float, predictions: Sequence[Prediction], first: Sequence[Advice] = ()) -> Verdict:
    """The verdict on steps of ``today`` seconds, of which ``share`` waits for communication. ``first``: what to do
    first, where communication is waited for."""
    verdict = _verdict(today, share, predictions, first)
    return replace(verdict, sentence=verdict.sentence + doubt(verdict.today, predictions))


def doubt(today: float, predictions: Sequence[Prediction]) -> str:
    """A sentence about how far off the prediction of a step as it is comes out; empty if it is close."""
    off = next((p.step.value / today - 1 for p in predictions if p.setting.is_today), 0.0)
    if abs(off) <= _TRUSTED:
        return ""
    return (
        f" In doubt: the same prediction of a step as it is comes out {off:+.0%} off the measured one, so something "
        "here, other work or other traffic, is not in the measurements."
    )


def _verdict(today: float, share: float, predictions: Sequence[Prediction], first: Sequence[Advice]) -> Verdict:
    faster = [
        p
        for p in predictions
        if not p.setting.is_today and p.step.high < today and p.step.value < (1 - LEAST_GAIN) * today
    ]
    ranked = _ranked(faster)
    bound = share > HARMLESS_SHARE
    advice = [*(first if bound else ()), *(_advice(p, today) for p in ranked)]
    nothing = Advice("nothing", _nothing(share, bound=bound))
    if not bound:
        return Verdict(_harmless(today, share), (nothing, *advice[:1]), today)
    if not ranked:
        sentence = (
            f"{share:.0%} of a step ({today:.3g} s) waits for communication, and nothing here would make it at least "
            f"{LEAST_GAIN:.0%} faster."
        )
        return Verdict(sentence, (*advice, nothing), today)
    best = ranked[0]
    sentence = (
        f"Bound by communication: {share:.0%} of a step ({today:.3g} s) waits for it. With {best.setting.title} a step "
        f"would take {best.step.value:.3g} s ({best.step.low:.3g} to {best.step.high:.3g}), "
        f"{today / best.step.value:.1f} times as fast."
    )
    return Verdict(sentence, tuple(advice), today)


def _harmless(today: float, share: float) -> str:
    return f"Not bound by communication: {share:.1%} of a step ({today:.3g} s) waits for it. Leave it as it is."


def _nothing(share: float, *, bound: bool) -> str:
    if not bound:
        return "backward hides the communication, or there is little of it; compression could only add work"
    return "what compression costs here is more than it saves: the processors are slow beside the link"


def _ranked(faster: Sequence[Prediction]) -> list[Prediction]:
    """First, of those close to the fastest that keeps the loss, what changes training least; then by speed."""
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
