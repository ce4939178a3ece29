"""Statistics of communication: bytes, time by stage, and values lost to the limits of a format."""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.runtime.executor import Mark, mark

_adding = threading.Lock()
"""Lock for the addition of seconds, which several threads do."""


@dataclass
class TrafficStats:
    """Bytes that this rank sent, bytes that it would have sent uncompressed, and the time that it took.

    Seconds are the host's: on a GPU, where the host only enqueues, they stay 0.
    """

    encode_s: float = 0.0
    wire_s: float = 0.0
    """Seconds of waiting for messages."""
    reduce_s: float = 0.0
    """Seconds of summing a chunk of one's own and encoding its mean."""
    decode_s: float = 0.0
    dense_bytes: int = 0
    """Bytes that the same values take uncompressed: in a ring all-reduce 2(n−1)/n of their size, in a gather or a
    reduce-scatter (n−1)/n of it."""
    payload_sent_bytes: int = 0
    """Bytes handed to the transport: messages with their headers, without those of TCP."""
    payload_received_bytes: int = 0
    payload_shared_bytes: int = 0
    """Part of the bytes sent that ranks of the same node took from shared memory."""
    buffer_bytes: int = 0
    """Bytes of memory that messages take on this rank now."""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time that the body takes to ``<name>_s``."""
        started = time.perf_counter()
        try:
            yield
        finally:
            key = f"{name}_s"
            with _adding:
                setattr(self, key, getattr(self, key) + time.perf_counter() - started)

    @property
    def ratio(self) -> float:
        """Factor by which fewer bytes were sent than without compression."""
        return self.dense_bytes / self.payload_sent_bytes if self.payload_sent_bytes else 1.0

    @property
    def saved_bytes(self) -> int:
        return self.dense_bytes - self.payload_sent_bytes

    def to_dict(self) -> dict[str, float]:
        """Return the totals by name, as loggers take them."""
        return {**asdict(self), "ratio": self.ratio, "saved_bytes": self.saved_bytes}


@dataclass
class Stats(TrafficStats):
    """Totals of this rank since the `Wire` was made, or since `Wire.reset_stats`."""

    steps: int = 0
    """Backward passes that reduced gradients."""
    declined_layers: int = 0
    """Layers (of a sharded model: weights and gradients) left raw because compressing them would have been slower."""
    unsuited_layers: int = 0
    """Layers left raw because their compressor cannot take such a shape."""
    plan_changes: int = 0
    """Times that a policy's plan was taken over (``adapt=``)."""
    adapt_s: float = 0.0
    """Seconds of the training threads for a policy: summing gradients, waiting for the decision, changing the plan."""
    nonfinite_steps: int = 0
    """Steps that left error feedback as it was, because some rank met NaN or Inf."""
    state_resets: int = 0
    """Times that residuals and other slots were reset, because means were not finite although all gradients were."""
    slot_bytes: int = 0
    """Bytes that the state of compressors takes on this rank now: residuals, twice over, so that a step with NaN or
    Inf leaves none behind."""
    compressed_steps: int = 0
    """DDP: steps in which compression was on (from ``start`` on)."""
    buckets: int = 0
    """DDP: buckets reduced."""
    sync_s: float = 0.0
    """DDP: seconds of compressed steps from the start of the first bucket's communication to the end of the last
    one's."""
    encoded: int = 0
    """DDP: elements encoded."""
    saturated: int = 0
    """DDP: encoded elements that lay outside the range of their format."""
    overflowed: int = 0
    """DDP: elements that should have been sent and found no room in a message of bounded size."""
    alpha: list[tuple[int, float]] = field(default_factory=list)
    """DDP: (step, ‖mean − received‖ / ‖mean‖) of each measured step (``measure_every``), assumption 3.2 of the FFT
    paper."""
    parity_checks: int = 0
    """DDP: comparisons of all ranks' parameters."""
    resyncs: int = 0
    """DDP: times that rank 0's parameters were copied to all ranks."""
    gathers: int = 0
    """FSDP2: all-gathers of a unit's weights, over all ranks."""
    local_gathers: int = 0
    """FSDP2: all-gathers of weights that an earlier one had left inside the node (``reshard_after_forward=`` a
    number)."""
    reductions: int = 0
    """FSDP2: reduce-scatters of a unit's gradients."""
    overlapped: int = 0
    """FSDP2: reductions that ran during backward."""
    learn_s: float = 0.0
    """FSDP2: seconds that learning quantization levels took."""

    @property
    def clipped(self) -> float:
        """DDP: the share of the encoded elements that saturated; of IntSGD, that were clipped so that integer sums
        fit."""
        return self.saturated / self.encoded if self.encoded else 0.0

    def to_dict(self) -> dict[str, float]:
        """Return the totals by name, with the last value of ``alpha`` if there is one."""
        totals = super().to_dict() | {"clipped": self.clipped}
        del totals["alpha"]
        return totals | ({"alpha": self.alpha[-1][1]} if self.alpha else {})

    def __str__(self) -> str:
        sharded = f", {self.gathers} gathers, {self.reductions} reductions" if self.gathers or self.reductions else ""
        return (
            f"{self.steps} steps{sharded}, {self.payload_sent_bytes / 1e6:.1f} MB sent instead of "
            f"{self.dense_bytes / 1e6:.1f} MB ({self.ratio:.1f}x less); encode {self.encode_s:.2f} s, "
            f"wire {self.wire_s:.2f} s, reduce {self.reduce_s:.2f} s, decode {self.decode_s:.2f} s"
        )


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
    """Buffers of all-reduces, reduce-scatters and all-gathers that were sent exact, by gloo."""
    passed_bytes: int = 0
    """Bytes that the buffers sent exact take, sent by a ring."""
    unknown: int = 0
    """Buffers sent exact that would have been compressed if they were known to hold gradients or weights."""


_WINDOW_STEPS = 20
_LIMIT = 0.01


class ClippingMonitor:
    """Counts clipped values of this rank over some steps, and warns, once, beyond 1 %: what is clipped is lost."""

    def __init__(self) -> None:
        self._steps = self._clipped = self._rounded = 0
        self._warned = False

    def add(self, clipped: int, rounded: int) -> None:
        """Count one bucket."""
        self._clipped += clipped
        self._rounded += rounded

    def warn(self) -> None:
        """Begin a step; after every window of steps, warn if too much was clipped in it."""
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
    """Counts a `Wire`'s buckets, and what belongs to a step as a whole."""

    def __init__(self, stats: Stats) -> None:
        self.stats = stats
        self.clipping = ClippingMonitor()
        self._step = -1
        self._error = self._norm = 0.0
        self._measured_step = -1
        self._began: Mark | None = None
        self._ended: Mark | None = None

    def step(self, step: int, *, compressed: bool) -> bool:
        """Count a step when its first bucket comes; return whether this was it."""
        if step == self._step:
            return False
        self._step = step
        self.stats.steps += 1
        self.stats.compressed_steps += compressed
        return True

    def bucket_begins(self, device: torch.device) -> None:
        self._began = self._began or mark(device)

    def bucket_ends(self, device: torch.device) -> None:
        self._ended = mark(device)

    def sync_seconds(self) -> float:
        """Return the seconds from the start of a step's first bucket to the end of its last, and reset them to 0."""
        seconds = self._ended.since(self._began) if self._began and self._ended else 0.0
        self._began = self._ended = None
        self.stats.sync_s += seconds
        return seconds

    def bucket(self, dense: int, sent: int = 0) -> None:
        """Count a bucket whose gradients take ``dense`` bytes; ``sent`` of them not through the transport."""
        self.stats.buckets += 1
        self.stats.dense_bytes += dense
        self.add_extra(sent)

    def add_extra(self, moved: int) -> None:
        """Count bytes that were sent and received in addition to buckets, and not through the transport."""
        self.stats.payload_sent_bytes += moved
        self.stats.payload_received_bytes += moved

    def limits(self, saturated: int, overflowed: int, clipped: int, rounded: int) -> None:
        """Count values that messages and sums could not hold, and those that were clipped to fit into integers, of all
        that became integers."""
        self.clipping.add(clipped, rounded)
        self.stats.saturated += saturated + clipped
        self.stats.overflowed += overflowed
        self.stats.encoded += rounded

    def measure(self, exact: Tensor, received: Tensor, step: int) -> None:
        """Add a bucket to a step's error: what arrived against the exact mean."""
        self._measured_step = step
        self._error += float((received.float() - exact).double().square().sum())
        self._norm += float(exact.double().square().sum())

    def end_measure(self) -> None:
        """End a measured step, and note its error."""
        if self._norm > 0.0:
            self.stats.alpha.append((self._measured_step, math.sqrt(self._error / self._norm)))
        self._error = self._norm = 0.0


class ProfilerRanges:
    """Names the stages for ``torch.profiler``: on the host they take no time worth counting."""

    def stage(self, name: str) -> AbstractContextManager[Any]:
        return torch.profiler.record_function(f"thinwire {name}")
