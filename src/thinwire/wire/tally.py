"""Counters of a Wire: what happened, and what the transport has moved since."""

from __future__ import annotations

import math
import time
from dataclasses import replace

from torch import Tensor

from thinwire.collectives import Transport
from thinwire.compressors import Count
from thinwire.wire.clipping import Clipping
from thinwire.wire.stats import Stats


class Tally:
    """A Wire's `Stats` while they grow."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.clipping = Clipping()
        self._step = -1
        self._error = self._norm = 0.0
        self._measured_step = -1
        self.reset()

    def reset(self) -> None:
        """Start counting anew."""
        self.stats = Stats()
        of = self._transport
        self._counted_from = (of.sent_bytes, of.received_bytes, of.shared_bytes)
        self._began = self._ended = 0.0

    def present(self, buffer_bytes: int, slot_bytes: int) -> Stats:
        """Totals, with what the transport has moved and the memory held now."""
        sent, received, shared = self._counted_from
        of = self._transport
        return replace(
            self.stats,
            alpha=list(self.stats.alpha),
            payload_sent_bytes=self.stats.payload_sent_bytes + of.sent_bytes - sent,
            payload_received_bytes=self.stats.payload_received_bytes + of.received_bytes - received,
            payload_shared_bytes=of.shared_bytes - shared,
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
        found = max(0.0, self._ended - self._began) if self._began else 0.0
        self._began = self._ended = 0.0
        self.stats.sync_s += found
        return found

    def bucket(self, dense: int, sent: int = 0) -> None:
        """Count a bucket whose gradients take ``dense`` bytes; ``sent`` of them not through the transport."""
        self.stats.buckets += 1
        self.stats.dense_bytes += dense
        self.stats.payload_sent_bytes += sent
        self.stats.payload_received_bytes += sent

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
