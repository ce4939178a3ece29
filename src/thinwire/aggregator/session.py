"""The state of one aggregated training: its workers, the chunks that are being added, and its failures."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from thinwire.aggregator.protocol import MAX_LIMIT, Greeting, Header, Kind, Op, ProtocolError, packed, unpacked

_RANGES = {1: np.iinfo(np.int8), 4: np.iinfo(np.int32)}
_DTYPES = {1: np.dtype("<i1"), 4: np.dtype("<i4")}


class SessionError(Exception):
    """A session has failed. The message names the reason and is sent to all workers."""

    def __init__(self, message: str, *, by_worker: bool = True) -> None:
        super().__init__(message)
        self.by_worker = by_worker
        """Whether some of the workers, which the message names, are the cause."""


@dataclass
class Slot:
    """One accumulator and its chunk."""

    wide: np.ndarray
    """Accumulator as int64 ``[elements]``, in which int32 values are added so that an overflow is detected."""
    narrow: np.ndarray
    """Accumulator as int32 ``[elements]`` in the same memory, in which int8 values are added."""
    header: Header | None = None
    """Header of the first contribution to the present chunk, or None."""
    ranks: set[int] = field(default_factory=set)
    since_s: float = 0.0

    @staticmethod
    def pool(count: int, elements: int) -> list[Slot]:
        """Allocate ``count`` accumulators of ``elements`` values each."""
        memory = np.zeros((count, elements), dtype=np.int64)
        narrow = memory.view(np.int32)[:, :elements]
        return [Slot(memory[i], narrow[i]) for i in range(count)]

    def free(self) -> None:
        """Make the slot available for another chunk."""
        self.header = None
        self.ranks.clear()


class Session:
    """The workers of one training, independent of sockets. Times are seconds of one monotonic clock."""

    def __init__(self, greeting: Greeting, slots: list[Slot], slot_elements: int, now_s: float) -> None:
        self.greeting = greeting
        self.slots = slots
        self.slot_elements = slot_elements
        self.slots_per_lane = len(slots) // greeting.lanes
        self.joined: set[int] = set()
        self.left: set[int] = set()
        self.since_s = now_s
        self.heard_s = now_s
        """Last time at which a worker joined or sent integers."""
        self._next = [list(range(self.slots_per_lane)) for _ in range(greeting.lanes)]
        """Chunk that each slot of each lane serves next."""

    @property
    def complete(self) -> bool:
        """Whether all workers have joined."""
        return len(self.joined) == self.greeting.world_size

    def join(self, greeting: Greeting, now_s: float) -> None:
        """Add a worker.

        Raises:
            SessionError: Its greeting differs from that of the first worker.
        """
        for name, mine in self.greeting._asdict().items():
            its = getattr(greeting, name)
            if name != "rank" and its != mine:
                raise SessionError(
                    f"ranks disagree: {name} is {its} for rank {greeting.rank} and {mine} for rank {self.greeting.rank}"
                )
        self.joined.add(greeting.rank)
        self.heard_s = now_s

    def leave(self, rank: int, how: str) -> None:
        """Remove a worker.

        Raises:
            SessionError: Other workers wait for its integers, or not all have joined.
        """
        self.left.add(rank)
        for slot in self.slots:
            if slot.header is not None and rank not in slot.ranks:
                raise SessionError(f"rank {rank} {how}, and others wait for its integers")
        if not self.complete:
            raise SessionError(f"rank {rank} {how} before all were there")

    def add(self, rank: int, header: Header, payload: memoryview, now_s: float) -> bytes | None:
        """Add a worker's integers to a chunk. Once all have contributed, return the result frame for all workers.

        Raises:
            ProtocolError: The frame violates the protocol.
            SessionError: Workers disagree about the chunk, or a sum overflowed.
        """
        if header.kind != Kind.CONTRIBUTE or not self.complete:
            raise ProtocolError(f"it sent a frame of kind {header.kind.name} when integers were due")
        if header.lane >= self.greeting.lanes or header.slot >= self.slots_per_lane or not header.elements:
            raise ProtocolError(f"it sent {header.elements} integers to slot {header.slot} of lane {header.lane}")
        expected = self._next[header.lane][header.slot]
        if header.chunk != expected:
            raise ProtocolError(f"it sent chunk {header.chunk} to slot {header.slot}, which serves chunk {expected}")
        if self.left:
            raise SessionError(f"rank {min(self.left)} has left, and rank {rank} sent integers to be added to its own")
        slot = self.slots[header.lane * self.slots_per_lane + header.slot]
        if rank in slot.ranks:
            raise ProtocolError(f"it sent chunk {header.chunk} twice")
        values = self._values(header, payload)
        held = (slot.narrow if header.width == 1 else slot.wide)[: header.elements]
        if slot.header is None:
            slot.header, slot.since_s = header, now_s
            np.copyto(held, values)
        elif slot.header != header:
            raise SessionError(
                f"ranks disagree on chunk {header.chunk} of lane {header.lane}: rank {rank} sends {_describe(header)}, "
                f"rank {min(slot.ranks)} {_describe(slot.header)}"
            )
        elif header.op == Op.MAX:
            np.maximum(held, values, out=held)
        else:
            np.add(held, values, out=held)
        slot.ranks.add(rank)
        self.heard_s = now_s
        if len(slot.ranks) < self.greeting.world_size:
            return None
        slot.free()
        self._next[header.lane][header.slot] += self.slots_per_lane
        return self._result(header, held)

    def _values(self, header: Header, payload: memoryview) -> np.ndarray:
        if not header.limit:
            return np.frombuffer(payload, dtype=_DTYPES[header.width])
        if header.limit * self.greeting.world_size > MAX_LIMIT:
            raise SessionError(
                f"sums of integers up to {header.limit} from {self.greeting.world_size} ranks do not fit into 8 bits"
            )
        return unpacked(payload, header.elements, header.limit).numpy()

    def _result(self, header: Header, held: np.ndarray) -> bytes:
        if header.limit:
            limit = header.limit * self.greeting.world_size
            sums = torch.from_numpy(held.astype(np.int8))
            return header._replace(kind=Kind.RESULT, limit=limit).pack() + packed(sums, limit)
        limits = _RANGES[header.width]
        if header.op == Op.SUM and (held.min() < limits.min or held.max() > limits.max):
            raise SessionError(
                f"a sum in chunk {header.chunk} of lane {header.lane} does not fit into int{8 * header.width}: send "
                "smaller integers, or wider ones",
                by_worker=False,
            )
        result = Header(Kind.RESULT, header.op, header.width, header.lane, header.slot, header.elements, header.chunk)
        return result.pack() + held.astype(_DTYPES[header.width]).tobytes()

    def check(self, now_s: float, join_timeout_s: float, idle_timeout_s: float) -> None:
        """Check the timeouts: for joining, for missing contributions, and for an idle session.

        Raises:
            SessionError: One has passed; the message names the missing ranks.
        """
        everybody, timeout_s = set(range(self.greeting.world_size)), self.greeting.timeout_ms / 1000
        if not self.complete:
            join_timeout_s = min(join_timeout_s, timeout_s)
            if now_s - self.since_s > join_timeout_s:
                raise SessionError(f"{_ranks(everybody - self.joined)} did not join within {join_timeout_s:g} s")
            return
        late = [slot for slot in self.slots if slot.header is not None and now_s - slot.since_s > timeout_s]
        if late:
            missing = set().union(*(everybody - slot.ranks for slot in late))
            raise SessionError(f"nothing came from {_ranks(missing)} within {timeout_s:g} s, and others wait for it")
        if now_s - self.heard_s > idle_timeout_s:
            raise SessionError(
                f"no worker sent anything within {idle_timeout_s:g} s: start the aggregator with a longer "
                "--idle-timeout if a training pauses for as long",
                by_worker=False,
            )

    @property
    def slots_in_use(self) -> int:
        """Number of slots that have a chunk."""
        return sum(slot.header is not None for slot in self.slots)


def _describe(header: Header) -> str:
    up_to = f" up to {header.limit}" if header.limit else ""
    return f"{header.elements} of int{8 * header.width}{up_to} to {header.op.name}"


def _ranks(ranks: set[int]) -> str:
    first = sorted(ranks)[:16]
    more = f" and {len(ranks) - len(first)} more" if len(ranks) > len(first) else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, first))}{more}"
