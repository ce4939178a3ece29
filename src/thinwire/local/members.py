"""Workers that join and leave: the quorums of a torchft manager, and a Wire among the present ones.

torchft decides who takes part (its lighthouse), replaces the process group when that changes, and copies the shared
state to any that lack it (its manager). Nothing of torchft is imported here: the user makes the manager and the group,
and `Manager` and `Group` list what is used of them, all of it public.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives import CommunicationError, ProcessGroupTransport
from thinwire.compat import group_timeout
from thinwire.local.fragments import finite_mean
from thinwire.runtime import DisagreementError, Wire
from thinwire.runtime.consistency import exchange_texts

_log = logging.getLogger("thinwire.local")
_NONCE_BITS = 62
ANSWER_S = 10.0
"""Seconds that the others' answers are waited for."""
CONNECT_S = 5.0
"""Seconds after which a connection that is neither accepted nor refused counts as impossible."""
_MOST_CONNECTIONS = 16
_LONGEST_ANSWER_BYTES = 4096


class UnreachableError(CommunicationError):
    """Workers cannot connect to each other. With ``excused``, that is not this worker's fault."""

    def __init__(self, message: str, *, excused: bool) -> None:
        super().__init__(message)
        self.excused = excused


class Manager(Protocol):
    """The members of a ``torchft.Manager`` that are used."""

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None: ...
    def start_quorum(self) -> None: ...
    def wait_quorum(self) -> None: ...
    def errored(self) -> Any: ...
    def report_error(self, e: Exception) -> None: ...
    def is_participating(self) -> bool: ...
    def should_commit(self) -> bool: ...


class Group(Protocol):
    """Members of ``torchft.ProcessGroupGloo`` that are used. It makes a new process group for every quorum."""

    @property
    def parent(self) -> dist.ProcessGroup: ...
    def configure(
        self, store_addr: str, replica_id: str, rank: int, world_size: int, *more: Any, **named: Any
    ) -> None: ...
    def abort(self) -> None: ...


class Members:
    """The workers that take part in an exchange, and the Wire among them.

    Args:
        manager: torchft's manager of this worker, made with ``use_async_quorum=False``.
        group: the process group that the manager was made with.
        open_wire: makes the Wire of a new set of workers.
        save: returns the state that all workers share after their last exchange.
        load: takes such a state, of a worker that has taken part in exchanges that this one has missed.
    """

    def __init__(
        self,
        manager: Manager,
        group: Group,
        *,
        open_wire: Callable[[ProcessGroupTransport], Wire],
        save: Callable[[], dict[str, Tensor]],
        load: Callable[[Mapping[str, Tensor]], None],
    ) -> None:
        self._manager, self._group, self._open_wire = manager, group, open_wire
        self._me = f"{secrets.token_hex(8)} (process {os.getpid()} on {socket.gethostname()})"
        self._inner: dist.ProcessGroup | None = None
        self._transport: ProcessGroupTransport | None = None
        self._wire: Wire | None = None
        self._names: tuple[str, ...] = ()
        self.came = 0
        """Number of workers that have joined since this one did."""
        self.left = 0
        """Number of workers that have left since this one joined; each took its residual along."""
        self.failed = 0
        """Number of exchanges that this worker could not complete."""
        self.failure = ""
        """Reason of the last failed exchange."""
        self.excused = False
        """Whether the reason is another worker, to which nobody can connect."""
        # The manager calls this for every quorum. An error there fails the exchange, as gloo's errors do.
        self._configure = group.configure
        group.configure = self._check_and_configure  # pyright: ignore[reportAttributeAccessIssue]
        manager.register_state_dict_fn("thinwire", load, save)

    @property
    def wire(self) -> Wire:
        """Wire among the present workers. Its statistics begin when they met."""
        assert self._wire is not None, "workers have met"
        return self._wire

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the present workers, by rank: an identifier, the process, the machine."""
        return self._names

    def start_quorum(self) -> None:
        """Agree on who takes part in the next exchange. A worker that has missed one gets the shared state here.

        Raises:
            Exception: torchft's lighthouse does not answer, or not enough workers are there in time.
        """
        self.excused = False
        self._manager.start_quorum()
        self._manager.wait_quorum()

    def _check_and_configure(
        self, store_addr: str, replica_id: str, rank: int, world_size: int, *more: Any, **named: Any
    ) -> None:
        """Run ``configure`` of the group, once all its workers have connected to each other both ways.

        gloo connects each pair one way only, and waits for all of its timeout where it cannot.
        """
        if world_size > 1:
            try:
                check_connections(store_addr, rank, world_size)
            except UnreachableError as error:
                self.excused = error.excused
                raise
        self._configure(store_addr, replica_id, rank, world_size, *more, **named)

    def meet(self, work: int, shared: int, steps: int) -> tuple[float, int, int]:
        """Exchange counts with the workers of the quorum, over a new Wire if they are others than before.

        Args:
            work: steps, or tokens, of this worker since its last exchange.
            shared: a checksum of the shared state, which must be equal on all.
            steps: the steps that this worker counts. One that has joined in an exchange that failed counts fewer.

        Returns:
            This worker's weight in the mean, 1 on average; a number that identifies the exchange; and
            the steps of the worker that counts most.

        Raises:
            CommunicationError: a worker is gone or silent.
            DisagreementError: workers have other arguments or other shared weights.
        """
        if (error := self._manager.errored()) is not None:
            reason = str(error).split("\n", 1)[0]  # a traceback follows
            raise CommunicationError(f"torchft could not join the workers: {reason}")
        if self._group.parent is not self._inner:
            self._connect(self._group.parent)
        assert self._transport is not None
        if not self._manager.is_participating():
            work = 0
        record = torch.tensor([work, secrets.randbits(_NONCE_BITS), shared, steps], dtype=torch.int64, device="cpu")
        works, nonces, sums, counts = (column.tolist() for column in self._transport.all_gather(record).unbind(1))
        if differing := [name for name, value in zip(self._names, sums, strict=True) if value != sums[0]]:
            raise DisagreementError(
                f"workers do not hold the same shared weights: {', '.join(differing)} differ from {self._names[0]}. "
                "Make the manager with use_async_quorum=False and, unless all start from the same weights, init_sync"
            )
        number = 0
        for nonce in nonces:
            number ^= nonce
        return (work * len(works) / sum(works) if any(works) else 1.0), number, max(counts)

    def _connect(self, inner: dist.ProcessGroup) -> None:
        """Meet over a new process group: a new Wire, with the residual that this worker has."""
        transport = ProcessGroupTransport(inner, group_timeout(inner), owned=True)
        names = tuple(exchange_texts(self._me.encode(), transport))
        wire = self._open_wire(transport)
        if self._wire is not None:
            wire.engine.succeed(self._wire.engine)
            self._wire.detach()
        before, after = set(self._names), set(names)
        if self._wire is not None:
            self.came += len(after - before)
            self.left += len(before - after)
            for name in sorted(before - after):
                _log.warning("worker %s left: its residual is dropped, and %d go on", name, len(names))
            for name in sorted(after - before):
                _log.warning("worker %s joined: there are %d", name, len(names))
        self._inner, self._transport, self._wire, self._names = inner, transport, wire, names

    def average(self, values: list[Tensor], weight: float) -> list[Tensor]:
        """Return the `finite_mean` of each of ``values``, with this worker's ``weight`` from `meet`."""
        assert self._transport is not None
        return [finite_mean(value, weight, self._transport.all_reduce) for value in values]

    def give_up(self, error: Exception) -> None:
        """Mark the exchange as failed. Its connections are closed, so that others need not wait for this worker."""
        self.failure = str(error)
        _log.warning("an exchange failed and is left out: %s", error)
        self._manager.report_error(CommunicationError(str(error)))
        if self._wire is not None:
            self._wire.detach()
        self._inner = self._transport = None
        self._group.abort()
        # gloo closes connections when nothing references the process group, and the frames that raised this do.
        cause: BaseException | None = error
        while cause is not None:
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__ or cause.__context__

    def commit(self) -> bool:
        """Whether the exchange counts, for the ranks of this worker: none of them has failed."""
        commit = self._manager.should_commit()
        self.failed += not commit
        return commit


def check_connections(store_addr: str, rank: int, world_size: int) -> None:
    """Let every worker of a quorum try to connect to every other one. Collective.

    Takes a few round trips where all is well, and at most 30 s where it is not.

    Args:
        store_addr: where the workers of this quorum meet: ``host:port/prefix``, with a prefix of its own.
        rank: this worker's rank in the quorum.
        world_size: the number of workers.

    Raises:
        UnreachableError: some pair of workers has no connection; the message names it.
    """
    place, _, prefix = store_addr.partition("/")
    host, _, port = place.rpartition(":")
    host = host.strip("[]")
    try:
        meeting = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=ANSWER_S)
        )
    except RuntimeError as error:
        # The lighthouse has answered this worker, so that it is in the network.
        raise UnreachableError(
            f"no connection to the worker at {place}, where the others meet", excused=True
        ) from error
    store = dist.PrefixStore(f"{prefix}/thinwire", meeting)  # pyright: ignore[reportPrivateImportUsage]
    others = [other for other in range(world_size) if other != rank]
    with listening() as server:
        store.set(f"address/{rank}", f"{own_host(host, int(port))}:{server.getsockname()[1]}")
        addresses = _answers(store, "address", others, ANSWER_S)
        if not addresses:
            raise UnreachableError("no other worker has come to where this one waits for them", excused=False)
        with ThreadPoolExecutor(_MOST_CONNECTIONS) as pool:
            reached = dict(zip(addresses, pool.map(accepts, addresses.values()), strict=True))
        unreached = {other for other in others if not reached.get(other)}
        store.set(f"unreached/{rank}", " ".join(map(str, sorted(unreached))))
        # The socket listens until all others have tried.
        said = _answers(store, "unreached", addresses, ANSWER_S + CONNECT_S)
    reports = {other: {int(word) for word in text.split() if word.isdigit()} for other, text in said.items()}
    judge(rank, world_size, {**reports, rank: unreached}, addresses)


def judge(rank: int, world_size: int, unreached: Mapping[int, set[int]], addresses: Mapping[int, str]) -> None:
    """Raise `UnreachableError` unless every worker has reached every other one.

    Args:
        rank: this worker's rank.
        world_size: the number of workers.
        unreached: the workers to which each worker that has answered could not connect.
        addresses: the addresses of the workers that have answered.
    """
    if len(unreached) == world_size and not any(unreached.values()):
        return
    names = {other: addresses.get(other, f"of rank {other}, which is silent") for other in range(world_size)}
    faulty = []
    for other in range(world_size):
        reports = [found for reporter, found in unreached.items() if reporter != other]
        if other not in unreached or (reports and all(other in found for found in reports)):
            faulty.append(other)
    if rank in faulty:
        raise UnreachableError("no other worker can connect to this one", excused=False)
    if faulty:
        listed = ", ".join(names[other] for other in faulty)
        raise UnreachableError(f"no worker can connect to the one at {listed}", excused=True)
    pairs = [(here, there) for here, found in sorted(unreached.items()) for there in sorted(found)]
    listed = "; ".join(f"rank {here} to {names.get(there, there)}" for here, there in pairs)
    raise UnreachableError(
        f"some workers cannot connect to others: {listed}", excused=all(rank not in pair for pair in pairs)
    )


def listening() -> socket.socket:
    """Return a socket that accepts connections on all interfaces, which the kernel does by itself."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", 0), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=1024)


def own_host(store_host: str, store_port: int) -> str:
    """Return the address of this machine in the store's network; on the store's machine, the one that others use."""
    family, kind, _, _, to = socket.getaddrinfo(store_host, store_port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(to)  # sends nothing
        here, there = probe.getsockname()[0], probe.getpeername()[0]
    return store_host if here == there else here


def _answers(store: Any, what: str, ranks: Iterable[int], seconds: float) -> dict[int, str]:
    """Return the values that workers have set under ``what/rank`` within so many seconds."""
    end, found = time.monotonic() + seconds, {}
    for rank in ranks:
        key = f"{what}/{rank}"
        try:
            store.wait([key], timedelta(seconds=max(0.01, end - time.monotonic())))
            value = store.get(key)
        except RuntimeError:
            continue
        if len(value) <= _LONGEST_ANSWER_BYTES:
            found[rank] = value.decode("ascii", "replace")
    return found


def accepts(address: str) -> bool:
    """Whether a connection to ``host:port`` is possible."""
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 2**16):
        return False
    try:
        socket.create_connection((host, int(port[:6])), CONNECT_S).close()
    except (OSError, UnicodeError):
        return False
    return True
