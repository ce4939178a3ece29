"""Ranks for test_demo.py: the first ends as soon as it is told to go on, the others tell a step half a second later."""

from __future__ import annotations

import os
import time

from thinwire_tools.compare.forked import command_streams
from thinwire_tools.compare.rank_program import Channel


def main() -> None:
    channel = Channel(*command_streams())
    rank = channel.receive()["rank"]
    channel.send("done")
    channel.receive()
    if rank == 0:
        os._exit(3)
    time.sleep(0.5)
    channel.send("step", step=rank)
