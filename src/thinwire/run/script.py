"""A user's training script, run in this process as python would run it."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from thinwire.exits import USAGE, CommandError


class ScriptNotFound(CommandError):
    """There is no such script; the message says what to give."""

    exit_code = USAGE


def run_script(command: Sequence[str]) -> None:
    """Run ``train.py args`` or ``-m package.module args`` here, as ``python`` would.

    Raises:
        ScriptNotFound: there is no such script.
        SystemExit: the script ended itself, or was ended.
    """
    command = list(command)
    if Path(command[0]).name.startswith("python") and len(command) > 1:
        # As `thinwire lab` is called: the interpreter is this one.
        command = command[1:]
    before = sys.argv, list(sys.path)
    try:
        if command[0] == "-m" and len(command) > 1:
            sys.argv = command[1:]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
            return
        path = Path(command[0])
        if not path.is_file():
            raise ScriptNotFound(
                f"there is no script {command[0]!r}: give what python would run, -- train.py --epochs 1"
            )
        sys.argv = command
        sys.path.insert(0, str(path.resolve().parent))
        runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before
