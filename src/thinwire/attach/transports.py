"""Process groups of our own, beside those that PyTorch uses from its threads while ours are busy."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

from thinwire.collectives import ProcessGroupTransport, Transport, TransportChoice, with_shared_memory
from thinwire.wire import agree


def bare_transport(group: dist.ProcessGroup, timeout: timedelta) -> ProcessGroupTransport:
    """Among the ranks of ``group``: two new process groups, over gloo."""
    ranks = dist.get_process_group_ranks(group)
    part = len(ranks) != dist.get_world_size()
    mine, second = (
        dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=part) for _ in range(2)
    )
    assert isinstance(mine, dist.ProcessGroup)
    assert isinstance(second, dist.ProcessGroup)
    # PyTorch names a group of a part of the world by its ranks and by how many such groups there are: a name that comes
    # again, after one of them is destroyed, finds the addresses of the group that had it.
    return ProcessGroupTransport(mine, timeout, second, owned=not part)


def host_transport(
    group: dist.ProcessGroup, timeout: timedelta, choice: TransportChoice, told: Mapping[str, str]
) -> Transport:
    """The same, with shared memory between ranks of one node, as chosen.

    ``told``: what follows depends on; ranks that differ in it would wait for each other.
    """
    transport = bare_transport(group, timeout)
    agree(told, transport)
    return with_shared_memory(transport, timeout, choice)
