"""Settings of the communication of gradients, and the predicted time of a step with each."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import TypeVar

from thinwire.collectives import Algorithm, parse_algorithm
from thinwire.compressors import Compressor, Raw, parse
from thinwire.local.fragments import FEW_BITS, exchange_plan
from thinwire.plan import DEFAULT_RULES, Plan
from thinwire.plan.forecast import (
    Links,
    Pace,
    accumulated,
    hiding_interval,
    local_step,
    native_step,
    planned_step,
    sent_in_step,
)
from thinwire_tools.doctor.measure import Measured

CHECKPOINT = 'checkpoint["wire"] = wire.gather_state_dict()  # on every rank, wherever the model is saved'
"""Line that adds the wire's state to a checkpoint: a collective call, whose result any one rank may save."""

_DRAWS = 60
_RANGE = (0.05, 0.95)
_P = TypeVar("_P")
_L = TypeVar("_L")


class Care(IntEnum):
    """Effect of a setting on training; the less the better."""

    NONE = 0
    """Training is unchanged, bit for bit."""
    MEMORY = 1
    """Training is unchanged, bit for bit, and weights take memory for longer."""
    ROUNDED = 2
    """Gradients have 16 bits."""
    KEPT = 3
    """The loss stayed the same in the comparisons of README.md."""
    BATCH = 4
    """A larger batch: the learning rate may want another value."""
    CHECK = 5
    """The loss may change: try it with `thinwire compare`."""
    LOCAL = 6
    """Workers train alone between exchanges: another algorithm, whose effect on the loss must be measured."""


@dataclass(frozen=True)
class Setting:
    """A setting of the communication of gradients."""

    title: str
    spec: str | None = None
    """Compressor for `thinwire.compress`; None for stock DDP."""
    algorithm: str = "sra"
    """Collective algorithm for `thinwire.compress`."""
    times: int = 1
    """Number of batches whose gradients are added up before they are sent."""
    every: int = 0
    """Steps between two exchanges of local updates (`thinwire.local.DiLoCo`); 0 averages gradients in each step."""
    care: Care = Care.NONE

    @property
    def is_today(self) -> bool:
        """Whether the setting changes nothing."""
        return self.spec is None and self.times == 1

    @property
    def lines(self) -> tuple[str, ...]:
        """Lines to paste; none where nothing is to be done."""
        if self.every:
            return (
                f"local = thinwire.local.DiLoCo(model, optimizer, every={self.every})  # model: not in "
                "DistributedDataParallel",
                "local.step()  # after optimizer.step(); local.finish() after training",
                'checkpoint["local"] = local.gather_state_dict()  # on every rank, wherever the model is saved',
            )
        if self.spec is not None:
            given = "" if parse(self.spec) == parse(DEFAULT_RULES) else f', "{self.spec}"'
            given += "" if self.algorithm == "sra" else f', network=thinwire.Network(algorithm="{self.algorithm}")'
            return (
                "import thinwire",
                f"wire = thinwire.compress(model{given})  # after DistributedDataParallel(model)",
                CHECKPOINT,
            )
        if self.times > 1:
            return (
                f"with contextlib.nullcontext() if last_of_{self.times} else model.no_sync():",
                f"    (loss / {self.times}).backward()  # optimizer.step() once every {self.times} batches",
            )
        return ()


TODAY = Setting("as it is")
_COMPRESSED = (
    ("bf16", "cast(bf16)", Care.ROUNDED),
    ("8 bits", "minmax(bits=8, bucket=128)", Care.KEPT),
    ("4 bits", DEFAULT_RULES, Care.KEPT),
    ("4-bit QSGD", "qsgd(bits=4, bucket=128)", Care.CHECK),
    ("2 bits", "ef(minmax(bits=2, bucket=128))", Care.CHECK),
    ("top-k, 1 %", "topk(density=0.01)", Care.CHECK),
    ("PowerSGD, rank 4", "powersgd(rank=4)", Care.CHECK),
)
SETTINGS = (
    TODAY,
    *(Setting(title, spec, care=care) for title, spec, care in _COMPRESSED),
    *(Setting(f"accumulate {times}", times=times, care=Care.BATCH) for times in (2, 4, 8)),
)


def local_updates(measured: Measured) -> Setting:
    """Return local updates in 2 bits, with the least interval of exchanges that hides them on these links."""
    links, pace = measured.links[0], measured.watched.paces[0]
    assert isinstance(pace, Pace)
    layers = exchange_plan(measured.watched.shapes).layers
    codec_s = {compressor: measured.codec_s(compressor) for compressor in measured.codecs}
    every = hiding_interval(pace, links, layers, codec_s)
    return Setting(f"local, every {every}", FEW_BITS, every=every, care=Care.LOCAL)


BY_LINK = (
    Setting("4 bits by node", DEFAULT_RULES, "hierarchical(inside=dense)", care=Care.KEPT),
    Setting("4 bits by rate", DEFAULT_RULES, "sra(rates=measured)", care=Care.KEPT),
)
"""Settings for links that differ: between nodes and inside them, or from rank to rank."""


def choose_algorithm(setting: Setting, links: Links) -> Algorithm | None:
    """Return the setting's collective algorithm for these links, or None if it does not apply to them."""
    return links.adapted(parse_algorithm(setting.algorithm))


def settings_with(specs: Sequence[str]) -> tuple[Setting, ...]:
    """Return the usual settings, and one for each of these compressors.

    Raises:
        ValueError: a spec is invalid.
    """
    known = {parse(setting.spec) for setting in SETTINGS if setting.spec}
    more = dict.fromkeys(parse(spec) for spec in specs)
    return (*SETTINGS, *BY_LINK, *(Setting(str(c), str(c), care=Care.CHECK) for c in more if c not in known))


@dataclass(frozen=True)
class Range:
    """A prediction and its uncertainty by the measurements: 5 % of what they allow lies below ``low``, and above
    ``high``."""

    value: float
    low: float
    high: float

    @staticmethod
    def from_values(values: Sequence[float]) -> Range:
        ordered = sorted(values)
        return Range(_quantile(ordered, 0.5), *(_quantile(ordered, share) for share in _RANGE))


def _quantile(ordered: Sequence[float], share: float) -> float:
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    return ordered[low] + (at - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


def draws(paces: Sequence[_P], links: Sequence[_L]) -> list[tuple[_P, _L]]:
    """Draw pairs of measured steps and measured links at random, but always the same ones, for ranges."""
    pick = random.Random(0)
    return [(pick.choice(paces), pick.choice(links)) for _ in range(_DRAWS)]


@dataclass(frozen=True)
class Prediction:
    """The predicted effect of a setting."""

    setting: Setting
    steps: tuple[float, ...]
    """Seconds of one batch of today's size on each rank, by draw: the same draws for every setting, so that a slow draw
    is slow for all."""
    sent_bytes: float
    """Bytes that a rank sends for one such batch."""
    wait_share: float
    """Share of a step that is communication which backward does not hide."""

    @cached_property
    def step(self) -> Range:
        return Range.from_values(self.steps)

    def relative_to(self, other: Prediction) -> Range:
        """Return the ratio of this step to that of another setting, draw by draw."""
        return Range.from_values([mine / its for mine, its in zip(self.steps, other.steps, strict=True)])


def make_plan(setting: Setting, measured: Measured) -> Plan:
    assert setting.spec is not None
    build = exchange_plan if setting.every else Plan.build
    return build(measured.watched.shapes, setting.spec)


def needed_compressors(settings: Sequence[Setting], shapes: Mapping[str, Sequence[int]]) -> set[Compressor]:
    """Return the compressors whose speed predictions need."""
    plans = [exchange_plan(shapes), *(Plan.build(shapes, setting.spec) for setting in settings if setting.spec)]
    return {c for plan in plans for c in plan.layers.values()} | {Raw()}


def predict_ddp(setting: Setting, measured: Measured) -> Prediction:
    """Predict a DDP step over many draws of a measured step and of a measurement of the links."""
    drawn = draws(measured.watched.paces, measured.links)
    layers = None if setting.spec is None else make_plan(setting, measured).layers
    codec_s = {compressor: measured.codec_s(compressor) for compressor in measured.codecs}
    algorithm = choose_algorithm(setting, drawn[0][1])
    if algorithm is None:
        raise ValueError(f"{setting.title}: these links have nothing for {setting.algorithm}")
    steps, waits = [], []
    for pace, links in drawn:
        assert isinstance(pace, Pace)
        if layers is None:
            step = native_step(pace, links)
        elif setting.every:
            step = local_step(pace, links, layers, codec_s, setting.every)
        else:
            step = planned_step(pace, links, layers, codec_s, algorithm)
        each = accumulated(pace, step, setting.times)
        steps.append(each)
        waits.append(1 - (each - (step - pace.compute_s) / setting.times) / each)
    pace, links = drawn[0]
    assert isinstance(pace, Pace)
    sent = sent_in_step(pace, links, layers, algorithm) / (setting.every or setting.times)
    return Prediction(setting, tuple(steps), sent, Range.from_values(waits).value)


def ceiling(measured: Measured) -> Range:
    """Return the seconds of a step that sends nothing, over the same draws as predictions, so that none is below it."""
    paces = [pace for pace, _ in draws(measured.watched.paces, measured.links)]
    return Range.from_values([pace.compute_s if isinstance(pace, Pace) else pace.alone_s for pace in paces])
