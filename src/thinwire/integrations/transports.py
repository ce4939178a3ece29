"""The device of a model's gradients, and the transports that carry them over process groups of thinwire's own."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from thinwire.collectives import (
    CommunicationError,
    DeviceGroupTransport,
    FailureDetector,
    ProcessGroupTransport,
    Transport,
    announce_error,
    with_shared_memory,
)
from thinwire.collectives.transport import ErrorTranslation
from thinwire.compat import gloo_group, group_timeout, prefixed
from thinwire.integrations.options import Network
from thinwire.plan import named_parameters
from thinwire.runtime import agree

_SIMULATE = "; simulate=True studies the effect on accuracy on any device"


class _Rendezvous(NamedTuple):
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


def _meeting(ranks: Sequence[int]) -> _Rendezvous:
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
    return _Rendezvous(store, f"thinwire meeting {number} of {'-'.join(map(str, ranks))}", ranks)


def bare_transport(group: dist.ProcessGroup, timeout: timedelta | None = None) -> ProcessGroupTransport:
    """Make a new process group over gloo, and a detector of failures, among the ranks of ``group``.

    ``timeout`` is that of each message, by default that of ``group``.

    Raises:
        TransportError: a rank did not come in time, or is gone.
        PeerFailedError: a rank failed in `fail_before_meeting`, or in this function.
    """
    timeout = timeout or group_timeout(group)
    meeting = _meeting(dist.get_process_group_ranks(group))
    # The detector comes before gloo's groups, which wait for a missing rank without naming it.
    detector = FailureDetector.connect(*meeting, group.rank(), timeout) if group.size() > 1 else None
    try:
        (mine,) = _new_groups(meeting, group, timeout, detector, 1, num_threads=1)
    except BaseException as error:
        if detector is not None:
            detector.close(error)
        raise
    return ProcessGroupTransport(mine, timeout, owned=True, detector=detector)


def _add_streams(transport: ProcessGroupTransport, group: dist.ProcessGroup, streams: int) -> None:
    """Let a `bare_transport` among the ranks of ``group`` send messages over ``streams`` connections to each rank.

    All ranks must have agreed on the number and call this with it, because gloo would wait for those that do not.

    Raises:
        TransportError: a rank did not come in time, or is gone.
    """
    if streams > 1:
        meeting = _meeting(dist.get_process_group_ranks(group))
        transport.add_streams(_new_groups(meeting, group, transport.timeout, transport.detector, streams - 1))


def _add_sums(transport: ProcessGroupTransport, group: dist.ProcessGroup) -> None:
    """Let a `bare_transport` among the ranks of ``group`` run two large all-reduces at a time, so that over a long link
    one fills the time in which another waits. All ranks must call this. The errors are those of `_add_streams`."""
    meeting = _meeting(dist.get_process_group_ranks(group))
    (sums,) = _new_groups(meeting, group, transport.timeout, transport.detector, 1, num_threads=2)
    transport.sum_over(sums)


def _new_groups(
    meeting: _Rendezvous,
    group: dist.ProcessGroup,
    timeout: timedelta,
    detector: FailureDetector | None,
    num: int,
    *,
    num_threads: int | None = None,
) -> list[dist.ProcessGroup]:
    """Make ``num`` process groups over gloo, which ``torch.distributed`` does not list, among the ranks of ``group``.

    With ``num_threads``, for as many collectives at a time, their connections share the thread of those of ``group``.
    That names a group of a part of the world by its ranks and by the number of such groups. A name that is used again,
    after one of them was destroyed, would find the addresses of the group that had it before.
    """
    doing = "making process groups"
    shared: dict[str, Any] = {} if num_threads is None else {"threads_of": group, "num_threads": num_threads}
    stores = [prefixed(f"{meeting.key}, group {i}", meeting.store) for i in range(num)]

    def make() -> list[dist.ProcessGroup]:
        with ErrorTranslation(doing, timeout, detector=detector):
            return [gloo_group(store, group.rank(), group.size(), timeout, **shared) for store in stores]

    if detector is None:
        return make()
    try:
        return detector.waiting(make, doing)
    except CommunicationError:
        # The thread that was abandoned may be waiting in the store, which serves nobody else in the meantime.
        if dist.group.WORLD is not None:
            _stuck.add(dist.group.WORLD)
        raise


def _check_backend(world: dist.ProcessGroup) -> None:
    """Raise ``RuntimeError`` if the default group is of backend ``thinwire``, which compresses and has no store."""
    if "thinwire" in dist.get_backend_config(world):
        raise RuntimeError(
            "the default process group has backend thinwire, which compresses by itself: call "
            "init_process_group('gloo') for thinwire.compress(model), or keep the backend and call "
            "thinwire.register_model(model) instead, which compresses layer by layer"
        )


@contextmanager
def fail_before_meeting(group: object = None) -> Iterator[None]:
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


@contextmanager
def agreed_transport(
    group: dist.ProcessGroup, timeout: timedelta | None, record: Mapping[str, str]
) -> Iterator[ProcessGroupTransport]:
    """Make a `bare_transport`. If the body fails, it is closed, and other ranks, which may be waiting for this one,
    learn why.

    Ranks first agree on ``record``, because those that differ in it would later wait for each other.
    """
    host = bare_transport(group, timeout)
    try:
        agree(record, host)
        yield host
    except Exception as error:
        if host.detector is not None:
            host.detector.close(error)
        host.close()
        raise


def carried(
    host: ProcessGroupTransport,
    group: dist.ProcessGroup,
    network: Network,
    device: torch.device | None = None,
    *,
    sums: bool = False,
) -> Transport:
    """Return the transport of messages among the ranks of ``group``, as ``network`` says; ``host``, which is made for
    them, carries what ranks agree on. ``sums``: whether this rank's plan has native all-reduces.

    Between devices there is no worker thread: messages are sent over ``group`` itself, from the thread from which DDP
    uses it, in one order with those of DDP.

    Raises:
        ValueError: ``network`` asks for a way of sending that only the host has.
    """
    if device is None:
        _add_streams(host, group, network.streams)
        if bool(host.all_gather(torch.tensor([sums], dtype=torch.bool, device="cpu")).any()):
            _add_sums(host, group)
        return with_shared_memory(host, host.timeout, network.transport)
    if network.transport == "shared":
        raise ValueError("transport='shared' is memory of the host: from a GPU, bytes go over the model's group")
    if network.streams > 1:
        raise ValueError(f"streams={network.streams} is for the host: from a GPU, bytes go over the model's group")
    return DeviceGroupTransport(host, device, group, host.timeout)


def replicated(model: DistributedDataParallel) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that are the same on all ranks, by their names in the module inside DDP: not those that DDP
    was told to ignore, such as each rank's own experts."""
    ignored = {id(p) for name, p in model.module.named_parameters() if name in model.parameters_to_ignore}
    return {name: p for name, p in named_parameters(model.module).items() if id(p) not in ignored}


def trained(model: DistributedDataParallel) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of `replicated` that get gradients."""
    return {name: p for name, p in replicated(model).items() if p.requires_grad}


def exchange_device(
    trained: Mapping[str, torch.Tensor], group: dist.ProcessGroup, as_device: bool, instead: str = _SIMULATE
) -> torch.device | None:
    """Return the device from which gradients are sent without going over the host; None if they are on the CPU."""
    devices = {p.device: name for name, p in trained.items()}
    if all(device.type == "cpu" for device in devices):
        return torch.device("cpu") if as_device else None
    return check_device(devices, dist.get_backend_config(group), instead)


def check_device(devices: Mapping[torch.device, str], backends: str, instead: str = "") -> torch.device:
    """Return the one device on which a model's parameters are, if gradients can leave it.

    ``devices`` has the name of a parameter on each device. ``backends`` are those of the process group, by device, as
    in ``cpu:gloo,cuda:nccl``; ``instead`` ends error messages with what else may be done.

    Raises:
        NotImplementedError: the parameters are on several devices, or on one that is not a GPU.
        RuntimeError: something is missing; the message names it.
    """
    device, name = next((device, name) for device, name in devices.items() if device.type != "cpu")
    if device.type == "meta":
        raise RuntimeError(
            f"parameters are on meta ({name}): call model.to_empty(device=...) and initialize them, then "
            "thinwire.compress(model)"
        )
    if len(devices) > 1 or device.type != "cuda":
        where = ", ".join(str(device) for device in devices)
        raise NotImplementedError(
            f"{name} is on {device}, and parameters are on {where}: thinwire compresses gradients that are all on the "
            f"CPU (over gloo) or all on one CUDA device of each rank (over NCCL){instead}"
        )
    if "cuda:nccl" not in backends.split(","):
        raise RuntimeError(
            f"{name} is on {device}, where gradients are sent over NCCL, but the model's process group has {backends}: "
            f"call init_process_group('nccl'), or 'cpu:gloo,cuda:nccl'{instead}"
        )
    if find_spec("triton") is None:
        raise RuntimeError(
            f"{name} is on {device}, where Triton compresses, and Triton is not installed: pip install triton, in the "
            f"version that this PyTorch wants ({torch.__version__}){instead}"
        )
    return device
