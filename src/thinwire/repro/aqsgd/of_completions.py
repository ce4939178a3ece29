"""Appendix I: greedy completions of the same prompts, of networks that were fine-tuned in different ways."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.repro.aqsgd.rank import Asked
from thinwire.repro.aqsgd.study import Scale, Study, Work
from thinwire.repro.aqsgd.trainings import Trained
from thinwire.repro.aqsgd.ways import FP32, aqsgd, direct
from thinwire.repro.findings import Finding

_AQSGD, _DIRECT = aqsgd(4, 8), direct(4, 8)
"""As in the appendix."""
_WAYS = (FP32, _AQSGD, _DIRECT)


def completions_work(scale: Scale) -> Work:
    return Work(steps=len(_WAYS) * scale.small.steps, own=frozenset({scale.small}))


def completions(study: Study) -> list[Finding]:
    """From one seed each."""
    asked = Asked(held_out=False, completions=True)
    trainings = study.trainings()
    found = {way.name: trainings.train(study.scale.small, way, 0, study.shower(way.title), asked) for way in _WAYS}
    base = found[FP32.name]
    shares = {way.name: common(base, found[way.name]) for way in _WAYS}
    prompts = [text(row[: base.prompted]) for row in base.text]
    ends = {way.name: [text(row[base.prompted :]) for row in found[way.name].completions] for way in _WAYS}
    return [
        Finding(
            "appendix I",
            "completions",
            shares[_AQSGD.name],
            "",
            "AQ-SGD's greedy completions are those of FP32 more often than DirectQ's are",
            f"the first {100 * shares[_AQSGD.name]:.0f} % of a completion's bytes are FP32's with AQ-SGD, "
            f"{100 * shares[_DIRECT.name]:.0f} % with DirectQ (means of {len(prompts)} prompts)",
            None if shares[_AQSGD.name] == shares[_DIRECT.name] else shares[_AQSGD.name] > shares[_DIRECT.name],
            {
                "prompts": prompts,
                "gold": [text(row[base.prompted :]) for row in base.text],
                "completions": {way.title: ends[way.name] for way in _WAYS},
                "common": shares,
            },
        )
    ]


def common(base: Trained, other: Trained) -> float:
    """The share of a completion up to where it first differs, in the mean."""
    found = [
        _common(one[base.prompted :], two[base.prompted :])
        for one, two in zip(base.completions, other.completions, strict=True)
    ]
    return sum(found) / len(found)


def _common(one: Sequence[int], two: Sequence[int]) -> float:
    differs = [a != b for a, b in zip(one, two, strict=True)]
    return (differs.index(True) if True in differs else len(one)) / len(one)


def text(content: bytes) -> str:
    """What bytes say, where they say something that can be shown."""
    return content.decode("utf-8", errors="replace")
