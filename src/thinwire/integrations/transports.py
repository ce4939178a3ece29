"""Process groups of our own, beside those that PyTorch uses from its threads while ours are busy."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from thinwire.collectives import FailureDetector, ProcessGroupTransport, Transport, announce_error, with_shared_memory
from thinwire.collectives.transport import Failing
from thinwire.integrations.options import Network
from thinwire.runtime import agree


def bare_transport(group: dist.ProcessGroup, timeout: timedelta) -> ProcessGroupTransport:
    """Among the ranks of ``group``: two new process groups, over gloo, and a detector of failures.

    Raises:
        TransportError: A rank did not come in time, or is gone.
        PeerFailedError: A rank failed in `failing_before_meeting`.
    """
    # Before gloo's groups, which wait for a rank that does not come without naming it.
    detector = detector_of(group, timeout)
    try:
        mine, second = _new_groups(group, timeout, detector, 2)
    except BaseException:
        if detector is not None:
            detector.close()
        raise
    # PyTorch names a group of a part of the world by its ranks and by how many such groups there are: a name that comes
    # again, after one of them is destroyed, finds the addresses of the group that had it.
    return ProcessGroupTransport(mine, timeout, second, owned=not _is_part(group), detector=detector)


def add_streams(transport: ProcessGroupTransport, group: dist.ProcessGroup, streams: int) -> None:
    """Let a `bare_transport` among the ranks of ``group`` send messages over ``streams`` connections to each rank.

    All ranks must call this with the same number, which they have agreed on: gloo would wait for those that do not.

    Raises:
        TransportError: A rank did not come in time, or is gone.
    """
    transport.add_streams(_new_groups(group, transport.timeout, transport.detector, streams - 1))


def _new_groups(
    group: dist.ProcessGroup, timeout: timedelta, detector: FailureDetector | None, num: int
) -> list[dist.ProcessGroup]:
    ranks, part, made = dist.get_process_group_ranks(group), _is_part(group), []
    with Failing("making process groups", timeout, detector=detector):
        for _ in range(num):
            one = dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=part)
            assert isinstance(one, dist.ProcessGroup)
            made.append(one)
    return made


def _is_part(group: dist.ProcessGroup) -> bool:
    return group.size() != dist.get_world_size()


def detector_of(group: dist.ProcessGroup, timeout: timedelta) -> FailureDetector | None:
    """A new detector of failures among the ranks of ``group``, which all must call this; None for a single rank.

    Raises:
        TransportError: A rank did not come in time.
        PeerFailedError: A rank failed in `failing_before_meeting`.
    """
    if group.size() == 1:
        return None
    return FailureDetector.connect(*_meeting(dist.get_process_group_ranks(group)), group.rank(), timeout)


_meetings: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()
"""By the default process group and ranks, how often they have met. A new default group has a new store."""


def _meeting(ranks: Sequence[int]) -> tuple[Any, str, Sequence[int]]:
    """Store, key and ranks of a meeting of ``ranks``; counts it."""
    world = dist.group.WORLD
    assert world is not None, "there is a process group"
    _check_backend(world)
    met = _meetings.setdefault(world, Counter())
    number = met[tuple(ranks)]
    met[tuple(ranks)] += 1
    return world.get_group_store(), f"thinwire meeting {number} of {'-'.join(map(str, ranks))}", ranks


def _check_backend(world: dist.ProcessGroup) -> None:
    """Raise if the default process group is thinwire's own, which compresses what it sends and has no store."""
    if "thinwire" in dist.get_backend_config(world):
        raise RuntimeError(
            "the default process group has backend thinwire, which compresses by itself: call "
            "init_process_group('gloo') for thinwire.compress(model), or keep the backend and call "
            "thinwire.register_model(model) instead, which compresses layer by layer"
        )


@contextmanager
def failing_before_meeting() -> Iterator[None]:
    """Let the other ranks fail, too, if the body fails on this one before it has met them in `bare_transport`."""
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None or dist.get_world_size() == 1:
        yield
        return
    _check_backend(world)
    before = _meetings.setdefault(world, Counter()).total()
    try:
        yield
    except Exception as error:
        if _meetings[world].total() == before:
            store, key, _ = _meeting(range(dist.get_world_size()))
            announce_error(store, key, dist.get_rank(), error)
        raise


def host_transport(
    group: dist.ProcessGroup, timeout: timedelta, network: Network, arguments: Mapping[str, str]
) -> Transport:
    """A `bare_transport` with the streams of ``network``, and shared memory between ranks of one node as it says.

    ``arguments``: what follows depends on; ranks that differ in it would wait for each other.
    """
    transport = bare_transport(group, timeout)
    try:
        agree(arguments, transport)
        add_streams(transport, group, network.streams)
        return with_shared_memory(transport, timeout, network.transport)
    except Exception:
        transport.close()
        raise
