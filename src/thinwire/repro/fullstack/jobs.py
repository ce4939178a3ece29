"""Trainings in one process each, several at a time: every rank takes its share of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from thinwire.repro.fullstack.study import Study

Kind = Literal["split", "clusters", "tensors"]


def run_jobs(study: Study, kind: Kind, jobs: Sequence[dict[str, Any]], titles: Sequence[str]) -> list[dict[str, Any]]:
    """What each of ``jobs`` found, in their order; a step of any is one of the part's.

    Raises:
        RankFailed: a rank did not make it.
    """
    contest = study.contest()

    def show(rank: int, event: dict[str, Any]) -> None:
        study.advance(1, f"{titles[event['job']]}: loss {event['loss']:.2f}")

    answers = contest.crew.run({"do": "jobs", "kind": kind, "jobs": list(jobs)}, show, lambda _: None)
    found = {int(at): result for answer in answers for at, result in answer["results"].items()}
    return [found[at] for at in range(len(jobs))]
