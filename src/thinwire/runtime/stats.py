"""What communication did: bytes, time by stage, and what was lost to the limits of a format."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thinwire.compressors import Count

if TYPE_CHECKING:
    from thinwire.runtime.channel import Channel


@dataclass
class StageSeconds:
    """Time that communication spends in each of its stages."""

    encode_s: float = 0.0
    """Seconds of the host, as those of the other stages: on a GPU, where the host only enqueues, they stay 0."""
    wire_s: float = 0.0
    """Waiting for messages."""
    reduce_s: float = 0.0
    """Summing a chunk of one's own and encoding its mean."""
    decode_s: float = 0.0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time that the body takes to ``<name>_s``."""
        started = time.perf_counter()
        try:
            yield
        finally:
            key = f"{name}_s"
            setattr(self, key, getattr(self, key) + time.perf_counter() - started)


@dataclass
class TrafficStats(StageSeconds):
    """What this rank sent, and what it would have sent uncompressed."""

    dense_bytes: int = 0
    """Bytes that the same values take uncompressed: in a ring all-reduce 2(n−1)/n of their size, in a gather or a
    reduce-scatter (n−1)/n of it."""
    payload_sent_bytes: int = 0
    """Bytes handed to the transport: messages with their headers, without those of TCP."""
    payload_received_bytes: int = 0
    payload_shared_bytes: int = 0
    """Of the bytes sent, those that ranks of the same node took from shared memory."""
    buffer_bytes: int = 0
    """Memory that messages take on this rank now."""

    @property
    def ratio(self) -> float:
        """How many times fewer bytes were sent than without compression."""
        return self.dense_bytes / self.payload_sent_bytes if self.payload_sent_bytes else 1.0

    @property
    def saved_bytes(self) -> int:
        return self.dense_bytes - self.payload_sent_bytes

    def to_dict(self) -> dict[str, float]:
        """Return the totals by name, as loggers take them."""
        return {**asdict(self), "ratio": self.ratio, "saved_bytes": self.saved_bytes}


@dataclass
class HandleStats(TrafficStats):
    """What a `Wire` and a `ShardedWire` both count: totals of this rank since it was made (or since `reset_stats`)."""

    steps: int = 0
    """Backward passes that reduced gradients."""
    declined_layers: int = 0
    """Layers (of a sharded model: weights and gradients) left raw because compressing them would have been slower."""
    plan_changes: int = 0
    """Times that a policy's plan was taken over (``adapt=``)."""
    adapt_s: float = 0.0
    """Seconds of the training threads for that: summing gradients, waiting for the decision, changing the plan."""
    nonfinite_steps: int = 0
    """Steps of which error feedback took nothing, because some rank met NaN or Inf."""
    state_resets: int = 0
    """Times that residuals and other slots started anew, because means were not finite although all gradients were."""
    slot_bytes: int = 0
    """Memory that the state of compressors takes on this rank now: residuals, twice over, so that a step with NaN or
    Inf leaves none behind."""

    def __str__(self) -> str:
        return (
            f"{self._exchanges}, {self.payload_sent_bytes / 1e6:.1f} MB sent instead of "
            f"{self.dense_bytes / 1e6:.1f} MB ({self.ratio:.1f}x less); encode {self.encode_s:.2f} s, "
            f"wire {self.wire_s:.2f} s, reduce {self.reduce_s:.2f} s, decode {self.decode_s:.2f} s"
        )

    @property
    def _exchanges(self) -> str:
        return f"{self.steps} steps"


@dataclass
class Stats(HandleStats):
    """Totals of this rank since the Wire was made (or since `reset_stats`)."""

    compressed_steps: int = 0
    """Those of them in which compression was on (from ``start`` on)."""
    buckets: int = 0
    """DDP buckets reduced."""
    unsuited_layers: int = 0
    """Layers left raw because their compressor cannot take such a shape."""
    sync_s: float = 0.0
    """Seconds of compressed steps from the start of the first bucket's communication to the end of the last one's."""
    encoded: int = 0
    """Elements encoded."""
    saturated: int = 0
    """Of those, how many lay outside the range of their format."""
    overflowed: int = 0
    """Elements that should have been sent and found no room in a message of bounded size."""
    alpha: list[tuple[int, float]] = field(default_factory=list)
    """(step, ‖mean − received‖ / ‖mean‖) of each measured step (``measure_every``): assumption 3.2 of the FFT paper."""
    parity_checks: int = 0
    resyncs: int = 0

    @property
    def clipped(self) -> float:
        """Share of the encoded elements that saturated: of IntSGD, that were clipped so that integer sums fit."""
        return self.saturated / self.encoded if self.encoded else 0.0

    def to_dict(self) -> dict[str, float]:
        """Return the totals by name, with the last value of ``alpha`` if there is one."""
        totals = super().to_dict() | {"clipped": self.clipped}
        del totals["alpha"]
        return totals | ({"alpha": self.alpha[-1][1]} if self.alpha else {})


@dataclass
class GroupStats(TrafficStats):
    """Totals of this rank since the process group was made."""

    compressed: int = 0
    """Buffers that were sent compressed."""
    matched: int = 0
    """Buffers in which registered layers were found; those of them that hold raw layers alone were sent exact."""
    uniform: int = 0
    """Buffers compressed as if they were one layer."""
    passed: int = 0
    """Buffers of these kinds of collectives that were sent exact, by gloo."""
    passed_bytes: int = 0
    """Bytes that these take, sent by a ring."""
    unknown: int = 0
    """Of these buffers, those that would have been compressed if it were known that they hold gradients or weights."""


@dataclass
class ShardedStats(HandleStats):
    """Totals of this rank since the ShardedWire was made (or since `reset_stats`)."""

    gathers: int = 0
    """All-gathers of a unit's weights, over all ranks."""
    local_gathers: int = 0
    """All-gathers of weights that an earlier one had left inside the node (``reshard_after_forward=`` a number)."""
    reductions: int = 0
    """Reduce-scatters of a unit's gradients."""
    overlapped: int = 0
    """Of these, those that went on while backward did."""
    learn_s: float = 0.0
    """Seconds that learning quantisation levels took."""

    @property
    def _exchanges(self) -> str:
        return f"{self.steps} steps, {self.gathers} gathers, {self.reductions} reductions"


_WINDOW_STEPS = 20
_LIMIT = 0.01


class ClippingMonitor:
    """Counts of this rank over some steps. What is clipped is lost: beyond 1 % of the values it warns, once."""

    def __init__(self) -> None:
        self._steps = self._clipped = self._rounded = 0
        self._warned = False

    def add(self, clipped: int, rounded: int) -> None:
        """Count one bucket."""
        self._clipped += clipped
        self._rounded += rounded

    def warn(self) -> None:
        """Begin a step; every so many of them look back, and warn if too much was clipped."""
        self._steps += bool(self._rounded)
        if self._steps < _WINDOW_STEPS or self._warned:
            return
        share = self._clipped / self._rounded
        self._steps = self._clipped = self._rounded = 0
        if share > _LIMIT:
            self._warned = True
            warnings.warn(
                f"{share:.1%} of the gradients' values were clipped in the last {_WINDOW_STEPS} steps, so that sums of "
                "integers fit: take more bits, or fewer ranks; wire.stats.clipped says how it goes on",
                stacklevel=2,
            )


class StatsRecorder:
    """A Wire's `Stats` while they grow."""

    def __init__(self, channel: Channel[Stats]) -> None:
        self._channel, self._transport = channel, channel.transport
        self.clipping = ClippingMonitor()
        self._step = -1
        self._error = self._norm = 0.0
        self._measured_step = -1
        self.reset()

    def reset(self) -> None:
        """Start counting anew."""
        self.stats = self._channel.stats = Stats()
        transport = self._transport
        self._counted_from = (transport.sent_bytes, transport.received_bytes, transport.shared_bytes)
        self._began = self._ended = 0.0

    def present(self, buffer_bytes: int, slot_bytes: int) -> Stats:
        """Totals, with what the transport has moved and the memory held now."""
        sent, received, shared = self._counted_from
        transport = self._transport
        return replace(
            self.stats,
            alpha=list(self.stats.alpha),
            payload_sent_bytes=self.stats.payload_sent_bytes + transport.sent_bytes - sent,
            payload_received_bytes=self.stats.payload_received_bytes + transport.received_bytes - received,
            payload_shared_bytes=transport.shared_bytes - shared,
            buffer_bytes=buffer_bytes,
            slot_bytes=slot_bytes,
        )

    def step(self, step: int, *, compressed: bool) -> bool:
        """Count a step when its first bucket comes; whether this was it."""
        if step == self._step:
            return False
        self._step = step
        self.stats.steps += 1
        self.stats.compressed_steps += compressed
        return True

    def bucket_begins(self) -> None:
        self._began = self._began or time.perf_counter()

    def bucket_ends(self) -> None:
        self._ended = time.perf_counter()

    def sync_seconds(self) -> float:
        """From the start of a step's first bucket to the end of its last one, once: 0 if there was none."""
        seconds = max(0.0, self._ended - self._began) if self._began else 0.0
        self._began = self._ended = 0.0
        self.stats.sync_s += seconds
        return seconds

    def bucket(self, dense: int, sent: int = 0) -> None:
        """Count a bucket whose gradients take ``dense`` bytes; ``sent`` of them not through the transport."""
        self.stats.buckets += 1
        self.stats.dense_bytes += dense
        self.stats.payload_sent_bytes += sent
        self.stats.payload_received_bytes += sent

    def beside(self, moved: int) -> None:
        """Count bytes that were sent and received beside a bucket, and not through the transport."""
        self.stats.payload_sent_bytes += moved
        self.stats.payload_received_bytes += moved

    def limits(self, saturated: int, overflowed: int) -> None:
        """Count what messages and sums could not hold."""
        self.stats.saturated += saturated
        self.stats.overflowed += overflowed

    def clipped(self, clipped: Count, rounded: int) -> None:
        """Count values that were clipped to fit into integers, of all that became integers."""
        self.clipping.add(int(clipped), rounded)
        self.stats.saturated += int(clipped)
        self.stats.encoded += rounded

    def measure(self, exact: Tensor, received: Tensor, step: int) -> None:
        """Add a bucket to a step's error: what arrived against the exact mean."""
        self._measured_step = step
        self._error += float((received.float() - exact).double().square().sum())
        self._norm += float(exact.double().square().sum())

    def end_measure(self) -> None:
        """A measured step is over."""
        if self._norm > 0.0:
            self.stats.alpha.append((self._measured_step, math.sqrt(self._error / self._norm)))
        self._error = self._norm = 0.0


class ProfilerRanges:
    """Names the stages for ``torch.profiler``: on the host they take no time worth counting."""

    def stage(self, name: str) -> AbstractContextManager[Any]:
        return torch.profiler.record_function(f"thinwire {name}")
