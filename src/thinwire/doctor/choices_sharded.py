"""What could be done with a sharded model (FSDP2), and how long a step would take then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thinwire.attach.fsdp import DEFAULT_SHARDED_RULES
from thinwire.compressors import Compressor, parse
from thinwire.doctor.choices import Care, Choice, Prediction
from thinwire.doctor.measure import Measured
from thinwire.doctor.watched import DoctorError
from thinwire.plan import Filter, Plan, sharded_plan
from thinwire.plan.forecast import Links
from thinwire.plan.forecast_sharded import (
    ShardedPace,
    move_transfer,
    native_sharded_step,
    sharded_bytes,
    sharded_step,
)
from thinwire.plan.ranges import Range, draws

_FILTER = Filter(min_numel=1024)
"""What `thinwire.compress` leaves raw."""


@dataclass(frozen=True)
class ShardedChoice(Choice):
    """One way of sending weights, by ``spec``, and gradients."""

    gradients: str | None = None
    """By default as weights."""
    kept: bool = False
    """Whether weights stay gathered after forward."""
    halved: bool = False
    """Whether PyTorch itself reduces gradients in 16 bits."""

    @property
    def is_today(self) -> bool:
        return super().is_today and not self.kept and not self.halved

    @property
    def lines(self) -> tuple[str, ...]:
        if self.kept:
            return ("fully_shard(block, reshard_after_forward=False)  # of every block",)
        if self.halved:
            return (
                "policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)  # of torch.distributed.fsdp",
                "fully_shard(block, mp_policy=policy)  # of every block, and of the model",
            )
        if self.times > 1:
            return (
                f"model.set_requires_gradient_sync(last_of_{self.times})",
                f"(loss / {self.times}).backward()  # optimizer.step() after each {self.times}th batch alone",
            )
        if self.spec is None:
            return ()
        of = {"weights": self.spec, "gradients": self.gradients or self.spec}
        usual = parse(DEFAULT_SHARDED_RULES)
        given = "".join(f', {site}="{spec}"' for site, spec in of.items() if parse(spec) != usual)
        return (
            "import thinwire",
            f"wire = thinwire.compress(model{given})  # after fully_shard(model)",
            "thinwire.prefetch(model)",
        )


SHARDED_CHOICES = (
    ShardedChoice("as it is"),
    ShardedChoice("weights kept", kept=True, care=Care.MEMORY),
    ShardedChoice("uncompressed, overlapped", "raw"),
    ShardedChoice("gradients in bf16", halved=True, care=Care.ROUNDED),
    ShardedChoice("W8G8", DEFAULT_SHARDED_RULES, care=Care.KEPT),
    ShardedChoice(
        "W8G4",
        DEFAULT_SHARDED_RULES,
        gradients="minmax(bits=4, bucket=1024)",
        care=Care.CHECK,
    ),
    ShardedChoice("W4G4", "minmax(bits=4, bucket=1024)", care=Care.CHECK),
    *(ShardedChoice(f"accumulate {times}", times=times, care=Care.BATCH) for times in (2, 4, 8)),
)


def sharded_choices(specs: Sequence[str], shapes: Mapping[str, Sequence[int]]) -> tuple[ShardedChoice, ...]:
    """The usual ones, and these compressors besides, for weights and gradients alike.

    Raises:
        DoctorError: one of them cannot serve a sharded model.
    """
    known = {parse(choice.spec) for choice in SHARDED_CHOICES if choice.spec and choice.gradients is None}
    more = dict.fromkeys(parse(spec) for spec in specs)
    choices = [ShardedChoice(str(c), str(c), care=Care.CHECK) for c in more if c not in known]
    for choice in choices:
        try:
            plan_for(choice, shapes)
        except ValueError as error:
            raise DoctorError(f"--compressors {choice.spec}: this model is sharded, and {error}") from None
    return (*SHARDED_CHOICES, *choices)


def plan_for(choice: ShardedChoice, shapes: Mapping[str, Sequence[int]]) -> Plan:
    """Which compressor the weights and the gradients of each layer would have."""
    assert choice.spec is not None
    return sharded_plan(shapes, {"weights": choice.spec, "gradients": choice.gradients or choice.spec}, _FILTER)


def sharded_to_time(choices: Sequence[ShardedChoice], shapes: Mapping[str, Sequence[int]]) -> set[Compressor]:
    """Compressors whose speed predictions need."""
    return {c for choice in choices if choice.spec for c in plan_for(choice, shapes).layers.values()}


def fits(choice: ShardedChoice, pace: ShardedPace) -> bool:
    """Whether it would change this step."""
    if choice.halved:
        return any(move.kind == "reduce_scatter" and move.itemsize == 4 for move in pace.moves)
    return not choice.kept or len(pace.kept().moves) < len(pace.moves)


def predict_sharded(choice: ShardedChoice, measured: Measured) -> Prediction:
    """Over many draws of a measured step and of a measurement of the links."""
    watched = measured.watched
    steps: list[float] = []
    waits: list[float] = []
    layers = None if choice.spec is None else plan_for(choice, watched.shapes).layers
    took = dict(zip(map(id, watched.paces), watched.bucket_s, strict=True))
    # Once for each, not for each time that it is drawn.
    changed = {id(pace): _changed(choice, pace) for pace in watched.paces if isinstance(pace, ShardedPace)}
    drawn = draws(watched.paces, measured.links)
    for pace, links in drawn:
        assert isinstance(pace, ShardedPace)
        step = _step(choice, pace, changed[id(pace)], links, layers, took[id(pace)], measured)
        computed = pace.compute_s
        if choice.times > 1:
            # Batches between two exchanges gather as ever, and end with backward.
            gathers = _seconds(pace, took[id(pace)], "all_gather")
            step = (step + (choice.times - 1) * (pace.backward_end_s + gathers)) / choice.times
            computed = (computed + (choice.times - 1) * pace.backward_end_s) / choice.times
        steps.append(step)
        waits.append(max(0.0, 1 - computed / step))
    pace, links = drawn[0]
    assert isinstance(pace, ShardedPace)
    return Prediction(choice, Range.of(steps), _sent(choice, pace, links, layers), Range.of(waits).value)


def _changed(choice: ShardedChoice, pace: ShardedPace) -> ShardedPace:
    """The step with what this choice asks for at other times, or not at all."""
    if choice.kept:
        return pace.kept()
    return pace if choice.spec is None else pace.ahead()


def _step(
    choice: ShardedChoice,
    pace: ShardedPace,
    changed: ShardedPace,
    links: Links,
    layers: Mapping[str, Compressor] | None,
    took: Sequence[float],
    measured: Measured,
) -> float:
    if layers is not None:
        return sharded_step(changed, [move_transfer(move, layers, links, measured.codecs) for move in changed.moves])
    if choice.kept:
        return native_sharded_step(changed, _matching(pace, changed, took))
    if choice.halved:
        # Half of the bytes; latency stays.
        least = links.native.latency_s
        pairs = zip(pace.moves, took, strict=True)
        took = [s - max(0.0, s - least) / 2 if move.kind == "reduce_scatter" else s for move, s in pairs]
    return native_sharded_step(pace, took)


def _matching(pace: ShardedPace, left: ShardedPace, took: Sequence[float]) -> list[float]:
    """Seconds of the moves that are left."""
    by_move = {(move.kind, move.module): seconds for move, seconds in zip(pace.moves, took, strict=True)}
    return [by_move[move.kind, move.module] for move in left.moves]


def _seconds(pace: ShardedPace, took: Sequence[float], kind: str) -> float:
    return sum(seconds for move, seconds in zip(pace.moves, took, strict=True) if move.kind == kind)


def _sent(choice: ShardedChoice, pace: ShardedPace, links: Links, layers: Mapping[str, Compressor] | None) -> float:
    if choice.kept:
        return sharded_bytes(pace.kept(), links, None)
    sent = sharded_bytes(pace, links, layers)
    reduced = links.others * sum(move.num_bytes for move in pace.moves if move.kind == "reduce_scatter")
    return sent - reduced / 2 if choice.halved else sent - reduced * (choice.times - 1) / choice.times
