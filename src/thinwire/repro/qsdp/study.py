"""What every part of the thesis's chapter is made from: trainings, contests, the folder, the progress."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from thinwire.repro.cgx.contest import Place, shown_rate
from thinwire.repro.cgx.models import Model
from thinwire.repro.parts import Parted
from thinwire.repro.progress import Screen
from thinwire.repro.qsdp.contest import ShardedContest
from thinwire.repro.qsdp.sizes import SIZES, SIZES_SMOKE, TIMED, TIMED_SMOKE, Size, SizeName, timed
from thinwire.repro.qsdp.trainings import OnStep, Trained, Trainings
from thinwire.repro.qsdp.ways import Way
from thinwire.repro.tasks import GPTTask

NUM_RANKS = 2
"""Each with a core of its own; tables and figures are of so many unless they say more."""
MORE_RANKS = 4


@dataclass(frozen=True)
class Scale:
    """How much is measured: ``seeds`` trainings of what quality is judged of, ``rounds`` turns of every way that is
    timed. Up to ``margin`` of the perplexity may be lost, and a training still ends at the same."""

    sizes: tuple[Size, ...] = SIZES
    timed: GPTTask = TIMED
    num_micro: int = 4
    """Micro-batches of a step that is timed: 5 weight exchanges to one gradient exchange."""
    seeds: int = 3
    margin: float = 0.01
    rounds: int = 8
    ratio_rounds: int = 5
    """Of figure C.1 and table C.2, which have many ways; a verdict takes 5."""
    rates: tuple[str, ...] = ("100mbit", "300mbit", "1gbit", "10gbit")
    fast_steps: int = 2
    """Steps of a turn over links of 1 Gbit/s and more."""
    slow_rate: str = "100mbit"
    """Of figure 5.2, and between nodes."""
    ratio_rate: str = "300mbit"
    """Of figure C.1 and table C.2."""
    errors_every: int = 8
    """Steps between two looks at the compression error (figures C.2 and C.3)."""
    count_steps: int = 4
    regression_seeds: int = 10
    regression_steps: int = 400
    regression_rows: int = 4000

    def size(self, name: SizeName) -> Size:
        return next(size for size in self.sizes if size.name == name)


SMOKE = Scale(
    SIZES_SMOKE,
    TIMED_SMOKE,
    num_micro=2,
    seeds=1,
    rounds=1,
    ratio_rounds=1,
    rates=("100mbit", "1gbit"),
    fast_steps=1,
    errors_every=4,
    count_steps=1,
    regression_seeds=2,
    regression_steps=20,
    regression_rows=200,
)

Training = tuple[SizeName, int, Way, int]
"""Size, number of ranks, way and seed."""


def trainings(scale: Scale, name: SizeName, ways: Sequence[Way], num_ranks: int = NUM_RANKS) -> frozenset[Training]:
    """Of each way from every seed."""
    return frozenset((name, num_ranks, way, seed) for way in ways for seed in range(scale.seeds))


@dataclass(frozen=True)
class Work:
    """What a part makes: trainings, which parts share, and further steps of its own."""

    trainings: frozenset[Training] = frozenset()
    steps: int = 0

    def steps_after(self, scale: Scale, done: frozenset[Training]) -> int:
        """Steps that it takes where ``done`` are there already."""
        return self.steps + sum(scale.size(name).task.steps for name, *_ in self.trainings - done)


@dataclass
class Study(Parted):
    """One run of the command; a context manager. ``emulated``: slow links are, so that times over them mean something.

    ``rate``: of the links, where one was asked for, instead of the scale's.
    """

    scale: Scale
    out: Path
    screen: Screen
    emulated: bool
    rate: str | None = None
    _trainings: dict[int, Trainings] = field(default_factory=dict)
    _contests: dict[tuple[Place, int], ShardedContest] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        self._stack.close()
        self._trainings.clear()
        self._contests.clear()

    def picture(self, name: str) -> Path:
        return self.out / f"qsdp-{name}.svg"

    @property
    def seeds(self) -> range:
        return range(self.scale.seeds)

    @property
    def rates(self) -> tuple[str | None, ...]:
        """Of the links that times are taken over, the slowest first; None for loopback."""
        if not self.emulated:
            return (None,)
        return (self.rate,) if self.rate else self.scale.rates

    def rate_or(self, usual: str) -> str | None:
        """Of the links of a part that takes one rate, ``usual`` unless another was asked for."""
        return (self.rate or usual) if self.emulated else None

    def verdict(self, holds: bool | None) -> bool | None:
        """``holds`` where it rests on times over links that are really slow."""
        return holds if self.emulated else None

    @property
    def model(self) -> Model:
        """What is timed."""
        return timed(self.scale.timed)

    @property
    def num_modules(self) -> int:
        """Of what is timed, those that FSDP2 shards by themselves: the blocks, and the root."""
        return self.scale.timed.model.layers + 1

    def train(self, name: SizeName, way: Way, num_ranks: int = NUM_RANKS) -> list[Trained]:
        """A training from every seed, unless it has been.

        Raises:
            RankFailed: a rank did not make it.
        """
        size = self.scale.size(name)
        if num_ranks not in self._trainings:
            self._trainings[num_ranks] = self._stack.enter_context(Trainings(num_ranks))
        made = self._trainings[num_ranks]
        return [made.train(size.task, way, seed, self.shower(f"{size.title}, {way.title}")) for seed in self.seeds]

    def shower(self, title: str) -> OnStep:
        """Shows steps of a training as steps of the part."""
        return lambda _, loss: self.advance(1, f"{title}: loss {loss:.2f}")

    def contest(self, place: Place = "links", num_ranks: int = NUM_RANKS) -> ShardedContest:
        """Ranks that are timed."""
        key = place, num_ranks
        if key not in self._contests:
            made = ShardedContest(place, emulated=self.emulated, num_ranks=num_ranks, num_micro=self.scale.num_micro)
            self._contests[key] = self._stack.enter_context(made)
        return self._contests[key]


def where(rate: str | None) -> str:
    """A link, for people."""
    return "over loopback" if rate is None else f"over {shown_rate(rate)}"
