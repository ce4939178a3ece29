"""Settings of the communication of a sharded model (FSDP2), and predictions whatever model trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thinwire.compressors import Compressor, parse
from thinwire.integrations.fsdp import DEFAULT_SHARDED_RULES
from thinwire.plan import Filter, Plan, sharded_plan
from thinwire.plan.forecast import Links
from thinwire_tools.doctor.forecast import ShardedPace, move_transfer, native_sharded_step, sharded_bytes, sharded_step
from thinwire_tools.doctor.measure import Measured, measure
from thinwire_tools.doctor.observer import Observer
from thinwire_tools.doctor.settings import (
    CHECKPOINT,
    Care,
    Prediction,
    Range,
    Setting,
    choose_algorithm,
    draws,
    local_updates,
    needed_compressors,
    predict_ddp,
    settings_with,
)
from thinwire_tools.doctor.watched import DoctorError

_FILTER = Filter(min_numel=1024)
"""Filter of the layers that `thinwire.compress` leaves raw."""


@dataclass(frozen=True)
class ShardedSetting(Setting):
    """A setting of the communication of weights, by ``spec``, and of gradients."""

    gradients: str | None = None
    """Compressor of gradients; by default that of weights."""
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
                f"(loss / {self.times}).backward()  # optimizer.step() once every {self.times} batches",
            )
        if self.spec is None:
            return ()
        specs = {"weights": self.spec, "gradients": self.gradients or self.spec}
        usual = parse(DEFAULT_SHARDED_RULES)
        given = "".join(f', {site}="{spec}"' for site, spec in specs.items() if parse(spec) != usual)
        return (
            "import thinwire",
            f"wire = thinwire.compress(model{given})  # after fully_shard(model)",
            "thinwire.prefetch(model)",
            CHECKPOINT,
        )


SHARDED_SETTINGS = (
    ShardedSetting("as it is"),
    ShardedSetting("weights kept", kept=True, care=Care.MEMORY),
    ShardedSetting("uncompressed, overlapped", "raw"),
    ShardedSetting("gradients in bf16", halved=True, care=Care.ROUNDED),
    ShardedSetting("W8G8", DEFAULT_SHARDED_RULES, care=Care.KEPT),
    ShardedSetting("W8G4", DEFAULT_SHARDED_RULES, gradients="minmax(bits=4, bucket=1024)", care=Care.CHECK),
    ShardedSetting("W4G4", "minmax(bits=4, bucket=1024)", care=Care.CHECK),
    *(ShardedSetting(f"accumulate {times}", times=times, care=Care.BATCH) for times in (2, 4, 8)),
)


def sharded_settings(specs: Sequence[str], shapes: Mapping[str, Sequence[int]]) -> tuple[ShardedSetting, ...]:
    """Return the usual settings, and one with each of these compressors for both weights and gradients.

    Raises:
        DoctorError: one of them cannot serve a sharded model.
    """
    known = {parse(setting.spec) for setting in SHARDED_SETTINGS if setting.spec and setting.gradients is None}
    more = dict.fromkeys(parse(spec) for spec in specs)
    settings = [ShardedSetting(str(c), str(c), care=Care.CHECK) for c in more if c not in known]
    for setting in settings:
        try:
            plan_for(setting, shapes)
        except ValueError as error:
            raise DoctorError(f"--compressors {setting.spec}: this model is sharded, and {error}") from None
    return (*SHARDED_SETTINGS, *settings)


def plan_for(setting: ShardedSetting, shapes: Mapping[str, Sequence[int]]) -> Plan:
    assert setting.spec is not None
    return sharded_plan(shapes, {"weights": setting.spec, "gradients": setting.gradients or setting.spec}, _FILTER)


def sharded_compressors(settings: Sequence[ShardedSetting], shapes: Mapping[str, Sequence[int]]) -> set[Compressor]:
    """Return the compressors whose speed predictions need."""
    return {c for setting in settings if setting.spec for c in plan_for(setting, shapes).layers.values()}


def fits(setting: ShardedSetting, pace: ShardedPace) -> bool:
    """Whether a setting would change this step."""
    if setting.halved:
        return any(move.kind == "reduce_scatter" and move.itemsize == 4 for move in pace.moves)
    return not setting.kept or len(pace.kept().moves) < len(pace.moves)


def predict_sharded(setting: ShardedSetting, measured: Measured) -> Prediction:
    """Predict an FSDP2 step over many draws of a measured step and of a measurement of the links."""
    watched = measured.watched
    steps: list[float] = []
    waits: list[float] = []
    layers = None if setting.spec is None else plan_for(setting, watched.shapes).layers
    took = dict(zip(map(id, watched.paces), watched.bucket_s, strict=True))
    # Computed once for each step, not for each draw of it.
    changed = {id(pace): _changed(setting, pace) for pace in watched.paces if isinstance(pace, ShardedPace)}
    drawn = draws(watched.paces, measured.links)
    for pace, links in drawn:
        assert isinstance(pace, ShardedPace)
        step = _step(setting, pace, changed[id(pace)], links, layers, took[id(pace)], measured)
        computed = pace.compute_s
        if setting.times > 1:
            # Batches between two exchanges gather as usual, and end with backward.
            between = native_sharded_step(pace.unreduced(), took[id(pace)])
            step = (step + (setting.times - 1) * between) / setting.times
            computed = (computed + (setting.times - 1) * pace.backward_end_s) / setting.times
        steps.append(step)
        waits.append(max(0.0, 1 - computed / step))
    pace, links = drawn[0]
    assert isinstance(pace, ShardedPace)
    return Prediction(setting, tuple(steps), _sent(setting, pace, links, layers), Range.from_values(waits).value)


def _changed(setting: ShardedSetting, pace: ShardedPace) -> ShardedPace:
    """Return the measured step with its gathers ahead, or left out where the setting keeps weights."""
    if setting.kept:
        return pace.kept()
    return pace if setting.spec is None else pace.ahead()


def _step(
    setting: ShardedSetting,
    pace: ShardedPace,
    changed: ShardedPace,
    links: Links,
    layers: Mapping[str, Compressor] | None,
    took: Sequence[float],
    measured: Measured,
) -> float:
    if layers is not None:
        return sharded_step(changed, [move_transfer(move, layers, links, measured.codecs) for move in changed.moves])
    if setting.kept:
        by_move = {(move.kind, move.module): seconds for move, seconds in zip(pace.moves, took, strict=True)}
        return native_sharded_step(changed, [by_move[move.kind, move.module] for move in changed.moves])
    if setting.halved:
        # Bytes are halved; latency stays.
        least = links.native.latency_s
        pairs = zip(pace.moves, took, strict=True)
        took = [s - max(0.0, s - least) / 2 if move.kind == "reduce_scatter" else s for move, s in pairs]
    return native_sharded_step(pace, took)


def _sent(setting: ShardedSetting, pace: ShardedPace, links: Links, layers: Mapping[str, Compressor] | None) -> float:
    if setting.kept:
        return sharded_bytes(pace.kept(), links, None)
    sent = sharded_bytes(pace, links, layers)
    reduced = links.others * sum(move.num_bytes for move in pace.moves if move.kind == "reduce_scatter")
    return sent - reduced / 2 if setting.halved else sent - reduced * (setting.times - 1) / setting.times


def measure_for(
    observer: Observer, specs: Sequence[str] = (), line_rate: float | None = None
) -> tuple[Measured, list[Setting]]:
    """Measure what predictions need, on every rank and between two steps; return that and the settings for this model.
    ``specs``: compressors in addition to the usual ones.

    Raises:
        DoctorError: no steps were watched that can be predicted.
        TransportError: a rank is gone or silent.
    """
    shapes = observer.layers
    sharded = sharded_settings(specs, shapes) if observer.sharded else ()
    usual: tuple[Setting, ...] = () if observer.sharded else settings_with(specs)
    wanted = needed_compressors(usual, shapes) if usual else set()
    wanted |= sharded_compressors(sharded, shapes)
    measured = measure(observer, wanted, line_rate)
    fitting = [setting for setting in (*sharded, *usual) if _fitting(setting, measured)]
    return measured, [*fitting, *([] if observer.sharded else [local_updates(measured)])]


def predict_step(setting: Setting, measured: Measured) -> Prediction:
    return predict_sharded(setting, measured) if isinstance(setting, ShardedSetting) else predict_ddp(setting, measured)


def _fitting(setting: Setting, measured: Measured) -> bool:
    """Whether the setting applies to these links, or this model."""
    if isinstance(setting, ShardedSetting):
        return all(isinstance(pace, ShardedPace) and fits(setting, pace) for pace in measured.watched.paces)
    return all(choose_algorithm(setting, links) for links in measured.links)
