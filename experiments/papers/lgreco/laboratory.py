"""Tables 3.8 and 4.5 and figure 3.8 on recorded gradients: policies at the same error, or at the same bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from statistics import fmean
from typing import Any

from experiments.framework.claims import Claim, Row, Rows, Rule
from experiments.framework.verdicts import Judgement, exceeds, unsound
from experiments.papers.lgreco.study import NAMES, LGrecoScale, LGrecoStudy
from experiments.policies.command import about, results
from experiments.policies.record import num_steps
from experiments.policies.replay import replay
from thinwire.compare.statistics import estimate

_CHAPTER_3 = ("kmeans", "bayes", "linear", "accordion")
_TITLES = {"lgreco": "L-GreCo", "kmeans": "k-means", "bayes": "Bayes", "linear": "Linear", "accordion": "Accordion"}


def steps(scale: LGrecoScale) -> int:
    """Of the trainings that are recorded, and a few for each family that is replayed."""
    return num_steps({name: scale.task(name) for name in NAMES}, scale.recorded) + 3 * len(NAMES) * scale.recorded.seeds


def laboratory(study: LGrecoStudy) -> list[Row]:
    """What policies save on the recorded gradients, training by training."""
    found = replayed(study)
    return [
        _row("table 3.8, replayed", "kmeans_saves_most", found, "gpt/bits", "fewer_bytes", _CHAPTER_3),
        _row("figure 3.8a", "kmeans_errs_least_at_equal_bytes", found, "gpt/bits", "less_error", _CHAPTER_3),
        _row("figure 3.8b", "lgreco_saves_more_later", found, "gpt/bits", "fewer_bytes_later", ("lgreco", "kmeans")),
        _row("table 4.5, replayed", "lgreco_saves_more", found, "gpt/powersgd", "fewer_bytes", ("lgreco", "kmeans")),
    ]


def replayed(study: LGrecoStudy) -> Mapping[str, Mapping[str, Any]]:
    """The rows of `policies replay` by name: those of ``policies.json`` in the folder of the pictures if they are of
    this recording, else made and written there."""
    recording, path = study.recording(), study.out / "policies.json"
    if path.exists():
        known = json.loads(path.read_text())
        if known["about"] == about(recording):
            return {row["name"]: row for row in known["results"]}
    benches = replay(recording, on_step=lambda now: study.advance(1, now))
    found = results(benches, recording)
    found.write(path)
    return {row["name"]: row for row in found.results}


def _row(figure: str, name: str, found: Mapping[str, Any], where: str, key: str, methods: tuple[str, ...]) -> Row:
    """One ratio to uniform compression a training, by method; nothing of a method that has none."""
    ratios = {method: (found[f"{where}/{method}"][key] or {"by_training": ()})["by_training"] for method in methods}
    first = ratios[methods[0]]
    return Row(figure, name, fmean(first) if first else math.nan, "x", {"ratios": ratios})


def _logs(row: Mapping[str, Any], method: str) -> list[float]:
    return [math.log(value) for value in row["ratios"][method]]


def _text(row: str, what: str) -> Callable[[Rows], str]:
    def text(rows: Rows) -> str:
        parts = []
        for method in rows[row]["ratios"]:
            logs = _logs(rows[row], method)
            parts.append(f"{_TITLES[method]} {math.exp(fmean(logs)):.2f}x" if logs else f"{_TITLES[method]} nothing")
        return f"{what}: {', '.join(parts)}"

    return text


def _most(row: str, effect: float | None = None) -> Rule:
    """The first method's ratio is above all others', training by training."""

    def rule(rows: Rows) -> Judgement:
        columns = [_logs(rows[row], method) for method in rows[row]["ratios"]]
        if not all(columns) or len({len(column) for column in columns}) > 1:
            return unsound("the policies were not all replayed on the same trainings")
        return exceeds(estimate([ours - max(others) for ours, *others in zip(*columns, strict=True)]), effect)

    return rule


def claims() -> Iterator[Claim]:
    """What the recorded gradients judge."""
    fewer = "times fewer bytes than uniform of the same error"
    yield Claim(
        "table 3.8, replayed",
        "kmeans_saves_most",
        "k-means compresses more than Bayes, Linear and Accordion (1.47x against 1.34x, 1.15x and 1.21x)",
        _text("kmeans_saves_most", f"{fewer}, GPT, bits"),
        _most("kmeans_saves_most", math.log(1.47 / 1.34)),
    )
    row = "kmeans_errs_least_at_equal_bytes"
    yield Claim(
        "figure 3.8a",
        row,
        "k-means has the lowest compression error of the policies of chapter 3 (section 3.7.3)",
        _text(row, "times less error than uniform of the same bytes, GPT, bits"),
        _most(row),
    )
    row = "lgreco_saves_more_later"
    yield Claim(
        "figure 3.8b",
        row,
        "L-GreCo compresses more than k-means, within the same error (section 4.6.3: up to 33 %)",
        _text(row, f"on the snapshot after the one that a plan was made on, {fewer}, GPT, bits"),
        _most(row),
    )
    yield Claim(
        "table 4.5, replayed",
        "lgreco_saves_more",
        "L-GreCo compresses more than k-means (23.5x against 21.6x)",
        _text("lgreco_saves_more", f"{fewer}, GPT, PowerSGD"),
        _most("lgreco_saves_more", math.log(23.5 / 21.6)),
    )
