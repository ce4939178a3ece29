"""The Wire and what keeps it alive."""

from thinwire.wire.adapt import Decision
from thinwire.wire.agree import DisagreementError, agree
from thinwire.wire.flat import Contents, FlatEngine, FlatStats, Kind, Operation, dense_bytes, group_seed
from thinwire.wire.link import measure_one_way
from thinwire.wire.log import StatsLogger
from thinwire.wire.parity import ParityError
from thinwire.wire.registered import NamedShape, Registered, Walk
from thinwire.wire.sharded import ShardedWire
from thinwire.wire.sharded_stats import ShardedStats
from thinwire.wire.shards import ShardedLayer
from thinwire.wire.stats import Stats
from thinwire.wire.stream import Later, on_the_host
from thinwire.wire.timeline import Timeline, merge_timelines
from thinwire.wire.units import Unit
from thinwire.wire.wire import Wire
from thinwire.wire.worker import Follower, Worker

__all__ = [
    "Contents",
    "Decision",
    "DisagreementError",
    "FlatEngine",
    "FlatStats",
    "Follower",
    "Kind",
    "Later",
    "NamedShape",
    "Operation",
    "ParityError",
    "Registered",
    "ShardedLayer",
    "ShardedStats",
    "ShardedWire",
    "Stats",
    "StatsLogger",
    "Timeline",
    "Unit",
    "Walk",
    "Wire",
    "Worker",
    "agree",
    "dense_bytes",
    "group_seed",
    "measure_one_way",
    "merge_timelines",
    "on_the_host",
]
