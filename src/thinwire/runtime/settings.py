"""Settings of a handle's communication, for any kind of model."""

from __future__ import annotations

from dataclasses import dataclass, field

from thinwire.arguments import check_int
from thinwire.collectives import Algorithm, ScatterReduceAllGather
from thinwire.policies import Policy


@dataclass(frozen=True)
class WireSettings:
    """Settings of a `Wire`'s communication.

    Raises:
        ValueError: ``seed`` or ``start`` is out of range.
    """

    seed: int = 0
    """Seed of the random draws."""
    start: int = 0
    """Number of steps at the beginning that stay uncompressed."""
    skip_if_slower: bool = False
    """Whether to measure, and leave raw what would not be faster compressed."""
    algorithm: Algorithm = field(default_factory=ScatterReduceAllGather)
    """The collective algorithm."""
    adapt: Policy | None = None
    """Policy that changes the plan during training."""

    def __post_init__(self) -> None:
        check_int("start", self.start, 0)
        check_int("seed", self.seed, 0, 2**63 - 1)
