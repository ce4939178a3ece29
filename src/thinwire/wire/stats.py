"""What a Wire did: bytes, and time per stage."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field


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
class Stats(StageSeconds):
    """Totals of this rank since the Wire was made (or since `reset`)."""

    steps: int = 0
    """Backward passes that communicated."""
    compressed_steps: int = 0
    """Those of them in which compression was on (from ``start`` on)."""
    buckets: int = 0
    """DDP buckets reduced."""
    dense_bytes: int = 0
    """Bytes that a ring all-reduce of the same gradients, uncompressed, sends: 2(n−1)/n of their size."""
    payload_sent_bytes: int = 0
    """Bytes handed to the transport: messages with their headers, without those of TCP."""
    payload_received_bytes: int = 0
    payload_shared_bytes: int = 0
    """Of the bytes sent, those that ranks of the same node took from shared memory."""
    declined_layers: int = 0
    """Layers left raw because compressing them would have been slower."""
    unsuited_layers: int = 0
    """Layers left raw because their compressor cannot take such a shape."""
    sync_s: float = 0.0
    """Seconds of compressed steps from the start of the first bucket's communication to the end of the last one's."""
    plan_changes: int = 0
    """Times that a policy's plan was taken over (``adapt=``)."""
    adapt_s: float = 0.0
    """Seconds of the training threads for that: summing gradients, waiting for the decision, changing the plan."""
    encoded: int = 0
    """Elements encoded."""
    saturated: int = 0
    """Of those, how many lay outside the range of their format."""
    overflowed: int = 0
    """Elements that should have been sent and found no room in a message of bounded size."""
    alpha: list[tuple[int, float]] = field(default_factory=list)
    """(step, ‖mean − received‖ / ‖mean‖) of each step that was measured (``measure=``): S3's assumption 3.2."""
    nonfinite_steps: int = 0
    """Steps of which error feedback took nothing, because some rank met NaN or Inf."""
    parity_checks: int = 0
    resyncs: int = 0
    buffer_bytes: int = 0
    """Memory that messages take on this rank now."""
    slot_bytes: int = 0
    """Memory that the state of compressors takes on this rank now: residuals, twice over, so that a step with NaN or
    Inf leaves none behind."""

    @property
    def ratio(self) -> float:
        """How many times fewer bytes were sent than an uncompressed all-reduce would have sent."""
        return self.dense_bytes / self.payload_sent_bytes if self.payload_sent_bytes else 1.0

    @property
    def clipped(self) -> float:
        """Share of the encoded elements that saturated: of IntSGD, that were clipped so that integer sums fit."""
        return self.saturated / self.encoded if self.encoded else 0.0

    @property
    def saved_bytes(self) -> int:
        return self.dense_bytes - self.payload_sent_bytes

    def to_dict(self) -> dict[str, float]:
        return {**asdict(self), "ratio": self.ratio, "saved_bytes": self.saved_bytes, "clipped": self.clipped}

    def __str__(self) -> str:
        return (
            f"{self.steps} steps, {self.payload_sent_bytes / 1e6:.1f} MB sent instead of "
            f"{self.dense_bytes / 1e6:.1f} MB ({self.ratio:.1f}x less); encode {self.encode_s:.2f} s, "
            f"wire {self.wire_s:.2f} s, reduce {self.reduce_s:.2f} s, decode {self.decode_s:.2f} s"
        )
