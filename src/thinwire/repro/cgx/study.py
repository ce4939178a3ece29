"""What every part of the thesis's chapter is made from: the contests, the links' rates, the folder, the progress."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thinwire.repro.cgx.contest import Contest, Place, Times, shown_rate
from thinwire.repro.cgx.models import TIMED, TIMED_SMOKE, TRAINED, TRAINED_SMOKE, Model
from thinwire.repro.cgx.ways import FP32, NOTHING, Way
from thinwire.repro.fft.task import ImageTask
from thinwire.repro.parts import Parted
from thinwire.repro.progress import Screen
from thinwire.repro.tasks import GPTTask

FP32_SHARE: dict[Place, dict[str, float]] = {"links": {"gpt": 0.54, "cnn": 0.59}, "nodes": {"gpt": 0.05, "cnn": 0.09}}
"""Share of linear scaling that fp32 reaches in the thesis, of Transformer-XL and ResNet-50: links are as slow as it
takes for that. On one node: 170k of 8 · 39k tokens/s (tables 3.1 and 3.6), and 1900 of 2900 / 0.90 images/s (tables
3.6 and 3.7). On four nodes of four: 32k of 16 · 39k (table 3.9), and 564 of twice those images/s."""


@dataclass(frozen=True)
class Scale:
    """How much is measured: ``rounds`` turns of ``steps`` steps of every way, ``seeds`` trainings of every quantiser.

    Up to ``margin`` of the loss or the accuracy may be lost, and a training still ends at the same.
    """

    models: tuple[Model, ...] = TIMED
    trained: tuple[GPTTask, ImageTask] = TRAINED
    gammas: tuple[float, ...] = (1, 2, 4, 10, 20, 40, 100, 400)
    rounds: int = 8
    steps: int = 2
    error_steps: int = 8
    seeds: int = 3
    margin: float = 0.01

    def turn(self, place: Place) -> int:
        """Steps of a turn: between nodes a step takes long enough by itself."""
        return 1 if place == "nodes" else self.steps


SMOKE = Scale(TIMED_SMOKE, TRAINED_SMOKE, gammas=(1, 10, 100, 400), rounds=1, steps=1, error_steps=2, seeds=1)
SMOKE_RATE = "100mbit"


@dataclass
class Study(Parted):
    """One run of the command; a context manager. ``emulated``: slow links are, so that their times mean something.

    ``rate``: of the links, where one was asked for; None takes what the thesis's own baseline tells (`FP32_SHARE`).
    """

    scale: Scale
    out: Path
    screen: Screen
    emulated: bool
    rate: str | None
    links: dict[str, Any] = field(default_factory=dict)
    _contests: dict[Place, Contest] = field(default_factory=dict)
    _rates: dict[tuple[Place, str], str] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        self._stack.close()
        self._contests.clear()

    def picture(self, part: str) -> Path:
        return self.out / f"cgx-{part}.svg"

    def timed(self, place: Place) -> bool:
        """Whether times at ``place`` say something: a host needs no link."""
        return self.emulated or place == "host"

    def verdict(self, holds: bool | None, place: Place = "links") -> bool | None:
        """``holds`` where it rests on times that say something."""
        return holds if self.timed(place) else None

    def where(self, model: Model, place: Place = "links") -> str:
        """The link, for people."""
        if place == "host":
            return "on one host"
        rate = self.rate_of(model, place)
        return "over loopback" if rate is None else f"over {shown_rate(rate)}"

    def times(self, model: Model, ways: Sequence[Way], place: Place = "links") -> Times:
        """`Contest.times`, at the rate that is this model's."""
        rate = self.rate_of(model, place)
        contest = self._contest(place)
        found = contest.times(
            model, ways, rounds=self.scale.rounds, steps=self.scale.turn(place), rate=rate, on_turn=self.advance
        )
        if rate is not None:
            self._note_share(model, place, found, contest)
        return found

    def errors(self, model: Model, ways: Sequence[Way]) -> dict[str, list[float]]:
        """`Contest.errors`."""
        return self._contest("links").errors(model, ways, steps=self.scale.error_steps, on_turn=self.advance)

    def rate_of(self, model: Model, place: Place) -> str | None:
        """Of the links at ``place`` for ``model``; None for loopback. Measured when it is first asked for."""
        if not self.emulated or place == "host":
            return None
        if self.rate is not None:
            return self.rate
        key = place, model.name
        if key not in self._rates:
            share = FP32_SHARE[place][model.name]
            self._rates[key] = self._contest(place).calibrate(
                model, share, on_turn=lambda _, title: self.advance(0, f"finding the link's rate: {title}")
            )
        return self._rates[key]

    def _note_share(self, model: Model, place: Place, found: Times, contest: Contest) -> None:
        """Keep what the link was, and the proportion of communication to computation that it made."""
        if not {FP32.name, NOTHING.name} <= found.rounds.keys():
            return
        key = f"{model.title}, {'each node' if place == 'nodes' else 'each rank'} on a link"
        about = self.links.setdefault(key, {"link": contest.link, "rate": self.rate_of(model, place), "fp32_share": []})
        about["fp32_share"].append(found.times_faster(FP32.name, NOTHING.name))

    def _contest(self, place: Place) -> Contest:
        if place not in self._contests:
            self._contests[place] = self._stack.enter_context(Contest(place, emulated=self.emulated))
        return self._contests[place]
