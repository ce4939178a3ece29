"""Starting the lab's own scripts, and reading their answers."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from thinwire_tools.lab import tools

ANSWER_TIMEOUT_S = 20.0


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
        raise tools.LabUnavailable(f"{what} of the lab cannot be started: {error}") from error


def answer(process: subprocess.Popen[str], what: str) -> dict[str, Any]:
    """Return one line of JSON from one of the lab's own processes.

    Raises:
        LabUnavailable: the process ended or did not answer in time.
    """
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], ANSWER_TIMEOUT_S)
    line = process.stdout.readline() if ready else ""
    if not line.endswith("\n"):
        raise tools.LabUnavailable(f"{what} of the lab gave no answer (exit status {process.poll()})")
    return json.loads(line)
