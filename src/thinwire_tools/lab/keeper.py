"""The process that keeps a lab's network namespaces alive, and takes everything down with it.

Started by `thinwire_tools.lab.network.Network` as a script (the standard library only: no PyTorch is loaded), in a
session of its own. It makes one network namespace per node and one for the hub and keeps them by file descriptors
alone: they have no name in the file system, so when this process and the processes inside them are gone, the kernel
removes the namespaces with all their interfaces.

It ends when its standard input ends or when the process that started it ends. That process is watched through a
pidfd rather than ``PR_SET_PDEATHSIG``, which fires when the *thread* that created the child ends. Before it exits it
kills every process that is inside one of its namespaces, so a rank that made a session of its own, or a grandchild
that outlived its rank, does not keep a namespace alive.

The keeper may be killed itself. A second process, which it forks once the namespaces exist, watches the keeper through
a pidfd and does the same if the keeper ends without having done so.

In any case the kernel has the last word: the processes that `Network.popen` starts are in a PID namespace, whose
first process is another fork of the keeper. It ends with the keeper, and all processes of the namespace with it. A user
who is not root has no right to start processes there; where keeper and guard are killed at once, `Network.close` does
their work then.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
CLONE_NEWPID = 0x20000000


def unshare(flags: int, what: str) -> None:
    """Run Linux ``unshare(2)``; `OSError` names ``what`` failed. (``os.unshare`` needs Python 3.12.)"""
    if ctypes.CDLL(None, use_errno=True).unshare(flags) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot make a {what}: {os.strerror(code)}")


def become_root_of_user_namespace() -> None:
    """Enter a new user namespace in which this user is root, with the right to make network namespaces."""
    user, group = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER, "user namespace")
    for name, line in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)


def new_network_namespace() -> int:
    """Return a file descriptor of a new network namespace; this process moves into it."""
    unshare(CLONE_NEWNET, "network namespace")
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def make(num_nodes: int) -> dict[str, Any]:
    """Make all namespaces; this process ends up in the hub's. Return where they are."""
    mode = "root"
    try:
        unshare(CLONE_NEWNET, "network namespace")
    except OSError as refused:
        mode = "user namespace"
        try:
            become_root_of_user_namespace()
        except OSError as error:
            raise OSError(error.errno, f"{refused.strerror}; {error.strerror}", error.filename) from error
    nodes = [new_network_namespace() for _ in range(num_nodes)]
    return {"mode": mode, "nodes": nodes, "hub": new_network_namespace()}


def kill_inside(namespaces: set[tuple[int, int]]) -> int:
    """Send SIGKILL to every other process whose network namespace is one of ``namespaces``; return their number."""
    killed = 0
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        # A process may end while it is looked at, and other users' processes may not be looked at.
        with contextlib.suppress(FileNotFoundError, PermissionError, ProcessLookupError):
            status = os.stat(f"/proc/{name}/ns/net")
            if (status.st_dev, status.st_ino) in namespaces:
                os.kill(int(name), signal.SIGKILL)
                killed += 1
    return killed


def empty(descriptors: list[int]) -> None:
    """Kill until two looks, 20 ms apart, find nobody inside (a process may fork, or enter, between looks)."""
    statuses = [os.fstat(fd) for fd in descriptors]
    namespaces = {(status.st_dev, status.st_ino) for status in statuses}
    quiet = 0
    while quiet < 2:
        quiet = 0 if kill_inside(namespaces) else quiet + 1
        if quiet < 2:
            time.sleep(0.02 if quiet else 0.002)


def fork_until_end(then: Callable[[], None]) -> int:
    """Fork a process that waits until this one ends, and calls ``then``; return its process id."""
    keeper = os.pidfd_open(os.getpid())
    if child := os.fork():
        os.close(keeper)
        return child
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the first process of a namespace inherits orphans
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):  # or a reader of the keeper's output would wait for this process
            os.dup2(nothing, stream)
        select.select([keeper], [], [])
        then()
    finally:
        os._exit(0)


def wait_for_end(parent: int) -> None:
    """Return when standard input ends or the process behind the pidfd ``parent`` does."""
    waiting = select.poll()
    waiting.register(0, select.POLLIN)
    waiting.register(parent, select.POLLIN)
    while True:
        for fd, _ in waiting.poll():
            if fd == parent or not os.read(0, 4096):
                return


def say(answer: dict[str, Any]) -> None:
    """Write one line of JSON to the process that waits for it."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    parent_pid, num_nodes = int(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        parent = os.pidfd_open(parent_pid)
        if os.getppid() != parent_pid:
            return
        made = make(num_nodes)
    except OSError as error:
        say({"refused": f"{error.strerror}{f': {error.filename}' if error.filename else ''}"})
        return
    try:
        fork_until_end(lambda: empty([*made["nodes"], made["hub"]]))  # the guard, for when this process is killed
        if made["mode"] == "root":
            unshare(CLONE_NEWPID, "PID namespace")
            made["first_process"] = fork_until_end(lambda: None)
        say(made)
        wait_for_end(parent)
    finally:
        empty([*made["nodes"], made["hub"]])


if __name__ == "__main__":
    main()
