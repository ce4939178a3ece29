"""The Wire and what keeps it alive."""

from thinwire.wire.agree import DisagreementError, agree
from thinwire.wire.log import StatsLogger
from thinwire.wire.parity import ParityError
from thinwire.wire.stats import Stats
from thinwire.wire.timeline import Timeline, merge_timelines
from thinwire.wire.wire import Wire
from thinwire.wire.worker import Worker

__all__ = [
    "DisagreementError",
    "ParityError",
    "Stats",
    "StatsLogger",
    "Timeline",
    "Wire",
    "Worker",
    "agree",
    "merge_timelines",
]
