"""Run a function as several ranks, in processes over gloo or in threads over a loopback transport."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import inspect
import io
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thinwire.collectives import LoopbackTransport, SharedMemoryTransport, Transport

# A fork server that has imported torch already: a test of two ranks costs a tenth of a second instead of five.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(
    [
        *("torch", "torch.distributed", "torch.nn.parallel", "torch.distributed.fsdp", "thinwire"),
        *("thinwire.pipeline.stage", "harness", "attachments", "pytest", "hypothesis", "sklearn.datasets"),
    ]
)

_STACKS_AT = 0.95
"""Of its time, after which a rank that has given no answer says where it is."""


_TRIES = 3
"""Times that ranks are started if gloo cannot join them."""


class RankError(AssertionError):
    """A rank raised; its traceback is the message."""


def run_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    timeout_s: float = 100.0,
    group_timeout_s: float = 20.0,
    may_die: bool = False,
    backend: str = "gloo",
) -> list[Any]:
    """``[function(rank, *args) for each rank]``, each in a process of its own with a process group, of gloo or another.

    ``function`` must be at the top of a module. With ``may_die`` a rank that dies without an answer gives None, and one
    that raises gives the exception's text as an ``Exception``.
    """
    run = partial(_run_ranks, function, num_ranks, args, timeout_s, group_timeout_s, may_die, backend)
    for _ in range(_TRIES - 1):
        try:
            return run()
        except RankError as error:
            if not _never_met(str(error)):
                raise
            sys.stderr.write(f"ranks did not find each other, and are started anew: {error}\n")
    return run()


def on_ranks(num_ranks: int | None = None, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a function of a rank, and of what pytest gives it, a test that calls it on so many ranks.

    Its parameter ``size`` is that number, or says it where it is not given here. ``options`` are those of `run_ranks`.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        known = {"size": num_ranks} if num_ranks and "size" in inspect.signature(function).parameters else {}

        def start(given: dict[str, Any]) -> None:
            call = partial(_on_a_rank, function.__module__, function.__name__, given | known)
            run_ranks(call, num_ranks or given["size"], **options)

        return _as_test(function, start, known)

    return decorate


def on_threads(num_ranks: int, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The same for a function of a transport, called in so many threads."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        return _as_test(function, lambda given: run_threads(partial(function, **given), num_ranks, **options))

    return decorate


def _as_test(
    function: Callable[..., None], start: Callable[[dict[str, Any]], Any], known: Collection[str] = ()
) -> Callable[..., None]:
    """A test that asks pytest for the function's arguments but the first and those known, and starts it with them."""

    def test(**given: Any) -> None:
        start(given)

    signature = inspect.signature(function)
    test.__name__, test.__qualname__, test.__doc__ = function.__name__, function.__qualname__, function.__doc__
    test.__module__ = function.__module__
    asked = [p for p in list(signature.parameters.values())[1:] if p.name not in known]
    vars(test).update(__signature__=signature.replace(parameters=asked), on_a_rank=function)
    return test


def _on_a_rank(module: str, name: str, given: dict[str, Any], rank: int) -> None:
    """What a process finds by its names: pickled by reference it would be the test."""
    getattr(importlib.import_module(module), name).on_a_rank(rank, **given)


def _never_met(error: str) -> bool:
    """Whether gloo could not join the ranks: on a busy machine one now and then waits in vain for another's address."""
    waited = "ait timeout" in error and "ProcessGroupGloo(" in error
    connecting = re.search(r"\(most recent call first\):\n.*in (?:_new_process_group_helper|gloo_backend)", error)
    return waited or connecting is not None or "Gloo connectFullMesh failed" in error


def _run_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    args: tuple[Any, ...],
    timeout_s: float,
    group_timeout_s: float,
    may_die: bool,
    backend: str,
) -> list[Any]:
    ready = []
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(num_ranks):
            mine, theirs = _processes.Pipe(duplex=False)
            job = (function, rank, num_ranks, args, folder, timeout_s, group_timeout_s, theirs, backend)
            process = _processes.Process(target=_rank_main, args=job, daemon=True)
            process.start()
            theirs.close()
            ready.append(mine)
            processes.append(process)
        try:
            answers = _collect(ready, timeout_s, folder)
        finally:
            for process in processes:
                process.join(0.1 if may_die else 2.0)
                if process.is_alive():
                    os.kill(process.pid or 0, signal.SIGKILL)
                    process.join()
    if not may_die:
        for rank, answer in enumerate(answers):
            if answer is None or answer[0] == "error":
                raise RankError(f"rank {rank}: {answer[1] if answer else 'died without an answer'}")
        return [answer[1] for answer in answers if answer]
    return [None if a is None else Exception(a[1]) if a[0] == "error" else a[1] for a in answers]


def _collect(pipes: list[Connection], timeout_s: float, folder: str) -> list[tuple[str, Any] | None]:
    answers: list[tuple[str, Any] | None] = [None] * len(pipes)
    waiting = dict(zip(pipes, range(len(pipes)), strict=True))
    deadline = time.monotonic() + timeout_s
    while waiting:
        done = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            silent = sorted(waiting.values())
            stacks = "".join(f"\n\nrank {rank} was at\n{_stacks(folder, rank).read_text()}" for rank in silent)
            raise RankError(f"ranks {silent} gave no answer within {timeout_s} s{stacks}")
        for pipe in done:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                answers[rank] = torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
            except EOFError:
                answers[rank] = None
    return answers


def _stacks(folder: str, rank: int) -> Path:
    """Where a rank says what its threads were doing, if it is still at it shortly before its time is over."""
    path = Path(folder, f"stacks{rank}")
    path.touch()
    return path


def _rank_main(
    function: Callable[..., Any],
    rank: int,
    num_ranks: int,
    args: tuple[Any, ...],
    folder: str,
    timeout_s: float,
    group_timeout_s: float,
    pipe: Connection,
    backend: str,
) -> None:
    # Else a collection looks through all that was imported, and copies it.
    gc.freeze()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    stacks = _stacks(folder, rank).open("w")
    faulthandler.dump_traceback_later(_STACKS_AT * timeout_s, file=stacks)
    try:
        timeout = timedelta(seconds=group_timeout_s)
        store = dist.FileStore(os.path.join(folder, "store"), num_ranks)
        dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout)
        answer = ("ok", function(rank, *args))
    except BaseException:  # noqa: BLE001 - the test gets it
        answer = ("error", traceback.format_exc())
    try:
        # By value: a tensor sent as such is a handle on memory that ends with this process.
        buffer = io.BytesIO()
        torch.save(answer, buffer)
        pipe.send_bytes(buffer.getvalue())
    finally:
        pipe.close()
        # Tearing gloo down can wait for a dead peer; a test has its answer by now.
        os._exit(0)


def run_threads(
    function: Callable[[Any], Any], num_ranks: int, timeout_s: float = 30.0, node_of: Callable[[int], int] | None = None
) -> list[Any]:
    """``[function(transport) for each rank]``, in threads, over a loopback transport. Raises what a rank raised.

    With ``node_of``, which names each rank's node, ranks of one node share memory.
    """
    transports = LoopbackTransport.world(num_ranks, timeout_s)
    answers: list[Any] = [None] * num_ranks
    errors: list[BaseException | None] = [None] * num_ranks

    def run(rank: int) -> None:
        try:
            transport: Transport = transports[rank]
            if node_of is not None:
                identity = torch.full((16,), node_of(rank), dtype=torch.uint8)
                transport = SharedMemoryTransport(transport, timedelta(seconds=timeout_s), identity=identity)
            answers[rank] = function(transport)
        except BaseException as error:  # noqa: BLE001 - raised below
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for rank, thread in enumerate(threads):
        thread.join(timeout_s + 10.0)
        if thread.is_alive():
            raise RankError(f"rank {rank} did not end within {timeout_s} s")
    for error in errors:
        if error is not None:
            raise error
    return answers
