"""The Wire and what keeps it alive."""

from thinwire.wire.agree import DisagreementError
from thinwire.wire.log import StatsLogger
from thinwire.wire.parity import ParityError
from thinwire.wire.stats import Stats
from thinwire.wire.stream import Later, on_the_host
from thinwire.wire.timeline import Timeline, merge_timelines
from thinwire.wire.wire import Wire
from thinwire.wire.worker import Worker

__all__ = [
    "DisagreementError",
    "Later",
    "ParityError",
    "Stats",
    "StatsLogger",
    "Timeline",
    "Wire",
    "Worker",
    "merge_timelines",
    "on_the_host",
]
