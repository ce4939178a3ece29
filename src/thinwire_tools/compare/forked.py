"""Processes forked from one that has imported their module already, so that PyTorch is loaded once.

It is `multiprocessing`'s fork server. It imports the module of the first process; later ones import what else
they need themselves.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import selectors
import signal
import tempfile
import threading
from io import FileIO
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

from thinwire_tools.lab import NodeNamespaces

_LONGEST = 60
"""Longest path of a folder for sockets, whose paths have 107 characters at most: `multiprocessing` adds two names."""
_processes = multiprocessing.get_context("forkserver")


class ForkedProcess:
    """A process and a session of its own that runs ``main()`` of ``module`` in ``namespaces``.

    `stdin` and `stdout` are the parent's ends of its standard input and output, unbuffered; its standard error is
    appended to ``log``. It is killed, with its process group, when this process ends, however that ends;
    without pidfds (Linux before 5.3, other systems) only when it ends in an orderly way.
    """

    def __init__(self, module: str, namespaces: NodeNamespaces, log: Path) -> None:
        _start_server(module)
        commands, stdin = _processes.Pipe(duplex=False)
        stdout, answers = _processes.Pipe(duplex=False)
        arguments = (module, namespaces, os.getpid(), commands, answers, str(log))
        self._process = _processes.Process(target=_main, args=arguments, daemon=True)
        self._process.start()
        self.stdin, self.stdout = FileIO(os.dup(stdin.fileno()), "w"), FileIO(os.dup(stdout.fileno()), "r")
        for end in (commands, stdin, stdout, answers):
            end.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, minus the signal's number if one ended it; None while it runs."""
        return self._process.exitcode

    def wait(self) -> int:
        """Wait for its end; returns the exit code."""
        self._process.join()
        code = self._process.exitcode
        assert code is not None
        return code

    def send(self, message: Any) -> bool:
        """Write ``message`` to its standard input as a line of JSON; False if the process no longer reads."""
        try:
            self.stdin.write(json.dumps(message).encode() + b"\n")
        except BrokenPipeError:
            return False
        return True

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Kill it, wait for its end, and close its pipes. May be called again."""
        self.kill()
        self._process.join()
        self.stdin.close()
        self.stdout.close()


def command_streams() -> tuple[TextIO, TextIO]:
    """Return the streams of commands and answers of a forked process. Other prints go to its log from now on."""
    commands, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return commands, answers


def _start_server(module: str) -> None:
    """Start the fork server, unless there is one: with one thread for what counts threads when it is imported."""
    threads, folder = os.environ.get("OMP_NUM_THREADS"), tempfile.gettempdir()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if len(folder) > _LONGEST:
        tempfile.tempdir = "/tmp"
    # It imports the module before it ignores Ctrl-C, which a terminal sends to it, too: with the signal blocked from
    # the start there is no traceback of that import. The resource tracker, which it needs, would unblock the signal.
    resource_tracker.ensure_running()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        _processes.set_forkserver_preload([module])
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        tempfile.tempdir = folder
        if threads is None:
            del os.environ["OMP_NUM_THREADS"]


def _main(
    module: str, namespaces: NodeNamespaces, parent_pid: int, commands: Connection, answers: Connection, log: str
) -> None:
    os.setsid()
    try:
        errors = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    except FileNotFoundError:
        # The server's folder is removed when the parent ends: it was interrupted while this process was about to start.
        raise SystemExit(1) from None
    for end, number in ((commands.fileno(), 0), (answers.fileno(), 1), (errors, 2)):
        os.dup2(end, number)
    os.close(errors)
    commands.close()
    answers.close()
    namespaces.enter()
    # Only a process of one thread may enter a user namespace.
    _end_with(parent_pid)
    program: Any = importlib.import_module(module)
    # Imported objects stay. Traversing them, which copies their pages, would be most of a collection's work here.
    gc.freeze()
    program.main()


def _end_with(parent_pid: int) -> None:
    """Make the kernel kill this process group when the process ``parent_pid`` ends. Without pidfds nothing happens."""
    try:
        parent = os.pidfd_open(parent_pid)
    except ProcessLookupError:
        raise SystemExit(1) from None
    except (AttributeError, OSError):
        return

    def wait() -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(parent, selectors.EVENT_READ)
            selector.select()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, name="ends with the parent", daemon=True).start()
