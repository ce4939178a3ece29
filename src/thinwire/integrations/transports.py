"""Process groups for thinwire's threads, separate from those that PyTorch uses from its own at the same time."""

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
    """A place where some ranks find each other, once."""

    store: Any
    key: str
    """A prefix in the store that nothing else uses."""
    ranks: Sequence[int]
    """The ranks, in the default process group."""


_stores: weakref.WeakKeyDictionary[dist.ProcessGroup, Any] = weakref.WeakKeyDictionary()
"""A further client of the default process group's store, by that group, if something may be waiting in the first."""
_stuck: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
"""The default process group, if something may be waiting in the client of its store that was used last."""
_meetings: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()
"""Numbers of meetings, by the default process group, because a new one has a new store, and by the ranks."""


def _meeting(ranks: Sequence[int]) -> _Meeting:
    """Return the next meeting of ``ranks``, which all of them count alike."""
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
    """Make two new process groups over gloo, and a detector of failures, among the ranks of ``group``.

    Raises:
        TransportError: A rank did not come in time, or is gone.
        PeerFailedError: A rank failed in `failing_before_meeting`, or in this function.
    """
    meeting = _meeting(dist.get_process_group_ranks(group))
    # The detector comes before gloo's groups, which wait for a missing rank without naming it.
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
    """Close ``transport`` if the body fails, and tell the other ranks, which may be waiting for this one, why."""
    try:
        yield transport
    except Exception as error:
        if transport.detector is not None:
            transport.detector.close(error)
        transport.close()
        raise


def add_streams(transport: ProcessGroupTransport, group: dist.ProcessGroup, streams: int) -> None:
    """Let a `bare_transport` among the ranks of ``group`` send messages over ``streams`` connections to each rank.

    All ranks must have agreed on the number and call this with it, because gloo would wait for those that do not.

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
    """Make ``num`` process groups over gloo, which ``torch.distributed`` does not list, among the ranks of ``group``.

    That names a group of a part of the world by its ranks and by the number of such groups. A name that is used again,
    after one of them was destroyed, would find the addresses of the group that had it before.
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
        # The thread that was abandoned may be waiting in the store, which serves nobody else in the meantime.
        if dist.group.WORLD is not None:
            _stuck.add(dist.group.WORLD)
        raise


def detector_of(group: dist.ProcessGroup, timeout: timedelta) -> FailureDetector | None:
    """Make a detector of failures among the ranks of ``group``, which all must call this; None for a single rank.

    Raises:
        TransportError: A rank did not come in time.
        PeerFailedError: A rank failed in `failing_before_meeting`.
    """
    return _detector(_meeting(dist.get_process_group_ranks(group)), group, timeout)


def _detector(meeting: _Meeting, group: dist.ProcessGroup, timeout: timedelta) -> FailureDetector | None:
    return FailureDetector.connect(*meeting, group.rank(), timeout) if group.size() > 1 else None


def _check_backend(world: dist.ProcessGroup) -> None:
    """Raise ``RuntimeError`` if the default group is of backend ``thinwire``, which compresses and has no store."""
    if "thinwire" in dist.get_backend_config(world):
        raise RuntimeError(
            "the default process group has backend thinwire, which compresses by itself: call "
            "init_process_group('gloo') for thinwire.compress(model), or keep the backend and call "
            "thinwire.register_model(model) instead, which compresses layer by layer"
        )


@contextmanager
def failing_before_meeting(group: object = None) -> Iterator[None]:
    """Let the other ranks fail, too, if the body fails on this one before it has met them in `bare_transport`.

    ``group`` is the process group that the body will meet; if it is not one, all ranks meet. Such a context may be
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
    """Make a `bare_transport` with the streams of ``network``, and shared memory between ranks of one node as it says.

    Ranks first agree on ``arguments``, because those that differ in them would later wait for each other.
    """
    with closed_on_failure(bare_transport(group, timeout)) as transport:
        agree(arguments, transport)
        add_streams(transport, group, network.streams)
        return with_shared_memory(transport, timeout, network.transport)
