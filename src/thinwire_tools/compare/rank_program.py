"""The base of rank programs: JSON lines to and from the parent, the process group, and a clean end."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn, TextIO

import torch
import torch.distributed as dist

from thinwire_tools.compare.forked import command_streams


class ParentGone(Exception):
    """Standard input ended."""


class Channel:
    """JSON lines to and from the parent."""

    def __init__(self, commands: TextIO, answers: TextIO) -> None:
        self._commands, self._answers = commands, answers

    def receive(self) -> dict[str, Any]:
        """Return the next command. Raises `ParentGone` when there will be none."""
        line = self._commands.readline()
        if not line:
            raise ParentGone
        return json.loads(line)

    def send(self, event: str, **more: Any) -> None:
        """Send ``event`` with its details."""
        self._answers.write(json.dumps({"event": event, **more}) + "\n")
        self._answers.flush()

    def hold(self, at: str) -> None:
        """Wait until all ranks are here and the parent releases them together."""
        self.send("hold", at=at)
        self.receive()


def join(setup: dict[str, Any]) -> tuple[int, int]:
    """Make the process group that the ``setup`` command describes, on one thread; returns the rank and world size."""
    rank, num_ranks = int(setup["rank"]), int(setup["num_ranks"])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{setup['rendezvous']}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=setup["timeout_s"]),
    )
    return rank, num_ranks


def run_rank(serve: Callable[[Channel], None]) -> NoReturn:
    """Answer the parent through ``serve`` until it is gone, report every failure to it, and end this process."""
    # The parent handles Ctrl-C in the terminal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(*command_streams())
    code = 0
    try:
        serve(channel)
    except (ParentGone, BrokenPipeError):
        pass
    except Exception as error:  # noqa: BLE001 - the parent reports every failure
        traceback.print_exc()
        channel.send("failed", message=f"{type(error).__name__}: {error}")
        code = 1
    sys.stderr.flush()
    # Threads of a broken process group must not keep the process alive.
    os._exit(code)
