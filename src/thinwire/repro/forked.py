"""Processes that are forked off one that has imported their module already: PyTorch is loaded once, and not by each.

`multiprocessing`'s fork server is that one. It imports what the first of them needs; what others need besides, they
import themselves.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import signal
import tempfile
from io import FileIO
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

from thinwire.lab import Door

_LONGEST = 60
"""Characters of a folder for sockets. Paths of sockets have 107 at most, and `multiprocessing` adds two names."""
_processes = multiprocessing.get_context("forkserver")


class Forked:
    """``main()`` of ``module`` in a process of its own behind ``door``, in a session of its own.

    Its standard input and output are the other ends of `stdin` and `stdout`, without buffers; what it says on standard
    error is appended to ``log``. It is killed when this process ends in an orderly way; when its input ends, it should
    end itself.
    """

    def __init__(self, module: str, door: Door, log: Path) -> None:
        _start_server(module)
        (commands, tell), (hear, answers) = _processes.Pipe(duplex=False), _processes.Pipe(duplex=False)
        told = (module, door, commands, answers, str(log))
        self._process = _processes.Process(target=_main, args=told, daemon=True)
        self._process.start()
        self.stdin, self.stdout = FileIO(os.dup(tell.fileno()), "w"), FileIO(os.dup(hear.fileno()), "r")
        for end in (commands, tell, hear, answers):
            end.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Exit code, minus the signal's number if one ended it; None while it runs."""
        return self._process.exitcode

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        self._process.join()
        code = self._process.exitcode
        assert code is not None
        return code

    def tell(self, words: Any) -> bool:
        """Write a line of JSON to its standard input; whether it is there to hear it."""
        try:
            self.stdin.write(json.dumps(words).encode() + b"\n")
        except BrokenPipeError:
            return False
        return True

    def send_signal(self, number: int) -> None:
        """A process that has ended already gets none."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Kill it, wait for its end, and close what it was spoken to through. May be called again."""
        self.kill()
        self._process.join()
        self.stdin.close()
        self.stdout.close()


def conversation() -> tuple[TextIO, TextIO]:
    """Of a forked process: what it is told, and where it answers. Whatever else prints goes to its log from now on."""
    told, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return told, answers


def _start_server(module: str) -> None:
    """Start the fork server, unless there is one: with one thread for what counts threads when it is imported."""
    threads, folder = os.environ.get("OMP_NUM_THREADS"), tempfile.gettempdir()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if len(folder) > _LONGEST:
        tempfile.tempdir = "/tmp"
    try:
        # `multiprocessing` imports the main module in each process, and that of commands is this.
        _processes.set_forkserver_preload(["thinwire.cli", module])
        forkserver.ensure_running()
    finally:
        tempfile.tempdir = folder
        if threads is None:
            del os.environ["OMP_NUM_THREADS"]


def _main(module: str, door: Door, commands: Connection, answers: Connection, log: str) -> None:
    os.setsid()
    with open(log, "ab") as said:
        for end, number in ((commands, 0), (answers, 1), (said, 2)):
            os.dup2(end.fileno(), number)
    commands.close()
    answers.close()
    door.enter()
    found: Any = importlib.import_module(module)
    # What was imported stays. To look through all of it, and so to copy it, is most of what a collection here would do.
    gc.freeze()
    found.main()
