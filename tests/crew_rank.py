"""Ranks for test_demo.py: the first ends as soon as it is told to go on, the others tell a step half a second later."""

from __future__ import annotations

import os
import time

from thinwire.repro.demo_rank import Channel
from thinwire.repro.forked import conversation


def main() -> None:
    channel = Channel(*conversation())
    rank = channel.receive()["rank"]
    channel.send("done")
    channel.receive()
    if rank == 0:
        os._exit(3)
    time.sleep(0.5)
    channel.send("step", step=rank)
