"""The Wire and what keeps it alive."""

from thinwire.runtime.adapt import Decision
from thinwire.runtime.bucket_engine import BucketEngine
from thinwire.runtime.channel import Channel, group_seed
from thinwire.runtime.consistency import DisagreementError, ParityError, agree
from thinwire.runtime.engine import WireSettings
from thinwire.runtime.exchange import Contents, Exchange, Kind, Route, dense_bytes
from thinwire.runtime.executor import AsyncReadback, Follower, ThreadExecutor, for_reducer, on_the_host, start_mean
from thinwire.runtime.placement import ShardedLayer
from thinwire.runtime.probe import measure_one_way
from thinwire.runtime.registered import LayerCursor, NamedShape
from thinwire.runtime.stats import GroupStats, Stats
from thinwire.runtime.units import Unit
from thinwire.runtime.wire import Wire

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
    "LayerCursor",
    "NamedShape",
    "ParityError",
    "Route",
    "ShardedLayer",
    "Stats",
    "ThreadExecutor",
    "Unit",
    "Wire",
    "WireSettings",
    "agree",
    "dense_bytes",
    "for_reducer",
    "group_seed",
    "measure_one_way",
    "on_the_host",
    "start_mean",
]
