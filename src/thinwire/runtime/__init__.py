"""The Wire and what keeps it alive."""

from thinwire.runtime.adapt import Decision as Decision
from thinwire.runtime.bucket_engine import BucketEngine as BucketEngine
from thinwire.runtime.channel import (
    Channel as Channel,
    Contents as Contents,
    Exchange as Exchange,
    Kind as Kind,
    Route as Route,
    dense_bytes as dense_bytes,
    group_seed as group_seed,
)
from thinwire.runtime.consistency import (
    DisagreementError as DisagreementError,
    ParityError as ParityError,
    agree as agree,
)
from thinwire.runtime.engine import WireSettings as WireSettings
from thinwire.runtime.executor import (
    AsyncReadback as AsyncReadback,
    Follower as Follower,
    ThreadExecutor as ThreadExecutor,
    Work as Work,
    for_reducer as for_reducer,
    on_the_host as on_the_host,
    start_mean as start_mean,
)
from thinwire.runtime.placement import ShardedLayer as ShardedLayer
from thinwire.runtime.probe import measure_one_way as measure_one_way
from thinwire.runtime.stats import GroupStats as GroupStats, Stats as Stats
from thinwire.runtime.units import Unit as Unit
from thinwire.runtime.wire import Wire as Wire
