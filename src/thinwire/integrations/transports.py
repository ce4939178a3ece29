"""Process groups of our own, beside those that PyTorch uses from its threads while ours are busy."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from thinwire.collectives import (
    CommunicationError,
    FailureDetector,
    ProcessGroupTransport,
    Transport,
    announce_error,
    with_shared_memory,
)
from thinwire.collectives.transport import Failing
from thinwire.compat import gloo_group, prefixed
from thinwire.integrations.options import Network
from thinwire.runtime import agree

_T = TypeVar("_T", bound=Transport)


class _Meeting(NamedTuple):
    """Where some ranks find each other, once."""

    store: Any
    key: str
    """A prefix in the store that nothing else uses."""
    ranks: Sequence[int]
    """In the default process group."""


_stores: weakref.WeakKeyDictionary[dist.ProcessGroup, Any] = weakref.WeakKeyDictionary()
"""By the default process group, another client of its store, where something may still be waiting in the first one."""
_stuck: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
"""The default process group, where something may be waiting in the client that was used last."""
_meetings: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()
"""By the default process group and ranks, how often they have met. A new default group has a new store."""


def _meeting(ranks: Sequence[int]) -> _Meeting:
    """The next meeting of ``ranks``, which all count alike."""
    world = dist.group.WORLD
    assert world is not None, "there is a process group"
    _check_backend(world)
    met = _meetings.setdefault(world, Counter())
    number = met[tuple(ranks)]
    met[tuple(ranks)] += 1
    store: Any = _stores.get(world) or world.get_group_store()
    if world in _stuck:
        store = _stores[world] = store.clone()
        _stuck.discard(world)
    return _Meeting(store, f"thinwire meeting {number} of {'-'.join(map(str, ranks))}", ranks)


def bare_transport(group: dist.ProcessGroup, timeout: timedelta) -> ProcessGroupTransport:
    """Among the ranks of ``group``: two new process groups, over gloo, and a detector of failures.

    Raises:
        TransportError: A rank did not come in time, or is gone.
        PeerFailedError: A rank failed in `failing_before_meeting`, or in this.
    """
    meeting = _meeting(dist.get_process_group_ranks(group))
    # Before gloo's groups, which wait for a rank that does not come without naming it.
    detector = _detector(meeting, group, timeout)
    try:
        mine, second = _new_groups(meeting, group, timeout, detector, 2)
    except BaseException as error:
        if detector is not None:
            detector.close(error)
        raise
    return ProcessGroupTransport(mine, timeout, second, owned=True, detector=detector)


@contextmanager
def closed_on_failure(transport: _T) -> Iterator[_T]:
    """Close it where the body fails, and tell the other ranks, which may be waiting for this one, why."""
    try:
        yield transport
    except Exception as error:
        if transport.detector is not None:
            transport.detector.close(error)
        transport.close()
        raise


def add_streams(transport: ProcessGroupTransport, group: dist.ProcessGroup, streams: int) -> None:
    """Let a `bare_transport` among the ranks of ``group`` send messages over ``streams`` connections to each rank.

    All ranks must call this with the same number, which they have agreed on: gloo would wait for those that do not.

    Raises:
        TransportError: A rank did not come in time, or is gone.
    """
    if streams == 1:
        return
    meeting = _meeting(dist.get_process_group_ranks(group))
    transport.add_streams(_new_groups(meeting, group, transport.timeout, transport.detector, streams - 1))


def _new_groups(
    meeting: _Meeting, group: dist.ProcessGroup, timeout: timedelta, detector: FailureDetector | None, num: int
) -> list[dist.ProcessGroup]:
    """Among the ranks of ``group``, over gloo. ``torch.distributed`` does not list them.

    It names a group of a part of the world by its ranks and by how many such groups there are: a name that comes again,
    after one of them was destroyed, would find the addresses of the group that had it.
    """
    doing = "making process groups"
    stores = [prefixed(f"{meeting.key}, group {i}", meeting.store) for i in range(num)]

    def make() -> list[dist.ProcessGroup]:
        with Failing(doing, timeout, detector=detector):
            return [gloo_group(store, group.rank(), group.size(), timeout) for store in stores]

    if detector is None:
        return make()
    try:
        return detector.waiting(make, doing)
    except CommunicationError:
        # The thread that was left alone may wait in the store, which lets nobody else in meanwhile.
        if dist.group.WORLD is not None:
            _stuck.add(dist.group.WORLD)
        raise


def detector_of(group: dist.ProcessGroup, timeout: timedelta) -> FailureDetector | None:
    """A new detector of failures among the ranks of ``group``, which all must call this; None for a single rank.

    Raises:
        TransportError: A rank did not come in time.
        PeerFailedError: A rank failed in `failing_before_meeting`.
    """
    return _detector(_meeting(dist.get_process_group_ranks(group)), group, timeout)


def _detector(meeting: _Meeting, group: dist.ProcessGroup, timeout: timedelta) -> FailureDetector | None:
    return FailureDetector.connect(*meeting, group.rank(), timeout) if group.size() > 1 else None


def _check_backend(world: dist.ProcessGroup) -> None:
    """Raise if the default process group is thinwire's own, which compresses what it sends and has no store."""
    if "thinwire" in dist.get_backend_config(world):
        raise RuntimeError(
            "the default process group has backend thinwire, which compresses by itself: call "
            "init_process_group('gloo') for thinwire.compress(model), or keep the backend and call "
            "thinwire.register_model(model) instead, which compresses layer by layer"
        )


@contextmanager
def failing_before_meeting(group: object = None) -> Iterator[None]:
    """Let the other ranks fail, too, if the body fails on this one before it has met them in `bare_transport`.

    ``group``: the process group that the body will meet; all ranks meet where it is none. One such context may be
    inside another: the inner one announces the failure, and the outer one does not.
    """
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
            met = group if isinstance(group, dist.ProcessGroup) else world
            store, key, ranks = _meeting(dist.get_process_group_ranks(met))
            announce_error(store, key, ranks.index(dist.get_rank()), error)
        raise


def host_transport(
    group: dist.ProcessGroup, timeout: timedelta, network: Network, arguments: Mapping[str, str]
) -> Transport:
    """A `bare_transport` with the streams of ``network``, and shared memory between ranks of one node as it says.

    ``arguments``: what follows depends on; ranks that differ in it would wait for each other.
    """
    with closed_on_failure(bare_transport(group, timeout)) as transport:
        agree(arguments, transport)
        add_streams(transport, group, network.streams)
        return with_shared_memory(transport, timeout, network.transport)
