"""From what was watched to what is measured and foretold, whatever model trains."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.compressors import Compressor
from thinwire.doctor.choices import Choice, Prediction, choices_of, predict, to_time, way_of
from thinwire.doctor.choices_sharded import (
    ShardedChoice,
    fits,
    predict_sharded,
    sharded_choices,
    sharded_to_time,
)
from thinwire.doctor.measure import Measured, measure
from thinwire.doctor.observe import Observer
from thinwire.plan.forecast_sharded import ShardedPace


def measure_for(
    observer: Observer, specs: Sequence[str] = (), line_rate: float | None = None
) -> tuple[Measured, list[Choice]]:
    """Measure what predictions need, on every rank and between two steps; and the choices that there are here.
    ``specs``: compressors beside the usual ones.

    Raises:
        DoctorError: what was watched makes no steps that can be foretold.
        TransportError: a rank is gone or silent.
    """
    shapes = observer.layers
    sharded = sharded_choices(specs, shapes) if observer.sharded else ()
    usual: tuple[Choice, ...] = () if observer.sharded else choices_of(specs)
    wanted: set[Compressor] = sharded_to_time(sharded, shapes) | (to_time(usual, shapes) if usual else set())
    measured = measure(observer, wanted, line_rate)
    return measured, [choice for choice in (*sharded, *usual) if _fitting(choice, measured)]


def foretold(choice: Choice, measured: Measured) -> Prediction:
    """A step with this choice."""
    return predict_sharded(choice, measured) if isinstance(choice, ShardedChoice) else predict(choice, measured)


def _fitting(choice: Choice, measured: Measured) -> bool:
    """Whether these links, or this model, have something for it."""
    if isinstance(choice, ShardedChoice):
        return all(isinstance(pace, ShardedPace) and fits(choice, pace) for pace in measured.watched.paces)
    return all(way_of(choice, links) for links in measured.links)
