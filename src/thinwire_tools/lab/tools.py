"""The programs that a lab is made with: tools of the system, and scripts of its own.

``ip`` and ``tc`` of iproute2, ``nsenter`` and ``unshare`` of util-linux are present wherever containers are and need no
Python package. The latter two enter a namespace and then *become* the command, so a rank's signals and its exit status
are the command's own; and no thread of this process ever changes its own namespace.
"""

from __future__ import annotations

import errno
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thinwire_tools.exits import UNAVAILABLE, CommandError

PACKAGES = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "unshare": "util-linux", "cat": "coreutils"}
# Debian keeps these out of an ordinary user's PATH.
SYSTEM_DIRECTORIES = ("/usr/sbin", "/sbin", "/usr/bin", "/bin")
TOOL_TIMEOUT_S = 30.0
ANSWER_TIMEOUT_S = 20.0
# Errors of the kernel while it has no memory for another process. execve says EFAULT where it finds no page for the
# arguments. The tool has not run yet, so that it can be started again.
PASSING = (errno.EAGAIN, errno.ENOMEM, errno.EFAULT)
STARTS = 5
BETWEEN_STARTS_S = 0.2
USER_NAMESPACE_SETTINGS = (
    ("user/max_user_namespaces", "0", "user.max_user_namespaces=10000"),
    ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns=0"),
)


class LabUnavailableError(CommandError, RuntimeError):
    """A slow network cannot be made here; the message says what is missing and what to do."""

    exit_code = UNAVAILABLE


def find(tool: str) -> str:
    """Return the path of ``tool``.

    Raises:
        LabUnavailableError: it is not installed; names the package that has it.
    """
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *SYSTEM_DIRECTORIES])
    executable = shutil.which(tool, path=path)
    if executable is None:
        package = PACKAGES[tool]
        raise LabUnavailableError(
            f"the command `{tool}` is missing: install the package {package} (Debian, Ubuntu: apt install {package})"
        )
    return executable


def call(inside: Sequence[str], tool: str, arguments: Sequence[str], *, lines: Sequence[str] = ()) -> str:
    """Run ``tool`` behind the prefix ``inside`` (which enters a namespace); return its standard output.

    ``lines`` are its standard input: with ``-batch -`` they are one command each.

    Raises:
        LabUnavailableError: it could not be started, or it failed; the message has its own words and their meaning.
    """
    script = "".join(line + "\n" for line in lines)
    done = _run([*inside, find(tool), *arguments], script)
    if done.returncode != 0:
        raise LabUnavailableError(f"`{tool}` failed: {done.stderr.strip()}{_missing_module(done.stderr, script)}")
    return done.stdout


def _run(command: Sequence[str], script: str) -> subprocess.CompletedProcess[str]:
    """Run ``command`` with ``script`` as its standard input; start it again while the kernel has no memory for it."""
    starts = 0
    while True:
        try:
            return subprocess.run(command, input=script, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S)
        except OSError as error:
            starts += 1
            if error.errno not in PASSING or starts == STARTS:
                raise LabUnavailableError(f"`{command[0]}` could not be started: {error.strerror}") from error
        time.sleep(BETWEEN_STARTS_S)


def _missing_module(error: str, script: str) -> str:
    """Return the remedy for an error of ``ip`` or ``tc``, from the kernel's words and from the script."""
    unknown = ("not supported", "Unknown device type", "No such file", "qdisc kind is unknown")
    for asked, module in (("tbf", "sch_tbf"), ("type bridge", "bridge"), ("type veth", "veth")):
        if asked in script and any(words in error for words in unknown):
            return f" (this kernel may lack the module {module}: try `modprobe {module}` as root)"
    return ""


def refused(error: str) -> LabUnavailableError:
    """Return the error of a kernel that refused the namespaces with ``error``, and the settings that forbid them."""
    blocked = []
    for name, forbidding, setting in USER_NAMESPACE_SETTINGS:
        file = Path("/proc/sys") / name
        if file.exists() and file.read_text().strip() == forbidding:
            blocked.append(f"`sysctl -w {setting}`")
    remedies = "run as root"
    if blocked:
        remedies += f", or let users make user namespaces: {' and '.join(blocked)} as root"
    return LabUnavailableError(
        f"{error}. To do: {remedies}; in a container, start it with --cap-add SYS_ADMIN --cap-add NET_ADMIN "
        "--security-opt seccomp=unconfined --security-opt apparmor=unconfined (or --privileged)"
    )


def start(script: Sequence[str], *, inside: Sequence[str], what: str) -> subprocess.Popen[str]:
    """Start one of the lab's own scripts: isolated from the environment, and from the terminal's signals."""
    try:
        return subprocess.Popen(
            [*inside, sys.executable, "-I", "-S", *script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
    except OSError as error:
        raise LabUnavailableError(f"{what} of the lab cannot be started: {error}") from error


def answer(process: subprocess.Popen[str], what: str) -> dict[str, Any]:
    """Return one line of JSON from one of the lab's own processes.

    Raises:
        LabUnavailableError: the process ended or did not answer in time.
    """
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], ANSWER_TIMEOUT_S)
    line = process.stdout.readline() if ready else ""
    if not line.endswith("\n"):
        raise LabUnavailableError(f"{what} of the lab gave no answer (exit status {process.poll()})")
    return json.loads(line)
