"""Checks of the connections between the workers of a quorum, in both directions, and of who is at fault."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from thinwire.collectives import CommunicationError

ANSWER_S = 10.0
"""Seconds that the others' answers are waited for."""
CONNECT_S = 5.0
"""Seconds after which a connection that is neither accepted nor refused counts as impossible."""
_MOST_CONNECTIONS = 16
_LONGEST_ANSWER_BYTES = 4096


class Unreachable(CommunicationError):
    """Workers cannot connect to each other. With ``excused``, that is not this worker's fault."""

    def __init__(self, message: str, *, excused: bool) -> None:
        super().__init__(message)
        self.excused = excused


def check_connections(store_addr: str, rank: int, world_size: int) -> None:
    """Let every worker of a quorum try to connect to every other one. Collective.

    Takes a few round trips where all is well, and at most 30 s where it is not.

    Args:
        store_addr: where the workers of this quorum meet: ``host:port/prefix``, with a prefix of its own.
        rank: this worker's rank in the quorum.
        world_size: the number of workers.

    Raises:
        Unreachable: some pair of workers has no connection; the message names it.
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
        raise Unreachable(f"no connection to the worker at {place}, where the others meet", excused=True) from error
    store = dist.PrefixStore(f"{prefix}/thinwire", meeting)  # pyright: ignore[reportPrivateImportUsage]
    others = [other for other in range(world_size) if other != rank]
    with listening() as server:
        store.set(f"address/{rank}", f"{own_host(host, int(port))}:{server.getsockname()[1]}")
        addresses = _answers(store, "address", others, ANSWER_S)
        if not addresses:
            raise Unreachable("no other worker has come to where this one waits for them", excused=False)
        with ThreadPoolExecutor(_MOST_CONNECTIONS) as pool:
            reached = dict(zip(addresses, pool.map(accepts, addresses.values()), strict=True))
        unreached = {other for other in others if not reached.get(other)}
        store.set(f"unreached/{rank}", " ".join(map(str, sorted(unreached))))
        # The socket listens until all others have tried.
        said = _answers(store, "unreached", addresses, ANSWER_S + CONNECT_S)
    reports = {other: {int(word) for word in text.split() if word.isdigit()} for other, text in said.items()}
    judge(rank, world_size, {**reports, rank: unreached}, addresses)


def judge(rank: int, world_size: int, unreached: Mapping[int, set[int]], addresses: Mapping[int, str]) -> None:
    """Raise `Unreachable` unless every worker has reached every other one.

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
        raise Unreachable("no other worker can connect to this one", excused=False)
    if faulty:
        listed = ", ".join(names[other] for other in faulty)
        raise Unreachable(f"no worker can connect to the one at {listed}", excused=True)
    pairs = [(here, there) for here, found in sorted(unreached.items()) for there in sorted(found)]
    listed = "; ".join(f"rank {here} to {names.get(there, there)}" for here, there in pairs)
    raise Unreachable(
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
