"""How a handle communicates, whatever kind of model it is for."""

from __future__ import annotations

from dataclasses import dataclass, field

from thinwire.arguments import check_int
from thinwire.collectives import Algorithm, ScatterReduceAllGather
from thinwire.policies import Policy


@dataclass(frozen=True)
class WireSettings:
    """How a `Wire` communicates.

    Raises:
        ValueError: ``seed`` or ``start`` is out of range.
    """

    seed: int = 0
    """Of the random draws."""
    start: int = 0
    """Steps at the beginning that stay uncompressed."""
    skip_if_slower: bool = False
    """Whether to measure, and leave raw what would not be faster compressed."""
    algorithm: Algorithm = field(default_factory=ScatterReduceAllGather)
    """The collective algorithm."""
    adapt: Policy | None = None
    """What changes the plan while training."""

    def __post_init__(self) -> None:
        check_int("start", self.start, 0)
        check_int("seed", self.seed, 0, 2**63 - 1)
