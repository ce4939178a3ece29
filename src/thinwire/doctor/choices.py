"""What could be done, and how long a step would take then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from thinwire.collectives import Topology, parse_topology
from thinwire.compressors import Compressor, Raw, parse
from thinwire.doctor.measure import Measured
from thinwire.plan import DEFAULT_RULES, Plan
from thinwire.plan.forecast import (
    Links,
    Pace,
    accumulated,
    native_step,
    planned_step,
    sent_in_step,
)
from thinwire.plan.ranges import Range, draws


class Care(IntEnum):
    """What a choice does to training; the less the better."""

    NONE = 0
    """The same numbers."""
    MEMORY = 1
    """The same numbers, and weights take memory for longer."""
    ROUNDED = 2
    """Gradients of 16 bits."""
    KEPT = 3
    """The loss stayed the same in the comparisons of README.md."""
    BATCH = 4
    """A larger batch: the learning rate may want another value."""
    CHECK = 5
    """The loss may change: `thinwire compare` tells."""


@dataclass(frozen=True)
class Choice:
    """One way of sending gradients."""

    title: str
    spec: str | None = None
    """What `thinwire.compress` is given; None for stock DDP."""
    topology: str = "sra"
    """The same, of how messages meet."""
    times: int = 1
    """Batches whose gradients are added up before they are sent."""
    care: Care = Care.NONE

    @property
    def is_today(self) -> bool:
        """Whether it changes nothing."""
        return self.spec is None and self.times == 1

    @property
    def lines(self) -> tuple[str, ...]:
        """To paste; none where nothing is to be done."""
        if self.spec is not None:
            given = "" if parse(self.spec) == parse(DEFAULT_RULES) else f', "{self.spec}"'
            given += "" if self.topology == "sra" else f', topology="{self.topology}"'
            return (
                "import thinwire",
                f"wire = thinwire.compress(model{given})  # after DistributedDataParallel(model)",
            )
        if self.times > 1:
            return (
                f"with contextlib.nullcontext() if last_of_{self.times} else model.no_sync():",
                f"    (loss / {self.times}).backward()  # optimizer.step() after each {self.times}th batch alone",
            )
        return ()


TODAY = Choice("as it is")
_COMPRESSED = (
    ("bf16", "cast(bf16)", Care.ROUNDED),
    ("8 bits", "minmax(bits=8, bucket=128)", Care.KEPT),
    ("4 bits", DEFAULT_RULES, Care.KEPT),
    ("4-bit QSGD", "qsgd(bits=4, bucket=128)", Care.CHECK),
    ("2 bits", "ef(minmax(bits=2, bucket=128))", Care.CHECK),
    ("top-k, 1 %", "topk(density=0.01)", Care.CHECK),
    ("PowerSGD, rank 4", "powersgd(rank=4)", Care.CHECK),
)
CHOICES = (
    TODAY,
    *(Choice(title, spec, care=care) for title, spec, care in _COMPRESSED),
    *(Choice(f"accumulate {times}", times=times, care=Care.BATCH) for times in (2, 4, 8)),
)


BY_LINK = (
    Choice("4 bits by node", DEFAULT_RULES, "hierarchical(inside=dense)", care=Care.KEPT),
    Choice("4 bits by rate", DEFAULT_RULES, "sra(rates=measured)", care=Care.KEPT),
)
"""Where links differ: between nodes and inside them, or from rank to rank."""


def way_of(choice: Choice, links: Links) -> Topology | None:
    """How messages of a choice meet in a world with these links; None if they have nothing for it."""
    return links.way(parse_topology(choice.topology))


def choices_of(specs: Sequence[str]) -> tuple[Choice, ...]:
    """The usual ones, and these compressors besides.

    Raises:
        ValueError: a spec is none.
    """
    known = {parse(choice.spec) for choice in CHOICES if choice.spec}
    more = dict.fromkeys(parse(spec) for spec in specs)
    return (*CHOICES, *BY_LINK, *(Choice(str(c), str(c), care=Care.CHECK) for c in more if c not in known))


@dataclass(frozen=True)
class Prediction:
    """What a choice would come to."""

    choice: Choice
    step: Range
    """Seconds, of one batch of today's size on each rank."""
    sent_bytes: float
    """By a rank, for one such batch."""
    wait_share: float
    """Part of a step that is communication which backward does not hide."""


def plan_of(choice: Choice, measured: Measured) -> Plan:
    """Which compressor each layer would have."""
    assert choice.spec is not None
    return Plan.build(measured.watched.shapes, choice.spec)


def to_time(choices: Sequence[Choice], shapes: Mapping[str, Sequence[int]]) -> set[Compressor]:
    """Compressors whose speed predictions need."""
    return {c for choice in choices if choice.spec for c in Plan.build(shapes, choice.spec).layers.values()} | {Raw()}


def predict(choice: Choice, measured: Measured) -> Prediction:
    """Over many draws of a measured step and of a measurement of the links."""
    drawn = draws(measured.watched.paces, measured.links)
    layers = None if choice.spec is None else plan_of(choice, measured).layers
    codec_s = {compressor: measured.codec_s(compressor) for compressor in measured.codecs}
    topology = way_of(choice, drawn[0][1])
    if topology is None:
        raise ValueError(f"{choice.title}: these links have nothing for {choice.topology}")
    steps, waits = [], []
    for pace, links in drawn:
        assert isinstance(pace, Pace)
        step = native_step(pace, links) if layers is None else planned_step(pace, links, layers, codec_s, topology)
        each = accumulated(pace, step, choice.times)
        steps.append(each)
        waits.append(1 - (each - (step - pace.compute_s) / choice.times) / each)
    pace, links = drawn[0]
    assert isinstance(pace, Pace)
    sent = sent_in_step(pace, links, layers, topology) / choice.times
    return Prediction(choice, Range.of(steps), sent, Range.of(waits).value)


def ceiling(measured: Measured) -> Range:
    """Seconds of a step in which nothing is sent, of the same draws as predictions: none comes out below it by luck."""
    paces = [pace for pace, _ in draws(measured.watched.paces, measured.links)]
    return Range.of([pace.compute_s if isinstance(pace, Pace) else pace.alone_s for pace in paces])
