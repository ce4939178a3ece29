"""Rank processes: they are forked, join a process group, and call the functions that their parent names.

Nothing that a rank sends is evaluated. A rank that ends, fails or falls silent becomes a `RankFailedError`, which
carries the last lines of its log.
"""

from __future__ import annotations

import base64
import gc
import json
import multiprocessing
import os
import pickle
import selectors
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from io import FileIO
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, Self, TextIO

import torch
import torch.distributed as dist

from thinwire.compat import OPTIMIZERS_IMPORT
from thinwire_tools.exits import CommandError
from thinwire_tools.lab import Link, Loopback, NodeNamespaces

TIMEOUT = timedelta(seconds=240)
"""Timeout of the process groups of `run_ranks`."""
_LOG_LINES = 12
_START_TIMEOUT_S = 120.0
# Time after one rank's failure in which the others may show that theirs was first.
_AFTERMATH_S = 5.0
_CHUNK = 65536
_RELEASE = b"go\n"
_LONGEST = 60
"""Longest path of a folder for sockets, whose paths have 107 characters at most: `multiprocessing` adds two names."""
_processes = multiprocessing.get_context("forkserver")

OnEvent = Callable[[int, dict[str, Any]], None]
Call = Callable[..., dict[str, Any] | None]
"""A function of a module's top, or of a class there, that ranks call: its first argument is the rank's lasting object,
and what it returns goes back as JSON."""


class RankFailedError(CommandError, RuntimeError):
    """A rank ended, failed or fell silent: the text names it, how, and the last lines of its log."""

    def __init__(self, rank: int, why: str, log: str) -> None:
        super().__init__(f"rank {rank}: {why}")
        self.rank, self.why, self.log = rank, why, log
        self.details = log


def run_ranks(function: Callable[..., Any], config: dict[str, Any], num_ranks: int, network: Link | None) -> Any:
    """Call ``function(**config)`` on all ranks, of ``network`` or of loopback, and return rank 0's answer, as JSON.

    Raises:
        RankFailedError: a rank failed. The message has the end of its log.
    """
    options: dict[str, Any] = {"timeout_s": TIMEOUT.total_seconds(), "preload": function}
    with launch_ranks(_nobody, num_ranks, network, **options) as (ranks, _):
        ranks.silence_s = None
        return ranks.run(_call, {"function": function, "config": config})[0]["answer"]


def _nobody(channel: Channel) -> None:
    """Make no lasting object."""


def _call(_: None, function: Callable[..., Any], config: dict[str, Any]) -> dict[str, Any]:
    answer = function(**config)
    return {"answer": answer if dist.get_rank() == 0 else None}


@contextmanager
def launch_ranks(
    make: Callable[[Channel], Any], num_ranks: int, network: Link | None, *, name: str = "rank", **options: Any
) -> Iterator[tuple[RankProcesses, Path]]:
    """Start ranks on ``network``, or else on loopback, and a folder that lives as long as they do; the arguments are
    those of `RankProcesses`."""
    with tempfile.TemporaryDirectory(prefix="thinwire-ranks-") as folder:
        link = network or Loopback(num_ranks)
        with RankProcesses(link, make, num_ranks, folder=Path(folder), name=name, **options) as ranks:
            yield ranks, Path(folder)


class RankProcesses:
    """``num_ranks`` processes that call functions until `close`; a context manager.

    Args:
        link: the network of the ranks.
        make: returns the lasting object of a rank, which every function gets, once its process group is there.
        num_ranks: number of ranks.
        folder: the folder of the logs and the rendezvous file.
        name: the name of these ranks within ``folder``.
        timeout_s: timeout of the ranks' process group. A rank that sends nothing for twice as long has failed.
        preload: a function whose module the first of all processes imports for the others; by default ``make``.

    Raises:
        RankFailedError: a rank did not start.
    """

    def __init__(
        self,
        link: Link,
        make: Callable[[Channel], Any],
        num_ranks: int,
        *,
        folder: Path,
        name: str,
        timeout_s: float,
        preload: Callable[..., Any] | None = None,
    ) -> None:
        # A step may take as long as the process group waits, and ends with an error of its own then.
        self.silence_s: float | None = 2 * timeout_s
        self._selector = selectors.DefaultSelector()
        self._ranks: list[_Rank] = []
        group = {"world_size": num_ranks, "init_method": f"file://{folder / f'{name}.rendezvous'}"}
        try:
            for number in range(num_ranks):
                program = partial(_serve, make, {**group, "rank": number, "timeout": timedelta(seconds=timeout_s)})
                rank = _Rank(program, preload or make, link, number, folder / f"{name}-rank{number}.log")
                self._ranks.append(rank)
                self._selector.register(rank.answers, selectors.EVENT_READ, rank)
            self._collect(_ignore, _ignore, _START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def process(self, rank: int) -> ForkedProcess:
        return self._ranks[rank].process

    def run(
        self,
        function: Call,
        arguments: dict[str, Any],
        on_event: OnEvent | None = None,
        on_hold: Callable[[str], None] | None = None,
    ) -> list[dict[str, Any]]:
        """Make all ranks call ``function`` with their lasting objects and ``arguments``; return the answers, by rank.

        ``on_event(rank, event)`` is called for each event that a rank sends on the way, ``on_hold(at)`` when all ranks
        wait at a hold, before they are released.

        Raises:
            RankFailedError: a rank failed. These processes are of no further use then.
        """
        call = base64.b64encode(pickle.dumps((function, arguments))) + b"\n"
        for rank in self._ranks:
            rank.send(call)
        return self._collect(on_event or _ignore, on_hold or _ignore, self.silence_s)

    def close(self) -> None:
        """End all ranks. May be called again."""
        for rank in self._ranks:
            rank.process.close()
        self._ranks.clear()
        self._selector.close()

    def _collect(
        self, on_event: OnEvent, on_hold: Callable[[str], None], silence_s: float | None
    ) -> list[dict[str, Any]]:
        for rank in self._ranks:
            rank.answer = None
        while any(rank.answer is None for rank in self._ranks):
            ready = self._selector.select(silence_s)
            if not ready:
                silent = next(rank for rank in self._ranks if rank.answer is None)
                raise RankFailedError(silent.rank, f"sent nothing for {silence_s:.0f} s", silent.tail())
            for key, _ in ready:
                self._handle(key.data, on_event)
            failed = next((rank for rank in self._ranks if rank.failure), None)
            if failed is not None:
                raise self._root_failure(failed, on_event)
            self._release(on_hold)
        return [rank.answer for rank in self._ranks if rank.answer is not None]

    def _handle(self, rank: _Rank, on_event: OnEvent) -> None:
        for event in rank.receive():
            if event["event"] == "hold":
                rank.held, self._hold = True, event["at"]
            elif event["event"] == "done":
                rank.answer = event
            elif event["event"] == "failed":
                rank.failure = event["message"]
            else:
                on_event(rank.rank, event)

    def _release(self, on_hold: Callable[[str], None]) -> None:
        """Release the ranks from a hold once all have reached it."""
        if not all(rank.held for rank in self._ranks):
            return
        on_hold(self._hold)
        for rank in self._ranks:
            rank.held = False
            rank.send(_RELEASE)

    def _root_failure(self, first: _Rank, on_event: OnEvent) -> RankFailedError:
        """Return the failure that caused the others: of a rank that a signal ended, if there is one, else ``first``'s.

        Events that the other ranks still send are handled meanwhile.
        """
        until = time.monotonic() + _AFTERMATH_S
        ended = False
        while not ended and time.monotonic() < until:
            ended = all(rank.process.poll() is not None for rank in self._ranks)
            for key, _ in self._selector.select(0.0 if ended else 0.05):
                self._handle(key.data, on_event)
                if key.data.failure:
                    self._selector.unregister(key.fileobj)
        killed = [rank for rank in self._ranks if (rank.process.poll() or 0) < 0]
        rank = killed[0] if killed else first
        code = rank.process.poll()
        why = f"ended by signal {-code}" if code is not None and code < 0 else rank.failure or "it ended"
        return RankFailedError(rank.rank, why, rank.tail())


def _ignore(*_: Any) -> None:
    """Do nothing, for events and holds that need no action."""


class _Rank:
    """One rank's process, its pipes and its log."""

    def __init__(
        self, program: partial[NoReturn], preload: Callable[..., Any], link: Link, rank: int, log: Path
    ) -> None:
        self.rank, self.log = rank, log
        log.write_bytes(b"")
        self.process = ForkedProcess(program, link.namespaces(rank), log, preload)
        self.held = False
        self.answer: dict[str, Any] | None = None
        self.failure: str | None = None
        self._partial = b""

    @property
    def answers(self) -> FileIO:
        return self.process.stdout

    def send(self, line: bytes) -> None:
        try:
            self.process.stdin.write(line)
        except BrokenPipeError:
            self.failure = "it is gone"

    def receive(self) -> list[dict[str, Any]]:
        """Return the events received. The end of the process is noted as a failure."""
        received = os.read(self.answers.fileno(), _CHUNK)
        if not received:
            self.failure = self.failure or "it ended"
        *lines, self._partial = (self._partial + received).split(b"\n")
        return [json.loads(line) for line in lines]

    def tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_LINES:])


class _ParentGone(Exception):
    """Standard input ended."""


class Channel:
    """A rank's lines to and from its parent."""

    def __init__(self, commands: TextIO, answers: TextIO) -> None:
        self._commands, self._answers = commands, answers

    def receive(self) -> str:
        line = self._commands.readline()
        if not line:
            raise _ParentGone
        return line

    def send(self, event: str, **more: Any) -> None:
        self._answers.write(json.dumps({"event": event, **more}) + "\n")
        self._answers.flush()

    def hold(self, at: str) -> None:
        """Wait until all ranks are here and the parent releases them together."""
        self.send("hold", at=at)
        self.receive()


def _serve(make: Callable[[Channel], Any], group: dict[str, Any], commands: TextIO, answers: TextIO) -> NoReturn:
    """Join the process group, call functions until the parent is gone, and report every failure to it."""
    # The parent handles Ctrl-C in the terminal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(commands, answers)
    code = 0
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", **group)
        lasting, answer = make(channel), None
        while True:
            channel.send("done", **(answer or {}))
            # A message of the parent is as trusted as the parent.
            function, arguments = pickle.loads(base64.b64decode(channel.receive()))
            answer = function(lasting, **arguments)
    except (_ParentGone, BrokenPipeError):
        pass
    except Exception as error:  # noqa: BLE001 - the parent reports every failure
        traceback.print_exc()
        channel.send("failed", message=f"{type(error).__name__}: {error}")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of a broken process group must not keep the process alive.
    os._exit(code)


class ForkedProcess:
    """A process and a session of its own that calls ``run(commands, answers)`` in ``namespaces``.

    It is forked from one that has imported its module already, so that PyTorch is loaded once: `multiprocessing`'s fork
    server, which imports the module of ``preload``, by default ``run``, of the first process; later ones import what
    else they need themselves. `stdin` and `stdout` are the parent's ends of its commands and answers, unbuffered; its
    standard output and error are appended to ``log``. It is killed, with its process group, when this process ends,
    however that ends; without pidfds (Linux before 5.3, other systems) only when it ends in an orderly way.
    """

    def __init__(
        self,
        run: Callable[[TextIO, TextIO], object],
        namespaces: NodeNamespaces,
        log: Path,
        preload: Callable[..., Any] | None = None,
    ) -> None:
        first = preload or run
        _start_server((first.func if isinstance(first, partial) else first).__module__)
        commands, stdin = _processes.Pipe(duplex=False)
        stdout, answers = _processes.Pipe(duplex=False)
        arguments = (pickle.dumps(run), namespaces, os.getpid(), commands, answers, str(log))
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

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # the fork server tells of an end a little later
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Kill it, wait for its end, and close its pipes. May be called again."""
        self.kill()
        self._process.join()
        self.stdin.close()
        self.stdout.close()


def _start_server(module: str) -> None:
    """Start the fork server, unless there is one: with one thread for what counts threads when it is imported."""
    threads, folder = os.environ.get("OMP_NUM_THREADS"), tempfile.gettempdir()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if len(folder) > _LONGEST:
        tempfile.tempdir = "/tmp"
    # It imports the modules before it ignores Ctrl-C, which a terminal sends to it, too: with the signal blocked from
    # the start there is no traceback of an import. The resource tracker, which it needs, would unblock the signal.
    resource_tracker.ensure_running()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        _processes.set_forkserver_preload([__name__, module, OPTIMIZERS_IMPORT])
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        tempfile.tempdir = folder
        if threads is None:
            del os.environ["OMP_NUM_THREADS"]


def _main(
    pickled: bytes, namespaces: NodeNamespaces, parent_pid: int, commands: Connection, answers: Connection, log: str
) -> None:
    os.setsid()
    try:
        to_log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    except FileNotFoundError:
        # The server's folder is removed when the parent ends: it was interrupted while this process was about to start.
        raise SystemExit(1) from None
    for number in (1, 2):
        os.dup2(to_log, number)
    os.close(to_log)
    namespaces.enter()
    # Only a process of one thread may enter a user namespace.
    _end_with(parent_pid)
    run = pickle.loads(pickled)
    # Imported objects stay. Traversing them, which copies their pages, would be most of a collection's work here.
    gc.freeze()
    run(os.fdopen(os.dup(commands.fileno())), os.fdopen(os.dup(answers.fileno()), "w"))


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
