"""Parameters that change with the step: pairs of a step and the value from that step on."""

from __future__ import annotations

from typing import TypeVar

from thinwire.arguments import check_int, check_number

T = TypeVar("T")

Density = float | tuple[tuple[int, float], ...]
"""A share of a layer's elements, or a schedule: ``((0, 0.25), (100, 0.01))`` is 0.25 up to step 100, then 0.01."""

Rank = int | tuple[tuple[int, int], ...]
"""A number of columns, or a schedule: ``((0, 8), (1000, 4))`` is 8 up to step 1000, then 4."""


def stages(name: str, value: T | tuple[tuple[int, T], ...]) -> tuple[tuple[int, T], ...]:
    """Return the pairs of a schedule; of a single value the one that begins at step 0.

    Raises:
        ValueError: the steps are not ascending from 0.
    """
    if not isinstance(value, tuple):
        return ((0, value),)
    steps = [stage[0] for stage in value if isinstance(stage, tuple) and len(stage) == 2]
    if len(steps) != len(value) or steps != sorted(set(steps)) or steps[:1] != [0]:
        raise ValueError(f"{name} must be like ((0, 0.9), (1000, 0.1)), steps ascending from 0; not {value!r}")
    return value


def stage_at(schedule: tuple[tuple[int, T], ...], step: int) -> T:
    """Return the value of the stage to which ``step`` belongs."""
    return [value for begin, value in schedule if begin <= max(step, 0)][-1]


def check_density(value: Density) -> None:
    """Raise an error unless it is a share in (0, 1], or a schedule of such shares."""
    for _, share in stages("density", value):
        check_number("density", share, above=0, high=1)


def density_at(value: Density, step: int) -> float:
    """Return the share at ``step``."""
    return stage_at(stages("density", value), step)


def check_rank(value: Rank) -> None:
    """Raise an error unless it is a positive integer, or a schedule of such integers."""
    for _, rank in stages("rank", value):
        check_int("rank", rank, 1)


def rank_at(value: Rank, step: int) -> int:
    """Return the rank at ``step``."""
    return stage_at(stages("rank", value), step)
