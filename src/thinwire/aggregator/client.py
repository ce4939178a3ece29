"""The worker's side of in-network aggregation: integer tensors are sent in chunks and replaced by their sums."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import ssl
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire import threads
from thinwire.aggregator.protocol import (
    HEADER,
    HELLO,
    Greeting,
    Header,
    Kind,
    Op,
    ProtocolError,
    packed,
    packed_bytes,
    proof,
    read_nonce,
    unpacked,
)
from thinwire.arguments import check_type
from thinwire.collectives.errors import TransportError
from thinwire.collectives.transport import Pending
from thinwire.compressors import Reduction

_OPS = {"sum": Op.SUM, "max": Op.MAX}
_WIDTHS = {torch.int8: 1, torch.int32: 4}
_TURN_S = 0.5
_LEAVING_S = 1.0
_GRACE_S = 5.0
"""Seconds after the timeout, at which the aggregator reports missing ranks, until its own silence is an error."""


@dataclass
class _Job:
    """One all-reduce: its bytes, and how many elements were sent and received."""

    data: memoryview
    width: int
    op: Op
    link: _Link
    limit: int
    """Largest magnitude of this rank's integers, which are sent packed; 0 if they are not."""
    sent: int = 0
    """Number of elements sent."""
    received: int = 0
    done: threading.Event = field(default_factory=threading.Event)
    error: TransportError | None = None

    @property
    def numel(self) -> int:
        return len(self.data) // self.width

    def wait(self) -> None:
        started_s = time.monotonic()
        while not self.done.wait(_TURN_S):
            self.link.check(started_s)
        if self.error is not None:
            raise self.error


@dataclass
class _Lane:
    """All-reduces in their order, and the chunks of them whose sums have not been received."""

    slots: int
    waiting: deque[_Job] = field(default_factory=deque)
    out: deque[tuple[Header, memoryview, _Job]] = field(default_factory=deque)
    next_chunk: int = 0


@dataclass(frozen=True)
class AggregatorAddress:
    """The address of an aggregator, with the token and the TLS context that it may require.

        address = AggregatorAddress("10.0.0.1:29600", token=token, tls=ssl.create_default_context(cafile="ca.pem"))
        wire = thinwire.compress(model, "intsgd(bits=8)", network=thinwire.Network(aggregator=address))

    Args:
        address: ``host:port``; ``host:port?slots=16`` requests that many slots instead of the default share.
        token: the aggregator's token (``--token-file``). It is neither sent nor shown.
        tls: encrypts the connection and checks the aggregator's certificate.

    Raises:
        ValueError: the address is invalid.
        TypeError: the token is not text, or ``tls`` is not an ``ssl.SSLContext``.
    """

    address: str
    token: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        parse_address(self.address)
        if not isinstance(self.token, str):  # which is not shown, whatever it is
            raise TypeError(f"token must be text, not {type(self.token).__name__}")
        check_type("tls", self.tls, ssl.SSLContext | None, "an ssl.SSLContext")

    def __str__(self) -> str:
        return f"{self.address}{', with TLS' if self.tls else ''}"


class AggregatorClient:
    """This rank's connection to an aggregator (``thinwire aggregator``).

    The all-reduces of a lane have the same order on all ranks. A lane has a share of the aggregator's slots, which is
    the number of chunks that it has in flight. An event loop in a background thread sends and receives.

    Args:
        where: address of the aggregator; as text, ``host:port`` or ``host:port?slots=16``.
        rank: rank of this worker.
        world_size: number of workers.
        session: a number that all ranks of this training share, and no other training has.
        timeout_s: seconds that ranks may wait for one another.
        lanes: number of lanes.

    Raises:
        ValueError: the address is invalid.
        TransportError: no aggregator answers there, it refuses, or not all ranks connected.
    """

    def __init__(
        self,
        where: str | AggregatorAddress,
        *,
        rank: int,
        world_size: int,
        session: int,
        timeout_s: float,
        lanes: int = 2,
    ) -> None:
        where = AggregatorAddress(where) if isinstance(where, str) else where
        self.address = where.address
        slots = parse_address(where.address)[2]
        greeting = Greeting(rank, world_size, lanes, slots, max(1, int(timeout_s * 1000)), session)
        self._link = _Link(where, greeting, timeout_s)
        self._finalizer = weakref.finalize(self, self._link.close)
        threads.start(self._link.run, name="thinwire aggregator", end=self._link.close)
        try:
            welcome = self._link.welcome.result(2 * (timeout_s + _GRACE_S))
        except BaseException:
            self.close()
            raise
        self.slot_elements, self.slots_per_lane = welcome.elements, welcome.chunk

    def start_all_reduce(self, x: Tensor, *, lane: int = 0, op: Reduction = "sum", limit: int = 0) -> Pending:
        """Start to replace ``x`` (int8 or int32, contiguous, on the CPU) by its sum or maximum over all ranks.

        With a ``limit``, int8 integers of at most that magnitude are sent packed, and so are their sums, whose
        magnitudes are at most ``limit · world_size``, below 128.

        Raises:
            TypeError: ``x`` is not such a tensor.
            TransportError: the connection broke earlier. If it breaks later, waiting raises it.
        """
        if x.dtype not in _WIDTHS or x.device.type != "cpu" or not x.is_contiguous():
            raise TypeError(f"an aggregator adds contiguous int8 or int32 tensors on the CPU, not {x.dtype} {x.device}")
        data = x.numpy().reshape(-1).data.cast("B") if x.numel() else memoryview(b"")
        job = _Job(data, _WIDTHS[x.dtype], _OPS[op], self._link, limit)
        if not x.numel():
            job.done.set()
        else:
            self._link.submit(job, lane)
        return job

    def wire_bytes(self, numel: int, width: int, limit: int = 0) -> int:
        """Return the bytes of ``numel`` integers, each way: headers, and ``width`` bytes each, or packed ones."""
        headers = -(-numel // self.slot_elements) * HEADER.size
        if not limit:
            return headers + numel * width
        whole, rest = divmod(numel, self.slot_elements)
        return headers + whole * packed_bytes(self.slot_elements, limit) + packed_bytes(rest, limit)

    def close(self) -> None:
        """End the session. Pending all-reduces fail."""
        self._finalizer()


class _Link(asyncio.BufferedProtocol):
    """The connection, in an event loop of its own. It has no reference to the client, whose finalizer closes it.

    Headers are received into one buffer, and sums directly into the tensor.
    """

    transport: asyncio.Transport | None = None

    def __init__(self, where: AggregatorAddress, greeting: Greeting, timeout_s: float) -> None:
        self._where, self._greeting, self._timeout_s = where, greeting, timeout_s
        self._target = where.address.partition("?")[0]
        self.welcome: Future[Header] = Future()
        """First frame, which the aggregator sends when all ranks are connected, or a `TransportError`."""
        self._lanes: list[_Lane] = []
        self._slot_elements = 0
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._ended: asyncio.Future[TransportError] = self._loop.create_future()
        self._error: TransportError | None = None
        self._heard_s = time.monotonic()
        self._header = bytearray(HEADER.size)
        self._have = 0
        self._into = memoryview(bytearray(HELLO.size))
        self._arrived: Callable[[], None] = self._greet
        """Function that is called when ``_into`` is full."""

    # ---- Called by other threads ------------------------------------------------------------------------------------

    def submit(self, job: _Job, lane: int) -> None:
        with self._lock:
            if self._error is not None:
                raise TransportError(
                    f"the link to the aggregator broke earlier: {self._error}",
                    host=self._error.host,
                    reason=self._error.reason,
                )
            self._lanes[lane].waiting.append(job)
            self._loop.call_soon_threadsafe(self._fill)

    def check(self, since_s: float) -> None:
        """Raise `TransportError` if nothing has been received for too long since ``since_s``."""
        if time.monotonic() - max(since_s, self._heard_s) > self._timeout_s + _GRACE_S:
            text = f"nothing came from the aggregator at {self._target} within {self._timeout_s + _GRACE_S:g} s"
            raise self._is_gone(text, "the aggregator is silent: it is stopped, or cut off")

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._leave)

    def run(self) -> None:
        """Send and receive until the link is closed or breaks. Runs in a thread."""
        try:
            self._end(self._loop.run_until_complete(self._serve()))
        finally:
            self._loop.close()

    # ---- In the event loop ------------------------------------------------------------------------------------------

    async def _serve(self) -> TransportError:
        host, port, _ = parse_address(self._where.address)
        tls = self._where.tls
        connecting = self._loop.create_connection(lambda: self, host, port, ssl=tls)
        try:
            await asyncio.wait_for(connecting, self._timeout_s)
        except ssl.SSLError as error:
            return TransportError(f"the aggregator at {self._target} and this rank found no TLS: {error}")
        except (OSError, TimeoutError) as error:
            why = getattr(error, "strerror", None) or str(error) or "timed out"
            return TransportError(
                f"no aggregator answers at {self._target} ({why}): start one there with "
                f"thinwire aggregator --host {host} --port {port}"
            )
        overdue = self._loop.call_later(self._timeout_s + _GRACE_S, self._give_up)
        try:
            return await self._ended
        finally:
            overdue.cancel()

    def _give_up(self) -> None:
        if not self.welcome.done():
            self._break(TransportError(f"the aggregator at {self._target} gave no welcome: timed out"))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._into[self._have :]

    def buffer_updated(self, nbytes: int) -> None:
        self._heard_s = time.monotonic()
        self._have += nbytes
        if self._have < len(self._into) or self._ended.done():
            return
        self._have = 0
        try:
            self._arrived()
        except ProtocolError as error:
            self._break(TransportError(f"{self._broken}: {error}"))

    def eof_received(self) -> None:
        gone = f"the aggregator at {self._target} is gone: restart from the last checkpoint"
        text = gone if self.welcome.done() else f"{self._broken}: it closed the connection"
        self._break(self._is_gone(text, "the aggregator has ended"))

    def connection_lost(self, exc: Exception | None) -> None:
        text = "the connection to the aggregator was closed" if exc is None else f"{self._broken}: {exc}"
        self._break(self._is_gone(text, "the connection to the aggregator is broken"))

    def _is_gone(self, text: str, reason: str) -> TransportError:
        """Return the error of the aggregator itself, which no rank has caused."""
        return TransportError(text, host=parse_address(self._where.address)[0], reason=reason)

    def _reported(self, said: str, kind: Kind) -> TransportError:
        failed = f"the aggregator at {self._target} reports: {said}"
        return TransportError(failed) if kind == Kind.ERROR else self._is_gone(failed, said)

    @property
    def _broken(self) -> str:
        if not self.welcome.done():
            return f"the aggregator at {self._target} gave no welcome"
        return f"the link to the aggregator at {self._target} broke"

    def _break(self, error: TransportError) -> None:
        if not self._ended.done():
            self._ended.set_result(error)
        if self.transport is not None:
            self.transport.abort()

    def _expect(self, into: bytearray | memoryview, arrived: Callable[[], None]) -> None:
        self._into, self._arrived = memoryview(into), arrived

    def _greet(self) -> None:
        nonce, greeting = read_nonce(self._into), self._greeting.pack()
        assert self.transport is not None
        self.transport.write(greeting + proof(self._where.token, nonce, greeting))
        self._expect(self._header, self._begin_frame)

    def _begin_frame(self) -> None:
        header = Header.unpack(self._header, self._slot_elements)
        if header.kind in (Kind.ERROR, Kind.ENDED):
            text = bytearray(max(1, header.elements))
            self._expect(text, lambda: self._break(self._reported(text.decode(errors="replace"), header.kind)))
        elif not self.welcome.done():
            if header.kind != Kind.WELCOME or not header.elements or not header.chunk:
                raise ProtocolError(f"it answered with a frame of kind {header.kind.name}")
            self._slot_elements = header.elements
            self._lanes = [_Lane(header.chunk) for _ in range(self._greeting.lanes)]
            self.welcome.set_result(header)
        else:
            self._begin_sum(header)

    def _begin_sum(self, header: Header) -> None:
        if header.kind != Kind.RESULT or header.lane >= len(self._lanes) or not self._lanes[header.lane].out:
            raise ProtocolError(f"it sent a frame of kind {header.kind.name} that nobody waits for")
        asked, chunk, _ = self._lanes[header.lane].out[0]
        if header != asked._replace(kind=Kind.RESULT, limit=asked.limit * self._greeting.world_size):
            raise ProtocolError(f"it sent chunk {header.chunk} when {asked.chunk} was due")
        # All of this chunk was sent, or there would be no sum of it: its memory is free.
        into = bytearray(header.payload_bytes) if header.limit else chunk
        self._expect(into, lambda: self._end_sum(header, into))

    def _end_sum(self, header: Header, arrived: bytearray | memoryview) -> None:
        _, chunk, job = self._lanes[header.lane].out[0]
        if header.limit:
            chunk[:] = unpacked(arrived, header.elements, header.limit).numpy().data.cast("B")
        self._lanes[header.lane].out.popleft()
        job.received += header.elements
        if job.received == job.numel:
            job.done.set()
        self._expect(self._header, self._begin_frame)
        self._fill()

    def _fill(self) -> None:
        """Send as many chunks as there are free slots, from all lanes in turn."""
        frames: list[bytes | memoryview] = []
        with self._lock:
            moved = not self._ended.done()
            while moved:
                moved = False
                for number, lane in enumerate(self._lanes):
                    if lane.waiting and len(lane.out) < lane.slots:
                        frames += self._next_chunk(number, lane)
                        moved = True
        if frames and self.transport is not None:
            self.transport.writelines(frames)

    def _next_chunk(self, number: int, lane: _Lane) -> tuple[bytes, bytes | memoryview]:
        job = lane.waiting[0]
        count = min(self._slot_elements, job.numel - job.sent)
        slot = lane.next_chunk % lane.slots
        header = Header(Kind.CONTRIBUTE, job.op, job.width, number, slot, count, lane.next_chunk, job.limit)
        chunk = job.data[job.sent * job.width : (job.sent + count) * job.width]
        lane.out.append((header, chunk, job))
        lane.next_chunk += 1
        job.sent += count
        if job.sent == job.numel:
            lane.waiting.popleft()
        return header.pack(), packed(torch.frombuffer(chunk, dtype=torch.int8), job.limit) if job.limit else chunk

    def _leave(self) -> None:
        """Tell the aggregator that this worker leaves, if nothing waits to be sent, and close the connection."""
        if self.transport is None:
            self._break(TransportError("the connection to the aggregator was closed"))
            return
        if not self._ended.done() and not self.transport.get_write_buffer_size():
            self.transport.write(Header(Kind.LEAVE).pack())
        self.transport.close()
        self._loop.call_later(_LEAVING_S, self.transport.abort)

    def _end(self, error: TransportError) -> None:
        with self._lock:
            self._error = error
            jobs = {id(job): job for lane in self._lanes for job in (*lane.waiting, *(job for _, _, job in lane.out))}
        if not self.welcome.done():
            self.welcome.set_exception(error)
        for job in jobs.values():
            job.error = error
            job.done.set()


def parse_address(text: str) -> tuple[str, int, int]:
    """Return host, port and slots (0: all) of ``"host:port"``, ``"[::1]:port"`` or ``"host:port?slots=16"``.

    Raises:
        ValueError: it is none of these.
    """
    target, question_mark, query = text.partition("?")
    host, _, port = target.rpartition(":")
    name, _, slots = query.partition("=")
    good = bool(host) and port.isdecimal() and 0 < int(port) < 1 << 16
    if not good or (question_mark and (name != "slots" or not slots.isdecimal() or not int(slots))):
        raise ValueError(f"an aggregator's address is host:port or host:port?slots=16, not {text!r}")
    return host.strip("[]"), int(port), int(slots or 0)


def session_number() -> int:
    """Return a random session number, for rank 0 to share."""
    return secrets.randbits(62)
