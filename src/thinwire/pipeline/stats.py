"""Statistics of a pipeline stage: bytes, times, and the changes of activations between visits."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise

from thinwire.store import Store

_FALLS = 0.8
"""Ratio of a change to that of the visit before from which on changes count as constant."""
_adding = threading.Lock()
"""Lock that is held while something is added, which several threads do."""


@dataclass
class EpochMeans:
    """Means of the samples that this stage sent at the same number of visits: Figure 1(b) of AQ-SGD."""

    activation: float = 0.0
    """Mean magnitude of the activations, a value."""
    delta: float = 0.0
    """Mean magnitude of the change since the visit before; 0 in the first epoch and those of a warm-up."""
    samples: int = 0

    @property
    def share(self) -> float:
        """Change as a share of the activation."""
        return self.delta / self.activation if self.activation else 0.0


@dataclass
class PipelineStats:
    """Totals of one stage since it was made. Bytes are those of messages with their headers, without TCP's."""

    encode_s: float = 0.0
    """Seconds of encoding in the worker's thread, while the training's thread computes."""
    decode_s: float = 0.0
    """Seconds of decoding in the receive thread, including waits for records that are being loaded."""
    wait_s: float = 0.0
    """Seconds that the training's thread waits for its next input to be received and decoded."""
    store_s: float = 0.0
    """Seconds in the message stores: loading and saving in the worker's thread, checking in the training's."""
    agree_s: float = 0.0
    """Seconds before each step's first micro-batch, in which ranks exchange samples and fingerprints."""
    steps: int = 0
    evaluations: int = 0
    forward_sent_bytes: int = 0
    backward_sent_bytes: int = 0
    received_bytes: int = 0
    dense_bytes: int = 0
    """Bytes of the tensors that this stage sent, uncompressed."""
    resets: int = 0
    """Number of samples that were kept here and count as unseen again, because a record was corrupt or differed from
    the other side's."""
    corrupt: int = 0
    """Number of those samples whose record was corrupt here."""
    nonfinite: int = 0
    """Number of samples of which nothing was kept, because their message had NaN or Inf."""
    evicted: int = 0
    turned_away: int = 0
    """Number of visits of samples for which the store had no room."""
    kept_samples: int = 0
    """Number of samples in the stores of both sides of this stage now."""
    store_bytes: int = 0
    """Bytes of these stores now."""
    epochs: list[EpochMeans] = field(default_factory=list)
    """Means by visit, the first one first."""

    def holding(self, stores: Collection[Store]) -> PipelineStats:
        """Return a copy, with the present contents of these stores."""
        return replace(
            self,
            epochs=[replace(epoch) for epoch in self.epochs],
            evicted=sum(store.evicted for store in stores),
            turned_away=sum(store.turned_away for store in stores),
            kept_samples=sum(len(store) for store in stores),
            store_bytes=sum(store.num_bytes for store in stores),
        )

    @property
    def sent_bytes(self) -> int:
        return self.forward_sent_bytes + self.backward_sent_bytes

    @property
    def saved_bytes(self) -> int:
        return self.dense_bytes - self.sent_bytes

    @property
    def ratio(self) -> float:
        """Ratio of the uncompressed bytes to those that were sent."""
        return self.dense_bytes / self.sent_bytes if self.sent_bytes else 1.0

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time that the body takes to ``<name>_s``."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(**{f"{name}_s": time.perf_counter() - started})

    def add(self, **more: float) -> None:
        """Add to totals by their names, in any thread."""
        with _adding:
            for name, value in more.items():
                setattr(self, name, getattr(self, name) + value)

    def note(self, visit: int, activation: float, delta: float, numel: int) -> None:
        """Add a sample at its ``visit``-th visit (from 0): sums of the magnitudes of ``numel`` values."""
        while len(self.epochs) <= visit:
            self.epochs.append(EpochMeans())
        means = self.epochs[visit]
        means.samples += 1
        means.activation += (activation / max(numel, 1) - means.activation) / means.samples
        means.delta += (delta / max(numel, 1) - means.delta) / means.samples

    def lasting_change(self) -> float:
        """Return the change between two visits, as a share of the activation, once it falls no more from visit to
        visit: from the third visit on, and 0 before."""
        lasting = 0.0
        for before, now in pairwise(self.epochs[1:]):
            if 2 * now.samples >= before.samples > 0:
                lasting = now.share if now.share > _FALLS * before.share else 0.0
        return lasting

    def to_dict(self) -> dict[str, object]:
        return {**asdict(self), "sent_bytes": self.sent_bytes, "saved_bytes": self.saved_bytes, "ratio": self.ratio}

    def __str__(self) -> str:
        return (
            f"{self.steps} steps, {self.sent_bytes / 1e6:.1f} MB sent instead of {self.dense_bytes / 1e6:.1f} MB "
            f"({self.ratio:.1f}x less); {self.kept_samples} samples kept in {self.store_bytes / 1e6:.1f} MB, "
            f"{self.resets} reset"
        )
