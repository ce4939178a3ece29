"""What a Wire of a sharded model did."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from thinwire.wire.stats import StageSeconds


@dataclass
class ShardedStats(StageSeconds):
    """Totals of this rank since the Wire was made (or since `ShardedWire.reset_stats`)."""

    steps: int = 0
    """Backward passes that reduced gradients."""
    gathers: int = 0
    """All-gathers of a unit's weights, over all ranks."""
    local_gathers: int = 0
    """All-gathers of weights that an earlier one had left inside the node (``reshard_after_forward=`` a number)."""
    reductions: int = 0
    """Reduce-scatters of a unit's gradients."""
    overlapped: int = 0
    """Of these, those that went on while backward did."""
    dense_bytes: int = 0
    """Bytes that the same weights and gradients take uncompressed, in an exchange that sends none twice."""
    payload_sent_bytes: int = 0
    """Bytes handed to the transport: messages with their headers, without those of TCP."""
    payload_received_bytes: int = 0
    payload_shared_bytes: int = 0
    """Of the bytes sent, those that ranks of the same node took from shared memory."""
    learn_s: float = 0.0
    """Seconds that learning quantisation levels took."""
    declined_layers: int = 0
    """Weights and gradients left raw because compressing them would have been slower."""
    plan_changes: int = 0
    """Times that a policy's plan was taken over (``adapt=``)."""
    adapt_s: float = 0.0
    """Seconds of the training thread for that."""
    nonfinite_steps: int = 0
    """Backward passes of which error feedback took nothing, because some rank met NaN or Inf."""
    buffer_bytes: int = 0
    """Memory that messages take on this rank now."""
    slot_bytes: int = 0
    """Memory that the state of compressors takes on this rank now: residuals, twice over."""

    @property
    def ratio(self) -> float:
        """How many times fewer bytes were sent."""
        return self.dense_bytes / self.payload_sent_bytes if self.payload_sent_bytes else 1.0

    @property
    def saved_bytes(self) -> int:
        return self.dense_bytes - self.payload_sent_bytes

    def to_dict(self) -> dict[str, float]:
        return {**asdict(self), "ratio": self.ratio, "saved_bytes": self.saved_bytes}

    def __str__(self) -> str:
        return (
            f"{self.steps} steps, {self.gathers} gathers, {self.reductions} reductions, "
            f"{self.payload_sent_bytes / 1e6:.1f} MB sent instead of {self.dense_bytes / 1e6:.1f} MB "
            f"({self.ratio:.1f}x less); encode {self.encode_s:.2f} s, wire {self.wire_s:.2f} s, "
            f"reduce {self.reduce_s:.2f} s, decode {self.decode_s:.2f} s"
        )
