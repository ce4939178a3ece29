"""Measurements and predictions from watched steps, whatever model trains."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.compressors import Compressor
from thinwire_tools.doctor.forecast import ShardedPace
from thinwire_tools.doctor.measure import Measured, measure
from thinwire_tools.doctor.observer import Observer
from thinwire_tools.doctor.settings import (
    Prediction,
    Setting,
    algorithm_of,
    compressors_of,
    local_updates,
    predict_ddp,
    settings_with,
)
from thinwire_tools.doctor.settings_sharded import (
    ShardedSetting,
    fits,
    predict_sharded,
    sharded_compressors,
    sharded_settings,
)


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
    wanted: set[Compressor] = sharded_compressors(sharded, shapes) | (compressors_of(usual, shapes) if usual else set())
    measured = measure(observer, wanted, line_rate)
    fitting = [setting for setting in (*sharded, *usual) if _fitting(setting, measured)]
    return measured, [*fitting, *([] if observer.sharded else [local_updates(measured)])]


def predict_step(setting: Setting, measured: Measured) -> Prediction:
    """Predict a step with this setting."""
    return predict_sharded(setting, measured) if isinstance(setting, ShardedSetting) else predict_ddp(setting, measured)


def _fitting(setting: Setting, measured: Measured) -> bool:
    """Whether the setting applies to these links, or this model."""
    if isinstance(setting, ShardedSetting):
        return all(isinstance(pace, ShardedPace) and fits(setting, pace) for pace in measured.watched.paces)
    return all(algorithm_of(setting, links) for links in measured.links)
