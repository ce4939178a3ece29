"""Two ranks of an emulated network, one of which ends while its last message is on the way."""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from typing import TextIO

import torch.distributed as dist

from thinwire.collectives import Pending, ProcessGroupTransport
from thinwire.collectives.transport import OutgoingMessage

TIMEOUT = timedelta(seconds=10)
STEPS = 3


def exchange() -> str:
    """Exchanges of short messages beside exchanges of one long message of rank 1, which ends after the last."""
    group = dist.new_group(timeout=TIMEOUT)
    assert isinstance(group, dist.ProcessGroup)
    transport = ProcessGroupTransport(group, TIMEOUT)
    both = [
        transport.open([[OutgoingMessage(0, 64, (1,))], [OutgoingMessage(0, num_bytes, (0,))]])
        for num_bytes in (64, 200_000)
    ]
    for step in range(1, STEPS + 1):
        pending: list[list[Pending]] = []
        for buffers in both:
            transport.begin(buffers)
            pending.append([transport.receive_into(buffers, *address) for address in buffers.inbox])
        for buffers, waiting in zip(both, pending, strict=True):
            buffers.outbox[0].fill_(step)
            waiting += transport.send_from(buffers, 0, buffers.outbox[0].numel())
        for buffers, waiting in zip(both, pending, strict=True):
            for one in waiting:
                one.wait()
            assert all(bool((message == step).all()) for message in buffers.inbox.values())
            if step == STEPS and buffers is both[0] and transport.rank == 0:
                # Rank 1 has ended by now. Its kernel sends for most of a second.
                time.sleep(0.3)
            if step == STEPS and buffers is both[1] and transport.rank == 1:
                os._exit(0)
            transport.end(buffers)
    return "arrived"


def main(commands: TextIO, answers: TextIO) -> None:
    dist.init_process_group("gloo", timeout=TIMEOUT)
    answers.write(json.dumps(exchange()))
    answers.flush()
    # Nobody is left to end the process group with.
    os._exit(0)
