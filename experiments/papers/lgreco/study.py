"""What every part of the thesis's chapter is made from: trainings, timings and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from experiments.framework.methods import Method
from experiments.framework.replay import Compute
from experiments.framework.study import PartWatcher, Scale, Study
from experiments.framework.timing import SeparateRuns, Times
from experiments.papers.lgreco.gradients import Extent, Training
from experiments.papers.lgreco.methods import PICTURES, PICTURES_SMOKE, Name, timed
from experiments.tasks.images import ImageTask, Model
from experiments.tasks.words import WORDS, WORDS_SMOKE, WordsTask
from thinwire_tools.compare.comparison import Comparison, Run
from thinwire_tools.compare.data import standard_library
from thinwire_tools.compare.paired import Runs, compare_runs
from thinwire_tools.compare.variants import CONTROL_RULES, Variant

NUM_RANKS = 2
"""Of trainings, each with a core of its own."""
CONTROL = str(Variant.parse(CONTROL_RULES))
"""One bit with one scale for a layer, unless it is huge: training must suffer from it."""
NAMES: tuple[Name, ...] = ("gpt", "cnn")
TITLES: dict[Name, str] = {"gpt": "GPT", "cnn": "CNN"}
RATES: tuple[str, ...] = ("100mbit", "1gbit")
"""Of links that stand for several nodes, and for the bus of one."""


@dataclass(frozen=True, kw_only=True)
class LGrecoScale(Scale):
    """``runs`` separate runs of ``rounds`` turns of ``turn_steps`` replayed steps of every method are timed. Up to
    ``margin`` of the loss or the accuracy may be lost, and a training still ends at the same. A policy decides whenever
    a task is probed."""

    gpt: WordsTask = WORDS
    cnn: ImageTask = PICTURES
    margin: float = 0.01
    runs: int = 10
    rounds: int = 3
    turn_steps: int = 2
    worlds: tuple[int, ...] = (2, 4)
    ranks: tuple[int, ...] = (8, 16, 32)
    """Of PowerSGD in figure 4.2; the largest one is the family's reference."""
    warm_up: int = 28
    """Dense steps: those of the learning rate's warm-up."""
    recorded: Extent = field(default_factory=Extent)
    """Of the trainings whose gradients all policies are replayed on."""
    trials: int = 16
    """Plans that the time-aware policy tries before it knows what each bucket costs; at least twice the buckets."""
    trial_steps: int = 12

    def adapted(self, **options: Any) -> Self:
        if options.get("rate") is not None:
            raise ValueError(f"--rate {options['rate']}: the links of this chapter are {' and '.join(RATES)}")
        return super().adapted(**options)

    def task(self, name: Name) -> WordsTask | ImageTask:
        return self.gpt if name == "gpt" else self.cnn

    def every(self, name: Name) -> int:
        """Steps between two decisions."""
        return self.task(name).probe_every

    def about(self) -> dict[str, Any]:
        standard_library()
        model = timed(self.gpt)
        return {"images": self.cnn.images.name, "gradient_bytes": model.gradient_bytes, "control": CONTROL}


SMOKE = LGrecoScale(
    gpt=WORDS_SMOKE,
    cnn=PICTURES_SMOKE,
    seeds=1,
    runs=1,
    rounds=1,
    turn_steps=1,
    worlds=(2,),
    ranks=(4, 16),
    warm_up=4,
    recorded=Extent(seeds=1, snapshots=2, window=2),
    trials=6,
    trial_steps=5,
)


@dataclass
class LGrecoStudy(Study[LGrecoScale]):
    """Trainings, timings and gradients, which parts share."""

    computes: dict[Model, Compute] = field(default_factory=dict)
    _recorded: dict[Name, list[Training]] = field(default_factory=dict)

    @property
    def rates(self) -> dict[str, str | None]:
        """The rate of each link that times are taken over; of the first alone, over loopback, where none is slow."""
        return {rate: rate for rate in RATES} if self.emulated else {RATES[0]: None}

    @property
    def model(self) -> Model:
        """What is timed."""
        return timed(self.scale.gpt)

    def train(self, name: Name, variant: str | None, seed: int) -> Run:
        """One training by a variant (None: uncompressed), unless it has been.

        Raises:
            RankFailedError: a rank did not make it.
            ParityError: ranks ended with different parameters.
        """
        runs = self._trainings(name)
        known = None if variant is None else str(Variant.parse(variant))
        return runs.run(known, seed, shaped=False)

    def compare(self, name: Name, variants: Sequence[str]) -> Comparison:
        """Paired trainings of ``variants``, of uncompressed gradients and of the control, from every seed."""
        return compare_runs(
            self._trainings(name), variants, seeds=self.seeds, margin=self.scale.margin, control=CONTROL
        )

    def times(
        self, methods: Sequence[Method], *, num_ranks: int = NUM_RANKS, rates: Sequence[str | None]
    ) -> list[Times]:
        """`SeparateRuns.times` of the scale's turns."""
        turns: dict[str, Any] = {"rounds": self.scale.rounds, "steps": self.scale.turn_steps, "on_turn": self.advance}
        return self.timing(num_ranks).times(self.model, methods, rates=rates, **turns)

    def timing(self, num_ranks: int) -> SeparateRuns:
        """So many ranks that are timed, each behind a link of its own."""
        emulated = self.emulated and num_ranks > 1
        return SeparateRuns("links", emulated, num_ranks, self.scale.runs, self.computes)

    def recorded(self, name: Name) -> list[Training]:
        """Return the gradients of uncompressed trainings of a network, recorded once."""
        if name not in self._recorded:
            self._recorded[name] = self.scale.recorded.record(
                self.scale.task(name), TITLES[name], lambda: self.advance(1, "gradients along trainings")
            )
        return self._recorded[name]

    def _trainings(self, name: Name) -> Runs:
        return self.kept(name, lambda: Runs(self.scale.task(name), NUM_RANKS, None, PartWatcher(self)))
