"""Trainings that never were, for judgments."""

from __future__ import annotations

from typing import Any

from experiments.papers.aqsgd.trainings import Trained


def run(losses: list[float], **more: Any) -> Trained:
    """A training of one step an epoch, each of a second."""
    known = {
        "steps_per_epoch": 1,
        "losses": tuple(losses),
        "held_out": (9.0, *losses),
        "right": (0.5, 0.5),
        "step_s": tuple(1.0 for _ in losses),
        "sent_bytes": 1.0,
        "dense_bytes": 4.0,
        "epochs": (),
        "alike": True,
        "start": 0,
        "kept_samples": 1,
    }
    return Trained(**{**known, **more})
