"""The Wire and what keeps it alive."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from thinwire.runtime.adapt import Decision
from thinwire.runtime.bucket_engine import BucketEngine
from thinwire.runtime.channel import Channel, group_seed
from thinwire.runtime.consistency import DisagreementError, ParityError, agree
from thinwire.runtime.exchange import Contents, Exchange, Kind
from thinwire.runtime.executor import AsyncReadback, Follower, ThreadExecutor, for_reducer, on_the_host
from thinwire.runtime.probe import measure_one_way
from thinwire.runtime.route import Route, dense_bytes
from thinwire.runtime.settings import WireSettings
from thinwire.runtime.stats import GroupStats, Stats
from thinwire.runtime.wire import Wire

if TYPE_CHECKING:
    from thinwire.runtime.placement import ShardedLayer
    from thinwire.runtime.registered import NamedShape, Walk
    from thinwire.runtime.units import Unit

__all__ = [
    "AsyncReadback",
    "BucketEngine",
    "Channel",
    "Contents",
    "Decision",
    "DisagreementError",
    "Exchange",
    "Follower",
    "GroupStats",
    "Kind",
    "NamedShape",
    "ParityError",
    "Route",
    "ShardedLayer",
    "Stats",
    "ThreadExecutor",
    "Unit",
    "Walk",
    "Wire",
    "WireSettings",
    "agree",
    "dense_bytes",
    "for_reducer",
    "group_seed",
    "measure_one_way",
    "on_the_host",
]

_LATE = {
    "NamedShape": "thinwire.runtime.registered",
    "ShardedLayer": "thinwire.runtime.placement",
    "Unit": "thinwire.runtime.units",
    "Walk": "thinwire.runtime.registered",
}


def __getattr__(name: str) -> Any:
    # What a training with DDP does not need is imported where it is used.
    if name in _LATE:
        return getattr(import_module(_LATE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
